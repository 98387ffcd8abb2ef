"""`vlaunch up`, as run by users."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from pathlib import Path

import pytest

from launcher.app.apply import apply
from launcher.core.domain import Answer
from launcher.core.errors import ConnectError, VlaunchError
from launcher.tools.shipped import py_spy
from tests import simulated
from tests.command_line import INVENTORY, SECRET, Cluster


def test_output_of_a_first_up(cluster: Cluster) -> None:
    """On standard error; standard output is for data."""
    ran = cluster.run("up")

    assert (ran.code, ran.out) == (0, "")
    assert "cluster c is up: 2 nodes, 16 GPUs" in ran.err
    assert (
        ran.err.index("Start the Ray head")
        < ran.err.index("Start the Ray workers")
        < ran.err.index("Verify the Ray cluster")
    )
    assert SECRET not in ran.err


def test_one_node_with_one_gpu_is_counted_as_such(cluster: Cluster) -> None:
    """In the progress and the result."""
    first = INVENTORY.replace("gpus: 8", "gpus: 1").rpartition("  - {host: gpu02")[0]
    cluster.write(first)
    for machine in cluster.world.machines.values():
        machine.gpus = 1
    ran = cluster.run("up")

    assert ran.code == 0, ran.err
    assert "cluster c is up: 1 node, 1 GPU" in ran.err
    assert not re.search(r"\b1 (nodes|GPUs)", ran.err)


def test_a_second_up_changes_nothing(cluster: Cluster) -> None:
    """No change is sent."""
    cluster.run("up")
    cluster.world.changes.clear()
    ran = cluster.run("up")

    assert (ran.code, cluster.world.changes) == (0, [])
    assert "cluster c is already up; nothing was changed" in ran.err
    assert "not created yet" not in ran.err


def test_a_missing_certificate_is_renewed_on_all_nodes_and_restarts_nothing(
    cluster: Cluster,
) -> None:
    """All are issued again, because the authority's key was not stored."""
    cluster.run("up")
    files = {name: machine.files for name, machine in cluster.world.machines.items()}
    before = files["gpu01"]["secrets/AGENT_CERTIFICATE"]
    del files["gpu02"]["secrets/AGENT_CERTIFICATE"]
    cluster.world.changes.clear()
    script = cluster.run("up", "--dry-run").out
    ran = cluster.run("up")

    assert ran.code == 0
    assert "gpu02: its agent has no certificate" in ran.err
    assert cluster.world.verbs() == [
        f"{node}: {verb}" for verb in ("extend", "store", "store") for node in ("gpu01", "gpu02")
    ]
    assert script.count(" extend ") == 2
    assert files["gpu01"]["secrets/AGENT_CERTIFICATE"] != before
    assert files["gpu01"]["secrets/AGENT_CA"] == files["gpu02"]["secrets/AGENT_CA"]
    assert "is already up; nothing was changed" in cluster.run("up").err


def test_a_change_is_shown_before_it_is_applied(cluster: Cluster) -> None:
    """With the smallest set of changes."""
    cluster.run("up")
    cluster.world.changes.clear()
    cluster.write(
        INVENTORY.replace("ip: 10.0.0.12, gpus: 8", "ip: 10.0.0.12, gpus: 8, env: {A: '1'}")
    )
    ran = cluster.run("up")

    assert ran.code == 0
    assert ran.err.index("gpu02: env A: unset → 1") < ran.err.index("Start the Ray workers")
    assert {command.node for command in cluster.world.changes} == {"gpu02"}


