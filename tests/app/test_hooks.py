"""Hooks: selection, environment, order, and the effect of failures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.app import hooks
from launcher.app.progress import SilentPrinter
from launcher.core.domain import Answer
from launcher.core.errors import ConnectError
from launcher.core.events import Event
from launcher.serving.run_start import StartRun
from launcher.ssh.fleet import Line
from tests.command_line import SECRET, Cluster
from tests.ssh import processes

pytestmark = pytest.mark.processes

Hook = Callable[..., Path]
_TELL = 'echo "$VLAUNCH_HOOK" >>ran'


@pytest.fixture
def hook(cluster: Cluster) -> Hook:
    """Write a hook."""

    def write(
        name: str, body: str = _TELL, *, mode: int = 0o755, first: str = "#!/bin/sh\n"
    ) -> Path:
        path = cluster.path.parent / "hooks" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{first}{body}\n")
        path.chmod(mode)
        return path

    return write


def ran(cluster: Cluster) -> list[str]:
    """Return the hooks that have run, in order."""
    path = cluster.path.parent / "ran"
    return path.read_text().split() if path.exists() else []


@pytest.mark.parametrize("verb", ["up", "down"])
def test_pre_and_post_hooks(cluster: Cluster, hook: Hook, verb: str) -> None:
    """Output is shown with the hook's name; hooks of other commands do not run."""
    for name in ("pre-up", "post-up", "pre-down", "post-down", "pre-serve", "on-failure"):
        hook(name, f"{_TELL}; echo said; echo complained >&2")
    hook("README", mode=0o644)
    hook("pre-up.sh")
    done = cluster.run(verb)

    assert done.code == 0
    assert ran(cluster) == [f"pre-{verb}", f"post-{verb}"]
    assert (
        done.err.index(f"pre-{verb}: said")
        < done.err.index(f"pre-{verb}: complained")
        < done.err.index(f"post-{verb}: said")
    )
    assert done.out == ""
    assert "hooks/pre-up.sh is ignored: rename it to pre-up" in done.err


