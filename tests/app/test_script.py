"""Scripts of `--dry-run`, executed locally and compared with real runs."""

from __future__ import annotations

import os
import shlex
import subprocess
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import pytest

from launcher.app.apply import apply
from launcher.app.script import render_script
from launcher.core.domain import Answer, Argv, Inventory
from launcher.core.errors import NodeError
from launcher.core.plan import Plan, split_waves
from launcher.tools.host import HostFacts
from launcher.tools.shipped import certificates, node_files
from tests import golden
from tests import plan_case as case
from tests.fakes import FakeTransport
from tests.plan_case import Case

pytestmark = pytest.mark.processes

# Replaces everything that reaches a node. A POSIX shell parses the arguments of `ssh`, as on a
# node.
_STUB = """#!/bin/sh
PATH=/usr/bin:/bin
name=${0##*/} options=
if [ "$name" = ssh ]; then
  while [ "$#" -gt 2 ]; do options="$options $1"; shift; done
  login=$1
  eval "set -- $2"
else
  login=local
  set -- "$name" "$@"
fi
file=$(mktemp -p "$SENT")
cat >"$file.stdin"
printf '%s\\0' "$login" "$options" "$@" >"$file"
echo "$file" >>"$SENT/order"
[ "$login" != "$FAIL" ]
"""


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A command sent by the script."""

    login: str
    options: str
    argv: Argv
    stdin: bytes


class Shell:
    """Runs scripts and records every command that would reach a node."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin, self.out = folder, folder / "bin", folder / "sent"
        for path in (self.bin, self.out):
            path.mkdir(parents=True)
        for name in ("ssh", "sh", "docker", "sudo"):
            (self.bin / name).write_text(_STUB)
            (self.bin / name).chmod(0o755)
        # `vlaunch payload` has its own test.
        (folder / "payload.tar").write_bytes(node_files.payload_tar())
        (self.bin / "vlaunch").write_text(
            f'#!/bin/sh\n[ "$*" = payload ] && exec cat {folder}/payload.tar\n'
        )
        (self.bin / "vlaunch").chmod(0o755)

    def run(self, text: str, *, fail: str = "-", piped: bool = False) -> tuple[int, list[Sent]]:
        """Execute a script in another folder; return exit code and sent commands, in order."""
        path = self.folder / "script.sh"
        path.write_text(text)
        env = {
            **case.VALUES,
            "RAY_AUTH_TOKEN": case.TOKEN,
            "PATH": f"{self.bin}:{os.defpath}",
            "SENT": str(self.out),
            "FAIL": fail,
        }
        argv = ["/bin/bash", "-s"] if piped else ["/bin/bash", str(path)]
        received = text.encode() if piped else b""
        done = subprocess.run(
            argv,
            env=env,
            cwd=self.folder,
            input=received,
            capture_output=True,
            timeout=30,
            check=False,
        )
        assert done.stderr == b""
        order = self.out / "order"
        return done.returncode, [
            self._read(Path(line)) for line in order.read_text().splitlines()
        ] if order.exists() else []

    def _read(self, path: Path) -> Sent:
        login, options, *argv = path.read_bytes().decode().split("\0")[:-1]
        return Sent(
            login=login,
            options=options.strip(),
            argv=tuple(argv),
            stdin=Path(f"{path}.stdin").read_bytes(),
        )


@pytest.fixture(params=case.names())
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    """Every case folder in turn."""
    return _open(request.param, tmp_path, monkeypatch)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """A shell that reaches no node."""
    return Shell(tmp_path / "elsewhere")