@pytest.mark.parametrize("inventory", ["", "ray: none\n"])
def test_an_image_with_an_older_vllm_is_rejected(
    inventory: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any change, with the reason; running containers stay."""
    answer = simulated.RAY_IMAGE.read_text(encoding="utf-8").replace('"0.32.0+cpu"', '"0.18.1"')
    older = cluster.path.parent / "older.json"
    older.write_text(answer, encoding="utf-8")
    monkeypatch.setattr(simulated, "RAY_IMAGE", older)
    cluster.write(INVENTORY.replace("cluster: c\n", f"cluster: c\n{inventory}"))
    ran = cluster.run("up")

    assert (ran.code, cluster.world.changes) == (2, [])
    assert "vLLM 0.18.1 does not work with vlaunch, which needs 0.22 or newer" in ran.err
    assert "slow starts on several nodes need" in ran.err


def test_an_image_with_a_newer_vllm_is_used_with_a_warning(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what may go wrong, and what to use instead."""
    answer = simulated.RAY_IMAGE.read_text(encoding="utf-8").replace('"0.32.0+cpu"', '"0.99.0"')
    newer = cluster.path.parent / "newer.json"
    newer.write_text(answer, encoding="utf-8")
    monkeypatch.setattr(simulated, "RAY_IMAGE", newer)
    ran = cluster.run("up")

    assert ran.code == 0
    assert "vLLM 0.99.0 is newer than vlaunch was checked with" in ran.err
    assert "a start may fail" in ran.err
    assert "hint: set `image:` to a checked one" in ran.err


def test_json_is_the_same_events_on_standard_output(cluster: Cluster) -> None:
    """One object per line."""
    ran = cluster.run("up", "--json")

    assert (ran.code, ran.err) == (0, "")
    assert ran.events[-1]["kind"] == "done"
    assert ran.events[-1]["data"] == {"changed": len(cluster.world.changes)}
    assert {"stage", "step", "finding"} <= {event["kind"] for event in ran.events}
    assert SECRET not in ran.out


def test_a_dry_run_has_the_runs_commands(cluster: Cluster) -> None:
    """Word for word, if the cluster has its token; without a change."""
    cluster.run("up")
    cluster.write(INVENTORY.replace("cluster: c\n", "cluster: c\nenv: {A: '1'}\n"))
    cluster.world.changes.clear()
    dry = cluster.run("up", "--dry-run")

    assert (dry.code, dry.err, cluster.world.changes) == (0, "", [])
    cluster.run("up")
    recorded = _sent(dry.out, cluster.path.parent)
    assert sorted(recorded) == sorted(
        (command.node, *command.argv) for command in cluster.world.changes
    )


def test_two_dry_runs_of_a_first_up_are_the_same(cluster: Cluster) -> None:
    """Otherwise a review of the script would be useless."""
    assert cluster.run("up", "--dry-run").out == cluster.run("up", "--dry-run").out


def test_a_dry_run_without_the_image_lists_the_unknown(cluster: Cluster) -> None:
    """The pull comes first; the build depends on the probe of the image."""
    cluster.world.machines["gpu02"].images.clear()
    ran = cluster.run("up", "--dry-run")

    assert ran.code == 0
    assert "on gpu02 docker pull --quiet vllm/vllm-openai:v0.32.0\n" in ran.out
    assert "made-from-the-image" in ran.out
    assert cluster.world.changes == []


def test_offline_touches_no_node_and_needs_no_secret(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is for reviews."""
    monkeypatch.delenv("HF_TOKEN")
    ran = cluster.run("up", "--dry-run", "--offline")

    assert (ran.code, cluster.fleet_options, cluster.commands) == (0, [], [])
    assert subprocess.run(["bash", "-n"], input=ran.out, text=True, check=False).returncode == 0


def test_offline_alone_is_an_invalid_request(cluster: Cluster) -> None:
    """Exit code 2, without contacting a node."""
    ran = cluster.run("up", "--offline")

    assert (ran.code, cluster.fleet_options) == (2, [])
    assert "--offline requires --dry-run" in ran.err


def test_unreachable_nodes_are_all_reported(
    cluster: Cluster,
) -> None:
    """Equal errors are folded, and no node is changed."""
    for name in ("gpu01", "gpu02"):
        cluster.missing[name] = ConnectError(
            name, "cannot be reached: no route to host", hint="check `host:`"
        )
    ran = cluster.run("up")

    assert (ran.code, cluster.commands) == (1, [])
    assert "error: gpu[01-02]: cannot be reached" in ran.err
    assert "gpu[01-02]: cannot be reached: no route to host" in ran.err
    assert ran.err.count("hint: check `host:`") == 1


def test_a_failing_preflight_names_node_and_fix(cluster: Cluster) -> None:
    """Before any file is written."""
    cluster.world.machines["gpu02"].listening = (22, 6380)
    ran = cluster.run("up")

    assert (ran.code, cluster.world.changes) == (1, [])
    assert "error: gpu02: port 6380 (Ray node manager) is in use" in ran.err
    assert "hint: find its process with `sudo ss -ltnp 'sport = :6380'` on gpu02" in ran.err


def test_a_failing_step_has_cause_and_fix_and_a_second_up_repairs_it(
    cluster: Cluster,
) -> None:
    """Partly started containers do not block it."""
    cluster.world.fail["gpu02", "run"] = Answer(
        node="gpu02", code=125, err='could not select device driver "" with capabilities: [[gpu]]'
    )
    ran = cluster.run("up")

    assert ran.code == 1
    assert (
        "error: gpu02: starting the Ray worker failed (Docker cannot expose GPUs to containers)"
    ) in ran.err
    assert "hint: install nvidia-container-toolkit" in ran.err
    cluster.world.fail.clear()
    cluster.world.changes.clear()

    assert cluster.run("up").code == 0
    assert {command.node for command in cluster.world.changes} == {"gpu02"}


def test_a_missing_secret_stops_before_any_contact(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has its name and source."""
    monkeypatch.delenv("HF_TOKEN")
    ran = cluster.run("up")

    assert (ran.code, cluster.fleet_options) == (2, [])
    assert "HF_TOKEN" in ran.err


def test_the_last_inventory_is_the_default(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any directory; a dry run does not count."""
    elsewhere = cluster.path.parent / "elsewhere"
    elsewhere.mkdir()
    cluster.run("up", "--dry-run")
    monkeypatch.chdir(elsewhere)
    assert cluster.run("status").code == 2

    monkeypatch.chdir(cluster.path.parent)
    cluster.run("up")
    monkeypatch.chdir(elsewhere)
    assert cluster.run("status").code == 0


def test_verbose_shows_commands_without_secrets(cluster: Cluster) -> None:
    """With their nodes; long ones are shortened."""
    ran = cluster.run("up", "--verbose")

    assert "  + gpu01: docker run --detach --name vlaunch-c-gpu01" in ran.err
    assert SECRET not in ran.err
    assert cluster.world.machines["gpu01"].files["secrets/RAY_AUTH_TOKEN"].decode() not in ran.err


def test_new_host_keys_are_trusted_on_request(cluster: Cluster) -> None:
    """Never by default."""
    cluster.run("up", "--dry-run")
    cluster.run("up", "--dry-run", "--accept-new-host-keys")

    assert [options["accept_new_host_keys"] for options in cluster.fleet_options] == [False, True]


def test_ctrl_c_in_a_wait_ends_with_130_and_no_traceback(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started containers keep running."""

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setitem(apply.__kwdefaults__ or {}, "sleep", interrupted)
    ran = cluster.run("up")

    assert ran.code == 130
    assert ran.err.rstrip().endswith("interrupted")
    assert "Traceback" not in ran.err


def test_an_unreadable_answer_is_a_typed_error(cluster: Cluster) -> None:
    """The error quotes it."""
    cluster.world.machines["gpu02"].home = "x\n@@vlaunch containers\nnot JSON"
    ran = cluster.run("up")

    assert ran.code == 1
    assert "error: gpu02: " in ran.err
    assert "Traceback" not in ran.err


def _sent(script: str, folder: Path) -> list[tuple[str, ...]]:
    """Return a script's commands, parsed by bash itself."""
    lines = script.splitlines()
    start, end = lines.index("on() {"), lines.index("}")
    recorder = (
        'on() { cat >/dev/null; printf \'%s\\0\' "$@" >>"$SENT"; printf \'\\36\\0\' >>"$SENT"; }'
    )
    text = (
        "\n".join([*lines[:start], recorder, *lines[end + 1 :]])
        .replace(" &\n", "\n")
        .replace("vlaunch payload", "true")
    )
    (folder / "script.sh").write_text(text)
    env = {**os.environ, "SENT": str(folder / "sent"), "RAY_AUTH_TOKEN": "x"}
    subprocess.run(
        ["bash", folder / "script.sh"],
        stdin=subprocess.DEVNULL,
        env=env,
        check=True,
        capture_output=True,
    )
    return [
        tuple(call.split("\0")[:-1])
        for call in (folder / "sent").read_text().split("\36\0")
        if call
    ]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> py_spy.Build:
    """A build of py-spy for the nodes, ready to download."""
    build = py_spy.Build("x86_64", "wheel", hashlib.sha256(b"py-spy").hexdigest())
    monkeypatch.setitem(py_spy.BUILDS, "amd64", build)
    monkeypatch.setattr("launcher.cluster.up_inputs.fetch_py_spy", lambda build, cache: b"py-spy")
    return build


@pytest.mark.parametrize("settings", ["", "ray: none\n"])
def test_missing_py_spy_is_written(cluster: Cluster, build: py_spy.Build, settings: str) -> None:
    """It is written while containers run; another `up` changes nothing."""
    cluster.write(INVENTORY + settings)
    assert cluster.run("up").code == 0
    for machine in cluster.world.machines.values():
        assert machine.files.pop("payload/py-spy") == b"py-spy"

    cluster.world.changes.clear()
    second = cluster.run("up")
    cluster.world.changes.clear()
    third = cluster.run("up")

    assert "writing py-spy, which shows where ranks hang" in second.err
    assert "removing the old" not in second.err
    assert (third.code, cluster.world.changes) == (0, [])


def test_py_spy_cannot_be_downloaded(
    cluster: Cluster, build: py_spy.Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster comes up without it."""

    def fail(*_: object) -> bytes:
        raise VlaunchError("cannot download py-spy")

    monkeypatch.setattr("launcher.cluster.up_inputs.fetch_py_spy", fail)
    ran = cluster.run("up")

    assert ran.code == 0
    assert "cannot download py-spy: stacks of hung ranks will not be available" in ran.err
    assert "payload/py-spy" not in cluster.world.machines["gpu01"].files


def test_py_spy_in_a_script(
    cluster: Cluster, build: py_spy.Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dry run downloads nothing; its script gets the program from `vlaunch payload`."""
    cluster.run("up")
    cluster.world.machines["gpu02"].files.pop("payload/py-spy")
    monkeypatch.setattr(
        "launcher.cluster.up_inputs.fetch_py_spy", lambda *_: pytest.fail("downloaded")
    )

    ran = cluster.run("up", "--dry-run")

    assert ran.code == 0
    assert ran.out.count("vlaunch payload --py-spy amd64 | ") == 1
