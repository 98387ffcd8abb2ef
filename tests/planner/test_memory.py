"""`secrets_in: memory`: no disk stores secrets, and a reboot removes them."""

from __future__ import annotations

import pytest

from launcher.tools.shipped.certificates import SECRET_NAMES
from tests.command_line import INVENTORY, SECRET, Cluster

PLACE = "/run/vlaunch-root"


@pytest.fixture
def memory(cluster: Cluster) -> Cluster:
    """Nodes with a folder in memory, and an inventory that requires it."""
    cluster.write(INVENTORY.replace("cluster: c\n", "cluster: c\nsecrets_in: memory\n"))
    for machine in cluster.world.machines.values():
        machine.memory = PLACE
    return cluster


def test_secrets_are_only_in_memory(memory: Cluster) -> None:
    """On every node, and containers do not start without them."""
    ran = memory.run("up")

    assert ran.code == 0, ran.err
    for machine in memory.world.machines.values():
        assert machine.memory_files["HF_TOKEN"] == SECRET.encode()
        assert set(machine.memory_files) == {*SECRET_NAMES, "HF_TOKEN", "RAY_AUTH_TOKEN"}
        assert not any(name.startswith("secrets/") for name in machine.files)
    run = next(command for command in memory.world.changes if "run" in command.argv)
    mount = f"type=bind,source={PLACE}/c/secrets,target=/run/vlaunch/secrets,readonly"
    assert run.argv[run.argv.index("--mount") + 1] == mount
    assert not any("/run/vlaunch/secrets:" in arg for arg in run.argv)


def test_a_second_up_changes_nothing_and_keeps_the_token(memory: Cluster) -> None:
    """It is read from memory."""
    memory.run("up")
    memory.world.changes.clear()
    ran = memory.run("up")

    assert (ran.code, memory.world.changes) == (0, [])


def test_after_a_reboot_up_writes_them_again(memory: Cluster) -> None:
    """Even if the container runs again; other nodes get certificates of the same new authority."""
    memory.run("up")
    memory.world.machines["gpu02"].memory_files.clear()
    memory.world.changes.clear()
    ran = memory.run("up")

    assert ran.code == 0
    assert "gpu02: its secrets are gone: a reboot clears memory" in ran.err
    verbs = [verb for verb in memory.world.verbs() if verb.startswith("gpu01")]
    assert verbs == ["gpu01: extend", *(["gpu01: store"] * len(SECRET_NAMES))]
    assert set(memory.world.machines["gpu02"].memory_files) == {
        *SECRET_NAMES,
        "HF_TOKEN",
        "RAY_AUTH_TOKEN",
    }


def test_a_node_without_the_folder_is_rejected(memory: Cluster) -> None:
    """Before any change, with a fix."""
    memory.world.machines["gpu02"].memory = ""
    ran = memory.run("up")

    assert (ran.code, memory.world.changes) == (1, [])
    assert "gpu02: has no in-memory folder for secrets" in ran.err
    assert "sudo loginctl enable-linger ops" in ran.err


@pytest.mark.parametrize("to", ["disk", "memory"])
def test_a_change_of_the_setting_moves_them(memory: Cluster, to: str) -> None:
    """No old file stays; the cluster keeps its token."""
    texts = {
        "memory": INVENTORY.replace("cluster: c\n", "cluster: c\nsecrets_in: memory\n"),
        "disk": INVENTORY,
    }
    memory.write(texts["disk" if to == "memory" else "memory"])
    memory.run("up")
    machine = memory.world.machines["gpu01"]
    before = machine.files.get("secrets/RAY_AUTH_TOKEN") or machine.memory_files["RAY_AUTH_TOKEN"]
    memory.write(texts[to])
    ran = memory.run("up")

    assert ran.code == 0, ran.err
    on_disk = {name for name in machine.files if name.startswith("secrets/")}
    assert (set(machine.memory_files) == set()) is (to == "disk")
    assert (on_disk == set()) is (to == "memory")
    assert (
        machine.files.get("secrets/RAY_AUTH_TOKEN") or machine.memory_files["RAY_AUTH_TOKEN"]
    ) == before


def test_down_removes_them_and_verifies(memory: Cluster) -> None:
    """On every node."""
    memory.run("up")
    ran = memory.run("down")

    assert ran.code == 0, ran.err
    assert [machine.memory_files for machine in memory.world.machines.values()] == [{}, {}]
    assert [
        command.argv[4:] for command in memory.commands if command.argv[3:4] == ("forget",)
    ] == [(f"{PLACE}/c",)] * 2