def _open(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    for key, value in case.VALUES.items():
        monkeypatch.setenv(key, value)
    return case.open_case(name, folder / name)


def test_the_script_is_as_expected(opened: Case) -> None:
    """Case folders have the expected script."""
    text = render_script(opened.inventory, opened.plans()).replace(str(opened.folder), "FOLDER")

    golden.check(case.CASES / opened.name / "expected.sh", text)


def test_the_script_sends_the_same_commands(opened: Case, shell: Shell) -> None:
    """The same argv and standard input to the same nodes, wave by wave; gates change nothing."""
    plans = opened.plans()
    code, by_script = shell.run(render_script(opened.inventory, plans))
    if opened.observed.get("offline"):
        changes = [
            step.command
            for plan in plans
            for stage in plan.stages
            for wave in split_waves(stage.steps)
            for step in wave
        ]
    else:
        opened.run()
        changes = opened.world.changes
    logins = {node.name: _login(opened.inventory, node.name) for node in opened.inventory.nodes}
    by_run = [
        Sent(
            login=logins[c.node][0],
            options=logins[c.node][1],
            argv=c.argv,
            stdin=c.stdin() if c.stdin else b"",
        )
        for c in changes
    ]
    by_script = [replace(sent, stdin=b"") if _is_certificate(sent) else sent for sent in by_script]

    assert code == 0
    assert (by_run == []) is bool(opened.observed.get("nothing"))
    assert _waves(plans, by_script) == _waves(plans, by_run)


def test_the_script_issues_valid_certificates(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both vlaunch and `openssl verify` accept them."""
    example = _open("cpu-derived-image", tmp_path, monkeypatch)
    code, commands = shell.run(render_script(example.inventory, example.plans()))
    stored = {
        (sent.login, sent.argv[5]): sent.stdin.decode()
        for sent in commands
        if _is_certificate(sent)
    }
    facts = {}
    for node in example.inventory.nodes:
        login, _ = _login(example.inventory, node.name)
        authority, own = stored[login, "AGENT_CA"], stored[login, "AGENT_CERTIFICATE"]
        public, key, _ = own.partition("-----BEGIN PRIVATE KEY-----")
        facts[node.name] = HostFacts(
            secret_names=certificates.SECRET_NAMES, certificates=authority + public
        )
        (tmp_path / "ca.pem").write_text(authority)
        (tmp_path / "own.pem").write_text(own)
        for purpose in ("sslserver", "sslclient"):
            command = f"openssl verify -x509_strict -purpose {purpose} -CAfile ca.pem own.pem"
            subprocess.run(command.split(), cwd=tmp_path, check=True, capture_output=True)
        assert key

    assert code == 0
    assert certificates.renewal_reasons(example.inventory, facts, datetime.now(timezone.utc)) == {}


def test_the_script_is_valid_and_has_no_secret(opened: Case) -> None:
    """`bash -n` accepts it; it has neither values of secrets nor hashes of them."""
    text = render_script(opened.inventory, opened.plans())
    done = subprocess.run(
        ["/bin/bash", "-n"], input=text.encode(), capture_output=True, check=False
    )

    assert (done.returncode, done.stderr) == (0, b"")
    assert [value for value in (*case.VALUES.values(), case.TOKEN) if value in text] == []


def test_a_failing_step_stops_the_script(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a run: its wave finishes, and later waves are not sent."""
    result = _open("cpu-derived-image", tmp_path, monkeypatch)
    plans = result.plans()
    code, sent = shell.run(render_script(result.inventory, plans), fail="192.0.2.12")
    result.world.fail["node2", "build"] = Answer(node="node2", code=1, err="no")
    with pytest.raises(NodeError):
        list(apply(plans[1], FakeTransport(result.world.answer), sleep=lambda _: None))

    assert code != 0
    assert sorted(item.argv for item in sent) == sorted(
        command.argv for command in result.world.changes
    )


def test_the_script_can_be_piped_into_bash(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vlaunch up --dry-run | bash`: no command may consume the script as its input."""
    result = _open("cpu-derived-image", tmp_path, monkeypatch)
    text = render_script(result.inventory, result.plans())
    code, sent = shell.run(text, piped=True)

    assert code == 0
    assert len(sent) == sum(len(plan.steps) for plan in result.plans())


def test_a_secrets_command_is_quoted(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run does not use a shell for it; nor must the script."""
    result = _open("secrets-of-every-source", tmp_path, monkeypatch)
    path = result.folder / "inventory.yaml"
    path.write_text(path.read_text().replace("printenv EXTRA", "echo first && echo second"))
    result = _reload(result)
    _, sent = shell.run(render_script(result.inventory, result.plans()))
    by_script = [item.stdin for item in sent if item.argv[3] == "store" and item.argv[5] == "EXTRA"]

    assert by_script == [result.secrets["EXTRA"].reveal().encode()]


def test_a_script_with_an_existing_head_reuses_its_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker with another token than its head cannot join."""
    saved = _open("dead-worker", tmp_path, monkeypatch)
    fresh = _open("cpu-derived-image", tmp_path, monkeypatch)

    assert "openssl" not in render_script(saved.inventory, saved.plans())
    assert "openssl" in render_script(fresh.inventory, fresh.plans())


def test_notes_are_comments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of a note must not become a command."""
    result = _open("env-of-one-worker-changed", tmp_path, monkeypatch)
    plan = Plan(verb="up", stages=(), notes=("node2: env A: one\ntouch /tmp/x → two",))
    lines = render_script(result.inventory, [plan]).splitlines()

    assert [line for line in lines if "touch" in line and not line.startswith("#")] == []


def _is_certificate(sent: Sent) -> bool:
    """Return whether a command stores a certificate; those differ in every run."""
    return sent.argv[3] in ("store", "extend") and sent.argv[5] in certificates.SECRET_NAMES


def _reload(result: Case) -> Case:
    from dataclasses import replace

    from launcher.app.secrets import resolve
    from launcher.inventory.load import load

    inventory = load(result.folder / "inventory.yaml")
    return replace(
        result,
        inventory=inventory,
        secrets={**result.secrets, **resolve(inventory.secrets, result.folder)},
    )


def _login(inventory: Inventory, name: str) -> tuple[str, str]:
    node = inventory.node(name)
    if node.connection == "local":
        return "local", ""
    options = {"-p": node.ssh.port, "-i": node.ssh.identity, "-J": node.ssh.jump}
    argv = " ".join(f"{flag} {value}" for flag, value in options.items() if value)
    return (f"{node.ssh.user}@{node.host}" if node.ssh.user else node.host), argv


def _waves(plans: list[Plan], sent: list[Sent]) -> list[list[Sent]]:
    """Split sent commands into the plan's waves, sorted: their order is free."""
    sizes = [
        len(wave) for plan in plans for stage in plan.stages for wave in split_waves(stage.steps)
    ]
    rest, waves = list(sent), []
    for size in sizes:
        waves.append(sorted(rest[:size], key=repr))
        rest = rest[size:]
    return [*waves, rest]


def test_arguments_are_quoted_for_a_posix_shell(
    tmp_path: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quotes, line breaks, and characters outside the locale."""
    result = _open("nothing-changed", tmp_path, monkeypatch)
    node = result.inventory.head.name
    argv = ("é'; touch pwned; '", "a\nb\t\x01", "$(touch pwned)", "\\'&\\", "", "'")
    text = render_script(result.inventory, result.plans()).replace(
        "\nexit\n", f"\n{shlex.join(('on', node, 'echo', *argv))}\nexit\n"
    )
    code, sent = shell.run(text)

    assert (code, sent[-1].argv) == (0, ("echo", *argv))
    assert not (shell.folder / "pwned").exists()


def test_the_name_of_the_inventory_stays_in_its_comment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line break in it begins no command."""
    result = _open("nothing-changed", tmp_path, monkeypatch)
    named = replace(result.inventory, path=tmp_path / "a\ntouch pwned\r\x1b[2J.yaml")

    assert "\ntouch" not in render_script(named, result.plans())
    assert "from a touch pwned.yaml\n" in render_script(named, result.plans())
