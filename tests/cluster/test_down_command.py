"""`vlaunch down`: safe at any moment, and it tells the truth."""

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
    """A cluster that is up."""
    assert cluster.run("up").code == 0
    cluster.world.changes.clear()
    cluster.commands.clear()
    return cluster


def empty(cluster: Cluster, name: str) -> bool:
    machine = cluster.world.machines[name]
    return not machine.containers and not machine.files


def test_everything_goes_and_the_images_stay(up: Cluster) -> None:
    """The result is a single line."""
    ran = up.run("down")

    assert (ran.code, ran.out) == (0, "")
    assert "ok cluster c is down on gpu[01-02]" in ran.err
    assert empty(up, "gpu01") and empty(up, "gpu02")
    assert up.world.machines["gpu01"].images


def test_a_second_down_has_nothing_to_remove(up: Cluster) -> None:
    """And is no failure."""
    up.run("down")
    up.world.changes.clear()
    ran = up.run("down")

    assert (ran.code, up.world.changes) == (0, [])
    assert "there was nothing to remove" in ran.err


def test_json_ends_with_how_much_was_done(up: Cluster) -> None:
    """For scripts."""
    assert up.run("down", "--json").events[-1]["data"] == {"changed": 4}


def test_a_dry_run_shows_the_script_and_removes_nothing(up: Cluster) -> None:
    """On standard output."""
    ran = up.run("down", "--dry-run")

    assert (ran.code, ran.err, up.world.changes) == (0, "", [])
    assert "\non gpu02 docker rm --force --volumes " in ran.out


def test_a_node_that_cannot_be_reached_is_named_and_the_others_are_cleaned(up: Cluster) -> None:
    """Exit code 1: it is not down."""
    up.missing["gpu02"] = ConnectError("gpu02", "cannot be reached: no route to host")
    ran = up.run("down")

    assert ran.code == 1
    assert "error: gpu02: cannot be reached: no route to host" in ran.err
    assert "is down" not in ran.err
    assert empty(up, "gpu01") and not empty(up, "gpu02")


def test_a_connection_that_breaks_while_looking_does_not_spare_the_others(up: Cluster) -> None:
    """The node counts as not reached."""
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


def test_a_docker_that_does_not_answer_is_not_called_clean(up: Cluster) -> None:
    """Containers that could not be listed do not count as absent."""
    up.world.machines["gpu02"].docker_error = "Cannot connect to the Docker daemon"
    ran = up.run("down")

    assert ran.code == 1
    assert "gpu02" in ran.err.split("error: ", 1)[1]
    assert "is down" not in ran.err
    assert empty(up, "gpu01")


def test_what_batch_jobs_did_stays_and_is_named(cluster: Cluster, tmp_path: Path) -> None:
    """Their folders outlive the cluster, and the output names them."""
    cluster.write(f"{INVENTORY}hf_home: {tmp_path}/hf\n")
    folder = tmp_path / "hf" / "vlaunch" / "c" / "batch"
    (folder / "reviews").mkdir(parents=True)
    assert cluster.run("up").code == 0

    ran = cluster.run("down")

    assert f"batch results are kept in {folder} on gpu01: reviews" in ran.err
    assert (folder / "reviews").is_dir()


def test_a_prompt_names_what_runs(up: Cluster) -> None:
    """Without a terminal nothing is removed; a dry run and a cluster without work do not ask."""
    supervision.store_server(up.world, supervision.make_spec("chat"))
    refused, dry = up.run("down"), up.run("down", "--dry-run")

    assert (refused.code, dry.code, up.world.changes) == (2, 0, [])
    assert "no terminal to confirm: Remove cluster c, stop server `chat`?" in refused.err
    assert "hint: add `--yes`" in refused.err
    assert up.run("down", "--yes").code == 0


def test_what_engines_compiled_stays_and_is_reported(up: Cluster) -> None:
    """With its size, and what would remove it; `--purge` does."""
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
    """One may be on another machine than the one that brought it up."""
    monkeypatch.delenv("HF_TOKEN")

    assert up.run("down").code == 0


def test_all_nodes_unreachable_is_a_single_error(up: Cluster) -> None:
    """No query is sent."""
    for name in ("gpu01", "gpu02"):
        up.missing[name] = ConnectError(name, "cannot be reached: timed out")
    ran = up.run("down")

    assert (ran.code, up.commands) == (1, [])
    assert "gpu[01-02]: cannot be reached" in ran.err
