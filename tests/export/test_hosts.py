"""`vlaunch export compose` and `systemd`: the nodes' own containers, which keep a server by
themselves.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli.main import run
from launcher.export import systemd
from launcher.payload.agent import desired
from tests import debian13, golden
from tests.export.exports import EXAMPLES, HOST_CASES

SHELLCHECK = Path(__file__).parents[2] / ".venv" / "bin" / "shellcheck"
GOLDEN = Path(__file__).parent / "golden"
PAIR = """
cluster: pair
image: vllm/vllm-openai:v0.32.0
secrets: {VLLM_API_KEY: {env: THE_KEY}, HF_TOKEN: {file: ~/hf}}
network: {interface: bond0, fabric: infiniband, hca: [mlx5_0]}
env: {PRICE: "5$ or 100%", PATTERN: 'a "b" \\c'}
mounts: ["/models:/models:ro"]
serve: {model: org/m, args: [--seed, "1"], restarts: 3, stuck: 120}
nodes:
  - {host: "gpu[01-02]", ip: "10.0.0.[1-2]", gpus: 8}
  - {host: gpu03, ip: 10.0.0.3, gpus: [2, 3], network: {hca: []}}
"""
SPLIT = ("--tp", "8", "--pp", "2")
Write = Callable[..., Path]


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """Two nodes for the server, and a third, with much that can be said."""
    path = tmp_path / "inventory.yaml"
    path.write_text(PAIR, encoding="utf-8")
    return path


@pytest.fixture
def write(pair: Path, tmp_path: Path) -> Write:
    """Export into a folder, and return that."""

    def export(kind: str, *words: str, inventory: Path = pair) -> Path:
        folder = tmp_path / kind
        assert run(["export", kind, "-i", str(inventory), "-o", str(folder), *words]) == 0
        return folder

    return export


def script(pair: Path, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what the launcher itself would send."""
    capsys.readouterr()
    assert run([*words, "-i", str(pair), "--dry-run", "--offline"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", ["compose", "systemd"])
def test_golden(kind: str, write: Write) -> None:
    """The head's file, and what brings it into place."""
    folder = write(kind, *SPLIT)
    for name in {"compose": ["gpu01.compose.yaml"], "systemd": ["gpu01.service", "install.sh"]}[
        kind
    ]:
        golden.check(GOLDEN / f"{kind}-{name}", (folder / name).read_text())


@pytest.mark.parametrize("kind", ["compose", "systemd"])
def test_the_server_is_the_one_of_serve(
    kind: str, pair: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the head's agent keeps is what `vlaunch serve` would write there, word by word."""
    folder = write(kind, *SPLIT)
    pair.write_text(PAIR.replace("cluster: pair", "cluster: pair\nray: none"))
    said = script(pair, capsys, "serve", *SPLIT)
    (found,) = [
        line
        for line in said.splitlines()
        if line.lstrip().startswith("printf %s") and "argv" in line
    ]
    words = shlex.split(found.partition("|")[0].replace('"$(date +%s)"', "0.0"))
    wanted = json.loads(words[2])
    server = json.loads((folder / "server.json").read_text())

    assert server == wanted
    assert desired.read(server).api_node == "gpu01"


def options(argv: list[str]) -> dict[str, list[str]]:
    """Return the options of `docker run` with their values."""
    found: dict[str, list[str]] = {}
    for word, after in zip(argv, [*argv[1:], ""], strict=True):
        if word.startswith("--"):
            found.setdefault(word, []).append(after)
    return found


def test_a_unit_starts_the_container_of_up(
    pair: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the same devices, rights, variables and command; in the foreground, so that systemd sees
    its end, and with all that engines print, for nobody else shows it.
    """
    folder = write("systemd", *SPLIT)
    pair.write_text(
        PAIR.replace("cluster: pair", "cluster: pair\nray: none\nstate_dir: /var/lib/vlaunch")
    )
    said = script(pair, capsys, "up")
    (theirs,) = [
        shlex.split(line.rstrip(" &"))
        for line in said.splitlines()
        if "vlaunch-pair-gpu02 " in line and "docker run" in line
    ]
    ours = unit(folder / "gpu02.service", "ExecStart")
    mine, up = options(ours), options(theirs[theirs.index("run") :])

    for each in (
        "--env",
        "--device",
        "--cap-add",
        "--ulimit",
        "--gpus",
        "--tmpfs",
        "--network",
        "--volume",
    ):
        assert mine[each] == up[each], each
    assert "--detach" not in ours
    assert "--restart" not in ours
    agent, their_agent = (
        words[words.index("vllm/vllm-openai:v0.32.0") :] for words in (ours, theirs)
    )
    assert [word for word in agent if word != "--aloud"] == their_agent
    assert "--aloud" in agent


def unit(file: Path, key: str) -> list[str]:
    """Return the words of a line of a unit, as systemd splits them."""
    (line,) = [each for each in file.read_text().splitlines() if each.startswith(f"{key}=")]
    words = shlex.split(line.partition("=")[2])
    return [word.replace("$$", "$").replace("%%", "%") for word in words]


def compose(folder: Path, node: str) -> Any:
    """Return a node's file."""
    return yaml.safe_load((folder / f"{node}.compose.yaml").read_text())


def test_a_service_is_the_same_container(write: Write) -> None:
    """As the unit's, in compose's words."""
    service = compose(write("compose", *SPLIT), "gpu02")["services"]["vllm"]
    argv = unit(write("systemd", *SPLIT) / "gpu02.service", "ExecStart")
    mine = options(argv)

    env = {name: value.replace("$$", "$") for name, value in service["environment"].items()}
    assert sorted(f"{name}={value}" for name, value in env.items()) == sorted(mine["--env"])
    assert service["devices"] == ["/dev/infiniband:/dev/infiniband"]
    assert service["cap_add"] == mine["--cap-add"]
    assert service["ulimits"] == {"memlock": -1, "stack": 67108864}
    assert (service["network_mode"], service["tmpfs"]) == ("host", ["/dev/shm"])
    assert argv[-len(service["command"]) :] == service["command"]
    (gpus,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert (gpus["count"], gpus["capabilities"]) == (8, ["gpu"])


def test_only_the_head_is_told_of_the_server(write: Write) -> None:
    """And only where there is an API somebody waits for an answer; others wait for orders."""
    folder = write("compose", *SPLIT)
    head, worker = (compose(folder, name)["services"]["vllm"] for name in ("gpu01", "gpu02"))

    assert head["command"][1:5] == ["agent", "--aloud", "--server", "/etc/vlaunch/server.json"]
    assert worker["command"][1:3] == ["agent", "--aloud"]
    assert "--server" not in worker["command"]
    assert head["healthcheck"]["test"][3] == "alive"
    assert (head["healthcheck"]["retries"], head["healthcheck"]["start_period"]) == (2, "1800s")
    assert "healthcheck" not in worker
    assert not (folder / "gpu03.compose.yaml").exists()


def test_chosen_gpus_are_named(pair: Path, write: Write) -> None:
    """As Docker takes them."""
    pair.write_text(PAIR.replace("gpus: 8", "gpus: [2, 3]"))
    folder = write("compose", "--tp", "2", "--pp", "3")
    service = compose(folder, "gpu03")["services"]["vllm"]
    (gpus,) = service["deploy"]["resources"]["reservations"]["devices"]
    other = unit(write("systemd", "--tp", "2", "--pp", "3") / "gpu03.service", "ExecStart")

    assert gpus["device_ids"] == ["2", "3"]
    assert '"device=2,3"' in other


def test_the_gate_comes_first(write: Write) -> None:
    """The server of a node starts only behind a proven network."""
    services = compose(write("compose", *SPLIT), "gpu02")["services"]
    argv = services["network"]["command"]
    oneshot = unit(write("systemd", *SPLIT) / "gpu02.network", "ExecStart")

    assert services["vllm"]["depends_on"] == {
        "network": {"condition": "service_completed_successfully"}
    }
    assert services["network"]["restart"] == "no"
    assert argv[argv.index("--rank") + 1 : argv.index("--rank") + 6] == [
        "1",
        "--size",
        "2",
        "--master",
        "10.0.0.1",
    ]
    assert oneshot[-len(argv) :] == argv
    assert (
        "network"
        not in compose(write("compose", *SPLIT, "--skip-network-check"), "gpu01")["services"]
    )


def test_no_secret_is_in_any_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are files beside, by their names."""
    monkeypatch.setenv("THE_KEY", "the-very-secret")
    for kind in ("compose", "systemd"):
        folder = write(kind, *SPLIT)
        text = "".join(path.read_text() for path in folder.rglob("*") if path.is_file())
        assert "the-very-secret" not in text
        assert "secrets/RAY_AUTH_TOKEN" in text
        assert "secrets/VLLM_API_KEY" in text


def test_one_file_is_printed(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of a node; which one must be said."""
    assert run(["export", "compose", "-i", str(pair), *SPLIT, "--node", "gpu02"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["name"] == "vlaunch-pair"
    for words in ((), ("--node", "gpu03")):
        assert run(["export", "systemd", "-i", str(pair), *SPLIT, *words]) == 2
        caught = capsys.readouterr()
        assert (caught.out, "nodes: gpu01, gpu02" in caught.err) == ("", True)


def test_words_of_a_unit_stay_what_they_are() -> None:
    """systemd has its own meaning for some characters."""
    assert systemd.line(("a", "$HOME", "5%", 'a "b" \\c', "", "it's")) == (
        'a $$HOME 5%% "a \\"b\\" \\\\c" "" "it\'s"'
    )


@pytest.mark.processes
def test_the_installer_brings_files_into_place(write: Write, tmp_path: Path) -> None:
    """Private secrets, programs without leftovers, and nothing started; twice the same."""
    folder, root = write("systemd", *SPLIT), tmp_path / "root"
    text = (folder / "install.sh").read_text()
    checked = subprocess.run(
        [SHELLCHECK, "-"], input=text, capture_output=True, text=True, check=False
    )
    assert checked.stdout == ""
    (root / "bin").mkdir(parents=True)
    (root / "bin" / "systemctl").write_text('#!/bin/sh\necho "$@" >> "$LOG"\n')
    (root / "bin" / "systemctl").chmod(0o755)
    (root / "etc" / "systemd" / "system").mkdir(parents=True)
    moved = text.replace("/var/lib/vlaunch", f"{root}/state").replace(
        "/etc/systemd", f"{root}/etc/systemd"
    )
    (folder / "install.sh").write_text(moved)
    env = {**os.environ, "PATH": f"{root}/bin:{os.environ['PATH']}", "LOG": str(root / "log")}

    def install(node: str) -> int:
        return subprocess.run(
            ["sh", str(folder / "install.sh"), node], env=env, capture_output=True, check=False
        ).returncode

    assert install("gpu01") == 2
    (folder / "secrets").mkdir()
    (folder / "secrets" / "RAY_AUTH_TOKEN").write_text("x")
    assert (install("gpu09"), install("gpu01"), install("gpu01")) == (2, 0, 0)
    secret = root / "state" / "pair" / "secrets" / "RAY_AUTH_TOKEN"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(secret.parent.stat().st_mode) == 0o700
    assert (root / "state" / "pair" / "payload" / "entry.sh").exists()
    assert not (root / "state" / "pair" / "payload" / "payload").exists()
    units = sorted(path.name for path in (root / "etc" / "systemd" / "system").iterdir())
    assert units == ["vlaunch-pair-network.service", "vlaunch-pair.service"]
    assert (root / "log").read_text() == "daemon-reload\n" * 2


def docker_compose() -> list[str]:
    """Return how docker compose v2 is called here; empty where it is not there."""
    named = os.environ.get("VLAUNCH_COMPOSE", "")
    made = str(debian13.program("docker-compose") or "")
    for words in ([named], ["docker", "compose"], ["docker-compose"], [made]):
        if words[0] and shutil.which(words[0]):
            said = subprocess.run([*words, "version"], capture_output=True, text=True, check=False)
            if said.returncode == 0 and " v2" in said.stdout.replace("version 2", "version v2"):
                return words
    return []


@pytest.mark.processes
def test_compose_reads_every_example(write: Write, tmp_path: Path) -> None:
    """Without a complaint; a broken copy has one."""
    words = docker_compose()
    if not words:
        pytest.skip("no docker compose v2 here: `make machine-exports` brings it")
    for case, (name, flags) in HOST_CASES.items():
        folder = write("compose", *flags, inventory=EXAMPLES / f"{name}.yaml")
        (folder / "secrets").mkdir(exist_ok=True)
        for each in ("RAY_AUTH_TOKEN", "HF_TOKEN"):
            (folder / "secrets" / each).touch()
        for file in sorted(folder.glob("*.compose.yaml")):
            checked = subprocess.run(
                [*words, "-f", file, "config", "--quiet"],
                capture_output=True,
                text=True,
                check=False,
            )
            assert (checked.returncode, checked.stderr) == (0, ""), case
            broken = tmp_path / "broken.compose.yaml"
            broken.write_text(file.read_text().replace("network_mode:", "network_modes:"))
            assert subprocess.run(
                [*words, "-f", broken, "config", "-q"], capture_output=True, check=False
            ).returncode
        shutil.rmtree(folder)


@pytest.mark.processes
@pytest.mark.skipif(
    not Path("/usr/bin/docker").exists() or not shutil.which("systemd-analyze"),
    reason="no systemd-analyze here, or no Docker, whose unit is required",
)
def test_systemd_reads_every_example(write: Write, tmp_path: Path) -> None:
    """Without a complaint; a broken copy has one."""
    verify = ("systemd-analyze", "verify", "--man=no", "--recursive-errors=no")
    files = tmp_path / "units"
    files.mkdir()
    for name, flags in HOST_CASES.values():
        folder = write("systemd", *flags, inventory=EXAMPLES / f"{name}.yaml")
        for number, file in enumerate(
            sorted([*folder.glob("*.service"), *folder.glob("*.network")])
        ):
            (files / f"{name}-{len(flags)}-{number}.service").write_text(file.read_text())
        shutil.rmtree(folder)
    found = sorted(files.iterdir())
    checked = subprocess.run([*verify, *found], capture_output=True, text=True, check=False)

    assert (checked.returncode, checked.stderr) == (0, "")
    text = next(text for each in found if "Restart=always" in (text := each.read_text()))
    for old, new in (
        ("TimeoutStopSec=", "TimeoutStopSecs="),
        ("Type=exec", "Type=exact"),
        ("RestartSec=5", "RestartSec=soon"),
    ):
        broken = tmp_path / "broken.service"
        broken.write_text(text.replace(old, new))
        assert subprocess.run([*verify, broken], capture_output=True, check=False).returncode, new
