"""The nodes' packet filter, from the inventory and the SSH ports."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from launcher.batch.driver import rank_pool
from launcher.cli.main import run_command
from launcher.core.domain import Ports
from launcher.export.firewall import FORMATS, MP_PORTS, PURPOSES, PortRule, build_filter
from launcher.hosts.checks.ports import DYNAMIC_PORTS
from launcher.inventory.load import loads
from tests import golden
from tests.ssh import sshd

GOLDEN = Path(__file__).parent / "golden"
NODES = """\
cluster: big.one-2
image: vllm/vllm-openai:v0.32.0
ssh: {user: ops}
nodes:
  - {host: gpu01, ip: 10.0.0.11, gpus: 8}
  - {host: gpu02, ip: 10.0.0.12, gpus: 8, ssh: {port: 2222}}
"""
LOGINS = (2222, 22)
CASES = {
    "everywhere": NODES,
    "one-address": NODES + "serve: {bind: 192.0.2.7}\nports: {api: 9000, gcs: 7000}\n",
    "loopback": NODES + "serve: {bind: 127.0.0.1}\n",
    "without-ray": NODES + "ray: none\n",
    "long-name": NODES.replace("big.one-2", "a-cluster-with-a-name-of-forty-letters-x"),
}


def _text(case: str, form: str) -> str:
    return FORMATS[form](build_filter(loads(CASES[case], Path("inventory.yaml")), LOGINS))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("case", CASES)
def test_text(case: str, form: str) -> None:
    """As reviewed."""
    golden.check(GOLDEN / f"{case}.{form}", _text(case, form))


def test_every_port_has_a_description() -> None:
    """New ports of the inventory cannot be forgotten."""
    assert [field.name for field in fields(Ports) if field.name != "worker_max"] == list(PURPOSES)


def test_ports_of_ray_are_open_without_ray() -> None:
    """Other programs may use them; the agents' port stays closed."""
    closed = [
        item.purpose
        for item in build_filter(loads(CASES["without-ray"], Path("inventory.yaml")), LOGINS).closed
    ]

    assert [item for item in closed if "Ray" in item] == []
    assert "group: the nodes' agents" in closed


@pytest.mark.parametrize("case", [case for case in CASES if case != "without-ray"])
def test_only_the_endpoint_is_open(case: str) -> None:
    """For any port numbers of the inventory."""
    inventory = loads(CASES[case], Path("inventory.yaml"))
    created = build_filter(inventory, LOGINS)
    closed = {port for rule in created.closed for port in range(rule.low, rule.high + 1)}
    ports = {getattr(inventory.ports, field.name) for field in fields(Ports)}

    everywhere = inventory.api_bind([inventory.head]) == "0.0.0.0"
    assert ports - closed == ({inventory.ports.api} if everywhere else set())
    assert set(range(inventory.ports.worker_min, inventory.ports.worker_max + 1)) <= closed
    assert set(range(DYNAMIC_PORTS[0], DYNAMIC_PORTS[1] + 1)) <= closed


@pytest.mark.parametrize(
    ("ranges", "closed"),
    [
        ([], (32768, 60999)),
        ([(40000, 50000)], (32768, 60999)),
        ([(1024, 65535)], (1024, 65535)),
        ([(15000, 61000), (32768, 65000)], (15000, 65000)),
    ],
)
def test_dynamic_ports_are_closed(ranges: list[tuple[int, int]], closed: tuple[int, int]) -> None:
    """The ranges of all nodes, and the usual range, with ports of Ray that cannot be configured."""
    rule = build_filter(loads(NODES, Path("inventory.yaml")), LOGINS, ranges).closed[-1]

    assert (rule.low, rule.high) == closed


@pytest.mark.parametrize(("first", "last"), [(29501, 29508), (30000, 30007), (65530, 65535)])
def test_ports_of_batch_ranks_are_closed(first: int, last: int) -> None:
    """The whole range that a batch job searches, up to the highest port."""
    inventory = loads(f"{NODES}ports: {{mp_master: {first}}}\n", Path("inventory.yaml"))
    (rule,) = (
        rule
        for rule in build_filter(inventory, LOGINS).closed
        if rule.purpose.startswith("mp_master:")
    )

    assert rank_pool.PORT_COUNT == MP_PORTS
    assert (rule.low, rule.high) == (first, last)


