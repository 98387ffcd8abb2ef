"""`vlaunch down`: repeatable at any time, with true results."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.core.domain import Answer
from launcher.core.errors import ConnectError
from launcher.core.transport import Command
from tests import supervision
from tests.command_line import INVENTORY, Cluster


@pytest.fixture
def up(cluster: Cluster) -> Cluster:
    """A running cluster."""
    assert cluster.run("up").code == 0
    cluster.world.changes.clear()
    cluster.commands.clear()
    return cluster


def empty(cluster: Cluster, name: str) -> bool:
    machine = cluster.world.machines[name]
    return not machine.containers and not machine.files


def test_everything_is_removed_except_images(up: Cluster) -> None:
    """The result is a single line."""
    ran = up.run("down")

    assert (ran.code, ran.out) == (0, "")
    assert "ok cluster c is down on gpu[01-02]" in ran.err
    assert empty(up, "gpu01") and empty(up, "gpu02")
    assert up.world.machines["gpu01"].images


def test_the_inventory_is_named_as_for_up(up: Cluster) -> None:
    """As an argument."""
    assert up.run("down", "inventory.yaml", "--yes").code == 0


def test_a_second_down_has_nothing_to_remove(up: Cluster) -> None:
    """It is no failure."""
    up.run("down")
    up.world.changes.clear()
    ran = up.run("down")

    assert (ran.code, up.world.changes) == (0, [])
    assert "there was nothing to remove" in ran.err


def test_json_ends_with_the_number_of_changes(up: Cluster) -> None:
    """For scripts."""
    assert up.run("down", "--json").events[-1]["data"] == {"changed": 4}


def test_a_dry_run_shows_the_script_and_removes_nothing(up: Cluster) -> None:
    """On standard output."""
    ran = up.run("down", "--dry-run")

    assert (ran.code, ran.err, up.world.changes) == (0, "", [])
    assert "\non gpu02 docker rm --force --volumes " in ran.out


def test_an_unreachable_node_is_named_and_the_others_are_cleaned(up: Cluster) -> None:
    """Exit code 1: the cluster is not down."""
    up.missing["gpu02"] = ConnectError("gpu02", "cannot be reached: no route to host")
    ran = up.run("down")

    assert ran.code == 1
    assert "error: gpu02: cannot be reached: no route to host" in ran.err
    assert "hint: once reachable, run `vlaunch down` again" in ran.err
    assert "is down" not in ran.err
    assert empty(up, "gpu01") and not empty(up, "gpu02")


def test_a_connection_lost_during_the_probe_does_not_spare_the_others(up: Cluster) -> None:
    """The node counts as unreachable."""
    handler = up.world.answer

    def answer(command: Command) -> Answer | None:
        return (
            Answer(node="gpu01", code=255, err="reset")
            if command.node == "gpu01"
            else handler(command)
        )

    up.world.answer = answer  # type: ignore[method-assign]
    ran = up.run("down")

    assert ran.code == 1
    assert "gpu01: connection lost" in ran.err
    assert empty(up, "gpu02")


def test_an_unresponsive_docker_does_not_count_as_clean(up: Cluster) -> None:
    """Its containers could not be listed."""
    up.world.machines["gpu02"].docker_error = "Cannot connect to the Docker daemon"
    ran = up.run("down")

    assert ran.code == 1
    assert "gpu02" in ran.err.split("error: ", 1)[1]
    assert "is down" not in ran.err
    assert empty(up, "gpu01")


def test_folders_of_batch_jobs_stay_and_are_named(cluster: Cluster, tmp_path: Path) -> None:
    """They outlive the cluster."""
    cluster.write(f"{INVENTORY}hf_home: {tmp_path}/hf\n")
    folder = tmp_path / "hf" / "vlaunch" / "c" / "batch"
    (folder / "reviews").mkdir(parents=True)
    assert cluster.run("up").code == 0

    ran = cluster.run("down")

    assert f"batch results are kept in {folder} on gpu01: reviews" in ran.err
    assert (folder / "reviews").is_dir()


def test_the_prompt_names_running_work(up: Cluster) -> None:
    """Without a terminal no node is changed; a dry run and an idle cluster do not prompt."""
    supervision.store_server(up.world, supervision.make_spec("chat"))
    refused, dry = up.run("down"), up.run("down", "--dry-run")

    assert (refused.code, dry.code, up.world.changes) == (2, 0, [])
    assert "no terminal to confirm: Remove cluster c and stop server `chat`?" in refused.err
    assert "hint: add `--yes`" in refused.err
    assert up.run("down", "--yes").code == 0


def test_the_compile_cache_stays_and_is_reported(up: Cluster) -> None:
    """With its size and the flag that removes it; `--purge` does."""
    for machine in up.world.machines.values():
        machine.compiled = f"ext4\n{300 << 10}"
    ran = up.run("down", "--json")
    (note,) = [event for event in ran.events if event.get("stage") == "compiled"]

    assert note["data"] == {"bytes": 600 << 20}
    assert "600 MiB in total (`vlaunch down --purge` removes it)" in note["text"]
    assert "compiled" not in up.run("down").err.partition("--purge")[2]
    ran = up.run("down", "--purge", "--yes")
    assert ran.code == 0
    assert "removing the compile cache" in ran.err
    assert {machine.compiled for machine in up.world.machines.values()} == {"ext4"}


def test_no_secret_is_needed(up: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """They may be on another operator's machine."""
    monkeypatch.delenv("HF_TOKEN")

    assert up.run("down").code == 0


def test_all_nodes_unreachable_is_a_single_error(up: Cluster) -> None:
    """No query is sent."""
    for name in ("gpu01", "gpu02"):
        up.missing[name] = ConnectError(name, "cannot be reached: timed out")
    ran = up.run("down")

    assert (ran.code, up.commands) == (1, [])
    assert "gpu[01-02]: cannot be reached" in ran.err
