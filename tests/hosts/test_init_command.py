"""`vlaunch init`, as run by users, on hosts in memory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import pytest

from launcher.cli import main
from launcher.cli.main import run_command
from launcher.core.domain import Answer, Inventory
from launcher.core.errors import ConnectError
from launcher.core.transport import Command
from launcher.inventory.load import load
from tests.command_line import Ran
from tests.fakes import FakeTransport

DENIED = "permission denied while trying to connect to the Docker daemon socket"


@dataclass
class Host:
    """A simulated host: address, GPUs, and whether Docker needs sudo."""

    ip: str
    gpus: int = 8
    sudo: bool = False
    interface: str = "eth0"

    def probe(self, docker: Sequence[str]) -> str:
        """Return the output of the probe."""
        address: dict[str, Any] = {
            "ifname": self.interface,
            "flags": ["UP"],
            "mtu": 1500,
            "operstate": "UP",
        }
        address["addr_info"] = [{"family": "inet", "local": self.ip, "prefixlen": 24}]
        gpus = "".join(
            f"{at}, NVIDIA H100 80GB HBM3, 81559, 0, 580.95.05, GPU-{at}\n"
            for at in range(self.gpus)
        )
        answers = not self.sudo or docker[0] == "sudo"
        parts = [
            ("home", "/home/ops", 0),
            ("user", "ops", 0),
            ("hostname", "unnamed", 0),
            ("addr", json.dumps([address]), 0),
            ("gpus", gpus or "sh: nvidia-smi: not found", 0 if gpus else 127),
            ("containers", "", 0),
            ("docker", '{"Version": "28.3.0"}' if answers else DENIED, 0 if answers else 1),
            (
                "disk",
                (
                    "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/sda1 1 1"
                    " 999999999 1% /data"
                ),
                0,
            ),
        ]
        return "".join(
            f"\n@@vlaunch {name}\n{text}\n@@vlaunch rc {code}\n" for name, text, code in parts
        )


@dataclass
class Hosts:
    """Simulated hosts, and the command line on them."""

    capsys: pytest.CaptureFixture[str]
    hosts: dict[str, Host] = field(default_factory=dict)
    missing: dict[str, ConnectError] = field(default_factory=dict)
    fleets: list[Inventory] = field(default_factory=list)
    batches: list[list[Command]] = field(default_factory=list)
    stock: str = "@@stock amd 0\n@@stock images\n\n@@stock end\n"

    def run(self, *args: str) -> Ran:
        """Run `vlaunch init` with these arguments."""
        self.capsys.readouterr()
        code = run_command(["init", *args])
        return Ran(code, *self.capsys.readouterr())

    def answer(self, command: Command) -> Answer | None:
        """Answer the only query; any other command, and so any change, fails the test."""
        host, text = self.hosts[command.node], command.argv[3]
        if text == "probe":
            docker = ("sudo", "-n", "docker") if "sudo" in command.argv else ("docker",)
            return Answer(node=command.node, code=0, out=host.probe(docker) + self.stock)
        return None


@pytest.fixture
def hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Hosts:
    """Two hosts, without an inventory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    simulated = Hosts(capsys, {"gpu01": Host("10.0.0.11"), "gpu02": Host("10.0.0.12")})

    class FakeFleet(contextlib.nullcontext["FakeFleet"]):
        """The replacement of `Fleet`."""

        def __init__(self, inventory: Inventory, **_: Any) -> None:
            super().__init__(self)
            simulated.fleets.append(inventory)

        def __enter__(self) -> FakeFleet:
            return self

        def connect(self, nodes: Iterable[str]) -> dict[str, ConnectError]:
            return {name: error for name, error in simulated.missing.items() if name in set(nodes)}

        def run(self, commands: Sequence[Command]) -> Iterator[Answer]:
            simulated.batches.append(list(commands))
            return FakeTransport(simulated.answer).run(commands)

    monkeypatch.setattr("launcher.ssh.fleet.Fleet", FakeFleet)
    return simulated


def test_it_writes_an_inventory_and_shows_the_next_command(hosts: Hosts) -> None:
    """On standard error; standard output is for data."""
    ran = hosts.run("gpu01", "gpu02")
    written = load(Path("inventory.yaml"))

    assert (ran.code, ran.out) == (0, "")
    assert [(node.host, node.ip, node.gpus) for node in written.nodes] == [
        ("gpu01", "10.0.0.11", 8),
        ("gpu02", "10.0.0.12", 8),
    ]
    assert "wrote inventory.yaml: cluster vllm, 2 hosts, nvidia, ethernet" in ran.err
    assert "`vlaunch check`" in ran.err
    assert [path.name for path in Path.cwd().iterdir()] == ["inventory.yaml"]


def test_hosts_are_queried_once(hosts: Hosts) -> None:
    """All in one batch: one round trip."""
    hosts.run("gpu[01-02]")

    assert [[command.node for command in batch] for batch in hosts.batches] == [["gpu01", "gpu02"]]


def test_a_login_without_docker_access_is_repeated_with_sudo(hosts: Hosts) -> None:
    """Only on that host; the file has the reason."""
    hosts.hosts["gpu02"].sudo = True
    ran = hosts.run("gpu01", "gpu02")
    text = Path("inventory.yaml").read_text()

    assert ran.code == 0
    assert [{command.node for command in batch} for batch in hosts.batches] == [
        {"gpu01", "gpu02"},
        {"gpu02"},
    ]
    assert [node.docker for node in load(Path("inventory.yaml")).nodes] == [
        ("docker",),
        ("sudo", "-n", "docker"),
    ]
    assert "# gpu02: the SSH user may not use Docker directly" in text