def test_the_environment_of_a_hook(
    cluster: Cluster, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cluster and command, but no secret, even from the launcher's environment."""
    monkeypatch.setenv("PRIVATE", "kept")
    hook("pre-up", "env; pwd; cat; echo $#")
    err = cluster.run("up").err

    for label in (
        "VERB=up",
        "CLUSTER=c",
        "NODES=gpu01 gpu02",
        "HEAD=gpu01",
        f"INVENTORY={cluster.path}",
    ):
        assert f"pre-up: VLAUNCH_{label}\n" in err
    assert "pre-up: PRIVATE=kept\n" in err
    assert f"pre-up: {cluster.path.parent}\n" in err
    assert "HF_TOKEN=" not in err
    assert SECRET not in err


def test_a_server_hook_knows_the_model_and_the_endpoint(
    cluster: Cluster, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first answer; a starting server has no endpoint."""
    cluster.run("up")
    hook("pre-serve", 'echo "$VLAUNCH_MODEL at $VLAUNCH_ENDPOINT"')
    hook("post-serve", 'echo "$VLAUNCH_MODEL answers at $VLAUNCH_ENDPOINT"')
    monkeypatch.setattr(StartRun, "await_answer", lambda run, replica: run.rows.update(default=[]))
    err = cluster.run("serve", "--model", "org/m", "--skip-network-check").err

    assert "pre-serve: org/m at http://10.0.0.11:8000" in err
    assert "post-serve: org/m answers at http://10.0.0.11:8000" in err
    again = cluster.run("serve", "--model", "org/m", "--skip-network-check", "--no-wait").err
    assert "pre-serve: " in again
    assert "post-serve: " not in again


def test_post_hooks_run_without_the_lock(cluster: Cluster, hook: Hook) -> None:
    """They may call `vlaunch`; pre-hooks run with the lock."""
    hook("pre-up", "exit 1")
    cluster.run("up")
    assert cluster.trace == ["hold", "free"]
    cluster.trace.clear()
    hook("pre-up", "true")
    hook("post-up", "exit 1")
    cluster.run("up")

    assert cluster.trace[0] == "hold" and cluster.trace[-1] == "free"


@pytest.mark.parametrize(
    ("body", "first", "expected"),
    [
        ("exit 3", "#!/bin/sh\n", "hook pre-up failed with exit code 3"),
        ("kill -9 $$", "#!/bin/sh\n", "hook pre-up was killed by signal 9"),
        ("x", "", "cannot start hook pre-up: exec format error"),
        ("x", "#!/no/such/shell\n", "cannot start hook pre-up: no such file or directory"),
    ],
)
def test_a_failing_pre_hook_stops_the_command(
    cluster: Cluster, hook: Hook, body: str, first: str, expected: str
) -> None:
    """Before any query to a node."""
    hook("pre-up", body, first=first)
    hook("post-up")
    done = cluster.run("up")

    assert (done.code, cluster.commands, ran(cluster)) == (1, [], [])
    assert f"error: {expected}" in done.err
    assert "--no-hooks" in done.err


@pytest.mark.parametrize("name", ["post-up", "on-failure"])
def test_other_failing_hooks_are_only_reported(cluster: Cluster, hook: Hook, name: str) -> None:
    """The exit code is the command's own."""
    hook(name, "exit 3")
    if name == "on-failure":
        cluster.world.machines["gpu02"].docker_error = "no daemon"
    done = cluster.run("up")

    assert done.code == (1 if name == "on-failure" else 0)
    assert f"warning hook {name} failed with exit code 3" in done.err


def test_failure_hooks(cluster: Cluster, hook: Hook) -> None:
    """With the first line of the error; the command's failure is unchanged."""
    hook("on-failure", 'echo "it was: $VLAUNCH_VERB: $VLAUNCH_ERROR"')
    hook("post-up")
    cluster.missing["gpu02"] = ConnectError("gpu02", "cannot be reached: no route to host")
    done = cluster.run("up")

    assert (done.code, ran(cluster)) == (1, [])
    assert "on-failure: it was: up: gpu02: cannot be reached: no route to host" in done.err
    assert "error: gpu02: cannot be reached: no route to host" in done.err


def test_a_wrong_request_and_a_busy_cluster_are_no_failures(
    cluster: Cluster, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing was changed."""
    hook("pre-up")
    hook("on-failure")
    cluster.lock = [Line(node="gpu01", text='held {"who": "anna"}'), Answer(node="gpu01", code=75)]
    assert cluster.run("up").code == 1
    monkeypatch.delenv("HF_TOKEN")
    assert cluster.run("up").code == 2

    assert ran(cluster) == []


@pytest.mark.parametrize("name", ["pre-up", "post-up", "on-failure"])
def test_an_unusable_hook_is_reported_first(cluster: Cluster, hook: Hook, name: str) -> None:
    """Including post-hooks, directories and dangling links."""
    path = hook(name, mode=0o644)
    done = cluster.run("up")
    assert (done.code, cluster.fleet_options) == (2, [])
    assert f"{path} is not executable" in done.err
    assert f"chmod +x {path}" in done.err

    path.unlink()
    path.symlink_to("nowhere")
    done = cluster.run("up")
    assert (done.code, cluster.fleet_options) == (2, [])
    assert f"{path} is not a file" in done.err


def test_hooks_can_be_skipped(cluster: Cluster, hook: Hook) -> None:
    """All of them, including broken ones."""
    hook("pre-up", "exit 1")
    hook("post-up", mode=0o644)

    assert cluster.run("up", "--no-hooks").code == 0


def test_a_dry_run_lists_hooks(cluster: Cluster, hook: Hook) -> None:
    """Beside the script, not in it."""
    hook("pre-up")
    hook("on-failure")
    done = cluster.run("up", "--dry-run")

    assert (done.code, ran(cluster)) == (0, [])
    assert done.err == "dry run: hooks not run: pre-up, on-failure\n"
    assert "hook" not in done.out


def test_hooks_are_not_recursive(
    cluster: Cluster, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `post-up` hook that runs `vlaunch up` would never end."""
    hook("pre-up")
    monkeypatch.setenv("VLAUNCH_HOOK", "post-up")
    done = cluster.run("up")

    assert (done.code, ran(cluster)) == (0, [])
    assert "no hooks are run inside the hook post-up" in done.err


def test_a_timed_out_hook_is_killed_with_its_children(
    cluster: Cluster, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Including children that ignore SIGTERM."""
    seconds = processes.unique_seconds()
    monkeypatch.setattr("launcher.app.hooks.DEADLINE", 0.5)
    monkeypatch.setattr("launcher.app.hooks._GRACE", 0.2)
    hook("pre-up", f"(trap '' TERM; sleep {seconds}) & sleep {seconds}")
    done = cluster.run("up")

    assert (done.code, cluster.commands) == (1, [])
    assert "error: hook pre-up timed out after 0.5s and was killed" in done.err
    assert processes.disappears(seconds, within=120)


def test_output_of_a_hook_is_throttled(tmp_path: Path, hook: Hook) -> None:
    """Unread output would fill the memory; no output is lost."""
    body = "head -c 1900000 /dev/zero | tr '\\0' x | fold -w 1900; touch done"
    path, done, shown = hook("pre-up", body), tmp_path / "done", list[Event]()

    class Slow(SilentPrinter):
        def show(self, event: Event) -> None:
            if not shown:
                assert not processes.awaited(done.exists, within=1)
            shown.append(event)

    assert hooks._execute(path, os.environ, tmp_path, 60, "pre-up", Slow()) == 0
    assert (len(shown), done.exists()) == (1000, True)


def test_a_background_child_does_not_block_the_command(
    cluster: Cluster, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook may leave a process behind."""
    monkeypatch.setattr("launcher.app.hooks._LINGER", 0.5)
    hook("pre-up", "echo $$; sleep 30 & echo $! >child; echo said")
    done = cluster.run("up")
    os.kill(int((cluster.path.parent / "child").read_text()), signal.SIGKILL)

    assert done.code == 0
    assert "pre-up: said" in done.err


def test_late_output_of_a_child_is_discarded(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any amount, without blocking the child."""
    monkeypatch.setattr("launcher.app.hooks._LINGER", 0.1)
    body = "(sleep 0.5; head -c 900000 /dev/zero | tr '\\0' x | fold -w 1000; touch done) &"
    path, done = hook("pre-up", body), tmp_path / "done"

    assert hooks._execute(path, os.environ, tmp_path, 60, "pre-up", SilentPrinter()) == 0
    assert not done.exists()
    assert processes.awaited(done.exists, within=120)


def test_ctrl_c_kills_a_hook(tmp_path: Path, cluster: Cluster, hook: Hook) -> None:
    """With its children: it has its own process group, so the terminal does not signal it."""
    seconds = processes.unique_seconds()
    hook("pre-up", f"sleep {seconds} & sleep {seconds}")
    (tmp_path / "inventory.yaml").write_text(
        "cluster: c\nimage: x:1\naccelerator: cpu\nconnection: local\nhf_home: /tmp/hf\nstate_dir:"
        f" {tmp_path}/state\nnodes: [{{host: localhost, name: me, ip: 192.0.2.1, gpus: 1}}]\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    code = "from launcher.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "up"], env=env, stderr=subprocess.PIPE, text=True
    )
    assert processes.appears(seconds)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)

    assert process.returncode == 130
    assert "interrupted" in err
    assert processes.disappears(seconds, within=120)


def test_an_interrupt_while_a_hook_starts(
    monkeypatch: pytest.MonkeyPatch, cluster: Cluster, hook: Hook
) -> None:
    """The signal arrives before `Popen` returns: the hook does not survive it."""
    seconds = processes.unique_seconds()
    hook("pre-up", f"sleep {seconds}")
    start = subprocess.Popen.__init__

    def start_interrupted(*args: Any, **options: Any) -> None:
        start(*args, **options)
        assert processes.appears(seconds)
        os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess.Popen, "__init__", start_interrupted)
        assert cluster.run("up").code == 130

    assert processes.disappears(seconds, within=120)


def test_output_is_sanitized(cluster: Cluster, hook: Hook) -> None:
    """Including binary output, and a line without an end."""
    hook("pre-up", r"printf '\377\033[2Jx\n\rlast'")
    done = cluster.run("up")

    assert "\x1b" not in done.err
    assert "pre-up: last" in done.err
    assert [
        event["text"]
        for event in cluster.run("up", "--json").events
        if event.get("stage") == "hook"
    ][-1] == "hook pre-up"