def test_the_endpoint_is_open_where_it_is_bound() -> None:
    """On all addresses, on one, or on none."""
    opened = {
        case: build_filter(loads(text, Path("inventory.yaml")), LOGINS).open
        for case, text in CASES.items()
    }
    logins = (
        PortRule(low=22, high=22, purpose="SSH, from operators"),
        PortRule(low=2222, high=2222, purpose="SSH, from operators"),
    )

    assert opened["everywhere"] == (*logins, PortRule(low=8000, high=8000, purpose=PURPOSES["api"]))
    assert opened["one-address"] == (
        *logins,
        PortRule(low=9000, high=9000, purpose=PURPOSES["api"], address="192.0.2.7"),
    )
    assert opened["loopback"] == logins


@pytest.mark.parametrize("form", FORMATS)
def test_accept_rules_come_before_drop_rules(form: str) -> None:
    """The first matching rule decides."""
    lines = _text("one-address", form).splitlines()
    opened = [
        at
        for at, line in enumerate(lines)
        if re.search(r"\baccept\b|ACCEPT|ufw allow", line) and "policy" not in line
    ]
    closed = [
        at
        for at, line in enumerate(lines)
        if re.search(r"\bdrop\b|DROP|ufw deny", line) and not line.startswith("#")
    ]

    assert opened
    assert closed
    if form != "iptables":  # it has two tables in sequence
        assert max(opened) < min(closed)
    else:
        half = lines.index("COMMIT")
        assert max(at for at in opened if at < half) < min(closed)


@pytest.mark.parametrize("case", CASES)
def test_nft_accepts_it(case: str, tmp_path: Path) -> None:
    """In nft's syntax."""
    nft = shutil.which("nft") or shutil.which("nft", path="/usr/sbin:/sbin")
    if nft is None:
        pytest.skip("nft is not installed: `sudo apt-get install nftables`")
    file = tmp_path / "rules.nft"
    file.write_text(_text(case, "nft"))
    ran = subprocess.run(
        [nft, "--check", "--file", str(file)], capture_output=True, text=True, check=False
    )
    if "Operation not permitted" in ran.stderr or "must be root" in ran.stderr:
        pytest.skip("nft reads rules only for root")

    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize("form", ["iptables", "ufw"])
@pytest.mark.parametrize("case", CASES)
def test_a_shell_accepts_it(case: str, form: str) -> None:
    """All scripts are valid."""
    assert (
        subprocess.run(["sh", "-n"], input=_text(case, form), text=True, check=False).returncode
        == 0
    )


def test_the_command_contacts_no_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It only prints the rules."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "inventory.yaml"
    path.write_text(NODES)

    assert run_command(["export", "firewall", "-i", str(path), "--format", "ufw"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (_text("everywhere", "ufw"), "")


def test_ssh_stays_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inventory's port, else ~/.ssh/config's; a closed one would lock operators out."""
    for name, value in sshd.make_home(tmp_path / "home", "Host gpu*\n  Port 10022\n").items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "inventory.yaml"
    path.write_text(NODES)

    assert run_command(["export", "firewall", "-i", str(path), "--format", "ufw"]) == 0
    assert re.findall(r"ufw allow (\d+)/tcp .*SSH", capsys.readouterr().out) == ["2222", "10022"]


def test_a_front_is_for_users_and_its_metrics_are_not() -> None:
    """They need no key."""
    inventory = loads(NODES.replace("nodes:", "front: {}\nnodes:", 1), Path("inventory.yaml"))
    rules = build_filter(inventory, [22])

    assert (8443, "the front, for users") in [(rule.low, rule.purpose) for rule in rules.open]
    assert 29590 in [rule.low for rule in rules.closed]


def test_servers_behind_a_front_are_closed() -> None:
    """Only the front is open, unless the user sets an address."""
    text = CASES["everywhere"] + "front: {}\n"
    behind = build_filter(loads(text, Path("inventory.yaml")), LOGINS)
    own = loads(text + "serve: {bind: 0.0.0.0}\n", Path("inventory.yaml"))

    assert [rule.low for rule in behind.open if rule.purpose.startswith("SSH") is False] == [8443]
    assert 8000 in [rule.low for rule in behind.closed]
    assert [rule.low for rule in build_filter(own, LOGINS).open][-2:] == [8000, 8443]