def test_an_explicit_docker_command_is_not_replaced(hosts: Hosts) -> None:
    """It is written to the file."""
    hosts.run("gpu01", "gpu02", "--docker", "sudo -n docker")

    assert len(hosts.batches) == 1
    assert {node.docker for node in load(Path("inventory.yaml")).nodes} == {
        ("sudo", "-n", "docker")
    }


def test_a_file_is_not_overwritten(hosts: Hosts) -> None:
    """No host is contacted first; --force overwrites it."""
    Path("inventory.yaml").write_text("mine\n")
    ran = hosts.run("gpu01")

    assert (ran.code, hosts.fleets) == (2, [])
    assert "already exists" in ran.err
    assert Path("inventory.yaml").read_text() == "mine\n"
    assert hosts.run("gpu01", "--force").code == 0
    assert load(Path("inventory.yaml")).head.host == "gpu01"


def test_a_file_written_meanwhile_stays(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another program during the scan."""
    answer = hosts.answer

    def meanwhile(command: Command) -> Answer | None:
        Path("inventory.yaml").write_text("mine\n")
        return answer(command)

    monkeypatch.setattr(hosts, "answer", meanwhile)
    ran = hosts.run("gpu01")

    assert ran.code == 2
    assert Path("inventory.yaml").read_text() == "mine\n"
    assert [path.name for path in Path.cwd().iterdir()] == ["inventory.yaml"]


def test_an_unreachable_host_is_an_error(hosts: Hosts) -> None:
    """For all hosts together, and no file is written."""
    for name in ("gpu01", "gpu02"):
        hosts.missing[name] = ConnectError(
            name, "cannot be reached: no route to host", hint="check the address"
        )
    ran = hosts.run("gpu01", "gpu02")

    assert (ran.code, hosts.batches) == (1, [])
    assert "error: gpu[01-02]: cannot be reached" in ran.err
    assert not Path("inventory.yaml").exists()


def test_hosts_without_a_common_network_are_an_error(hosts: Hosts) -> None:
    """With their networks, and no file is written."""
    hosts.hosts["gpu02"].ip = "10.9.0.12"
    ran = hosts.run("gpu01", "gpu02")

    assert ran.code == 2
    assert "gpu02: eth0 10.9.0.12/24" in ran.err
    assert not Path("inventory.yaml").exists()


def test_a_dash_is_standard_output(hosts: Hosts, tmp_path: Path) -> None:
    """With only the inventory on it."""
    ran = hosts.run("gpu01", "gpu02", "-o", "-")
    Path("piped.yaml").write_text(ran.out)

    assert len(load(Path("piped.yaml")).nodes) == 2
    assert not Path("inventory.yaml").exists()


def test_options_are_written(hosts: Hosts) -> None:
    """SSH options once for all nodes."""
    ran = hosts.run(
        "gpu01",
        "root@gpu02:2222",
        "--user",
        "ops",
        "--jump",
        "bastion",
        "--cluster",
        "mine",
        "--image",
        "my/vllm:1",
        "--hf-home",
        "/models",
        "--identity",
        "~/key",
        "-o",
        "mine.yaml",
    )
    written = load(Path("mine.yaml"))

    assert ran.code == 0
    assert "vlaunch check -i mine.yaml" in ran.err
    assert (written.cluster, written.image, written.head.hf_home) == (
        "mine",
        "my/vllm:1",
        "/models",
    )
    assert [(node.ssh.user, node.ssh.port, node.ssh.jump) for node in written.nodes] == [
        ("ops", None, "bastion"),
        ("root", 2222, "bastion"),
    ]
    assert {node.ssh.identity for node in written.nodes} == {str(Path.home() / "key")}
    assert Path("mine.yaml").read_text().count("identity") == 1


def test_json_is_events(hosts: Hosts) -> None:
    """With the path of the file."""
    hosts.hosts["gpu02"].gpus = 7
    ran = hosts.run("gpu01", "gpu02", "--json")
    done = next(event for event in ran.events if event["kind"] == "done")

    assert (ran.code, ran.err) == (0, "")
    assert done["data"] == {"path": "inventory.yaml", "hosts": 2, "warnings": 1}
    assert any(event["kind"] == "warning" for event in ran.events)


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("gpu01", "-o", "-", "--json"),
        ("gpu01", "gpu01"),
        ("gpu01", "-o", "nowhere/inventory.yaml"),
        ("gpu01", "-o", "."),
        ("gpu01", "--docker", "sudo docker"),
        ("gpu01", "--docker", "'"),
        ("gpu01", "--image", "Not An Image"),
        ("gpu01", "--docker", ""),
    ],
)
def test_an_invalid_request_contacts_no_host(hosts: Hosts, args: tuple[str, ...]) -> None:
    """Exit code 2, with the mistake."""
    ran = hosts.run(*args)

    assert (ran.code, hosts.fleets) == (2, [])
    assert "rror: " in ran.err
    assert "Traceback" not in ran.err


def test_it_is_a_command() -> None:
    """Under its own name."""
    assert main.COMMANDS["init"][:2] == ("launcher.hosts.init_command", "init")
    assert isinstance(main.cli.get_command(click.Context(main.cli), "init"), click.Command)
