"""What `check` gathers: only what the chosen checks need, from the nodes that answer, each gap with
its reason.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher.app.hooks import Hooks
from launcher.app.progress import Silent
from launcher.app.session import Session
from launcher.core.domain import Answer, Secret
from launcher.core.errors import ConnectError
from launcher.core.transport import Command
from launcher.hosts import evidence, hub
from launcher.hosts.check import Evidence, Hub
from launcher.hosts.checks import catalogue
from launcher.inventory.load import loads
from launcher.planner import expected
from tests.fakes import FakeTransport
from tests.simulated import World

NODES = "".join(f"  - {{host: gpu0{n}, ip: 10.0.0.1{n}, gpus: 8}}\n" for n in (1, 2, 3))
ALL = [check.id for check in catalogue.CATALOGUE]


@pytest.fixture(autouse=True)
def _no_file_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures of whoever runs the tests have no say."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def world(more: str = "") -> World:
    """Three nodes that have the image."""
    return World(loads(f"cluster: c\nimage: x:1\n{more}\nnodes:\n{NODES}", Path("inventory.yaml")))


def gather(
    of: World,
    ids: Sequence[str] = ALL,
    *,
    missing: Sequence[str] = (),
    model: str = "",
    offline: bool = True,
) -> tuple[Evidence, list[Command]]:
    """Gather what these checks need; return it, and what was asked."""
    transport = FakeTransport(of.answer)
    lost = {name: ConnectError(name, "no answer") for name in missing}
    session: Any = Session(
        inventory=of.inventory,
        fleet=None,
        transport=transport,
        to=Silent(),
        hooks=Hooks(inventory=of.inventory, verb=""),
        missing=lost,  # type: ignore[arg-type]
    )
    found = evidence.gather(
        session, catalogue.select(only=ids), model=model, known=expected.load(), offline=offline
    )
    return found, transport.commands


@pytest.mark.parametrize(
    ("ids", "times"),
    [
        (["ssh"], 1),
        (["disk"], 1),
        (["shm"], 2),
        (["ray-version"], 2),
        (["high-port"], 2),
        (["mtu"], 2),
        (["model"], 2),
        (ALL, 4),
    ],
)
def test_only_what_is_needed_is_asked(ids: list[str], times: int) -> None:
    """The survey always, in one round trip a node; containers, port probes and files when a
    check of their group was chosen.
    """
    _, asked = gather(world(), ids, model="org/m")

    assert len(asked) == 3 * times
    assert all(each.argv[3] == "probe" for each in asked[:3])


def test_all_is_there_on_healthy_nodes() -> None:
    """Of each node, and of each direction between them, on one high port that nobody has."""
    of = world()
    of.machines["gpu02"].model = {"config.json": 7}
    found, asked = gather(of, model="org/m")
    probes = [json.loads(each.argv[-1]) for each in asked if "peers" in each.argv[-1]]

    assert list(found.facts) == list(found.inside) == ["gpu01", "gpu02", "gpu03"]
    assert (found.inside_missing, found.probes_missing, found.missing) == ({}, {}, {})
    assert len(found.port_probes or ()) == 6
    assert found.files == {"gpu01": None, "gpu02": {"config.json": 7}, "gpu03": None}
    assert len({(each["port"], each["nonce"]) for each in probes}) == 1
    assert 40000 <= probes[0]["port"] < 60000


def test_two_runs_use_another_port_and_nonce() -> None:
    """Listeners of an earlier run are not taken for ours."""
    first, second = (gather(world(), ["high-port"])[1][-1].argv[-1] for _ in range(2))

    assert json.loads(first)["nonce"] != json.loads(second)["nonce"]


def test_a_missing_node_is_asked_nothing() -> None:
    """The others are asked about each other."""
    found, asked = gather(world(), missing=["gpu02"], model="org/m")

    assert "gpu02" not in {each.node for each in asked}
    assert found.missing == {"gpu02": "no answer"}
    assert {(each.source, each.target) for each in found.port_probes or ()} == {
        ("gpu01", "gpu03"),
        ("gpu03", "gpu01"),
    }


def test_one_node_alone_knocks_at_nobody() -> None:
    """There is no probe, and that is not the same as none that got through."""
    found, _ = gather(world(), missing=["gpu01", "gpu02"])

    assert found.port_probes is None
    assert list(found.facts) == ["gpu03"]


def test_nobody_reached() -> None:
    """Nothing is asked."""
    found, asked = gather(world(), missing=["gpu01", "gpu02", "gpu03"], model="org/m")

    assert (found.facts, asked, found.files) == ({}, [], {})


def test_a_connection_that_breaks_leaves_gaps_with_reasons() -> None:
    """Whatever is being asked when it does."""
    of = world()
    answer, count = of.answer, 0

    def breaking(command: Command) -> Answer | None:
        nonlocal count
        if command.node == "gpu03":
            count += 1
            if count > 1:
                return Answer(node="gpu03", code=255, err="connection lost")
        return answer(command)

    of.answer = breaking  # type: ignore[method-assign]
    found, _ = gather(of, model="org/m")
    results = {result.check.id: result for result in catalogue.run(found)}

    assert found.inside["gpu03"].error == "connection lost"
    assert "connection lost" in found.probes_missing["gpu03"]
    assert "gpu03" not in found.files
    for id_ in ("ray-version", "ports-reachable"):
        assert {f.node: f.status for f in results[id_].findings}["gpu03"] == "skip"


@pytest.mark.parametrize(
    ("more", "rdma", "level"),
    [
        ("", "", "any"),
        ("", "mlx5_0/ports/1/state:4: ACTIVE", "rdma"),
        ("network: {fabric: infiniband}", "", "gdrdma"),
        ("network: {fabric: infiniband, require: any}", "", "any"),
        ("accelerator: cpu", "", "any"),
    ],
)
def test_the_level_is_the_one_that_check_nccl_would_ask_for(
    more: str, rdma: str, level: str
) -> None:
    """From the inventory, else from what the survey found."""
    of = world(more)
    for machine in of.machines.values():
        machine.survey["rdma"] = rdma

    assert gather(of, ["ssh"])[0].required == level


def test_the_token_goes_to_hugging_face_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked with the inventory's own; other secrets are not even fetched."""
    asked: list[tuple[str, Secret | None]] = []

    def ask(model: str, token: Secret | None) -> Hub:
        asked.append((model, token))
        return Hub(status="ok")

    monkeypatch.setattr(hub, "ask", ask)
    monkeypatch.setenv("THE_TOKEN", "hf_thisMustStayHidden")
    secret = "secrets: {HF_TOKEN: {env: THE_TOKEN}, OTHER: {command: 'exit 7'}}"
    found, commands = gather(world(secret), ["hf-token"], model="org/m", offline=False)
    gather(world(), ["hf-token"], model="org/m", offline=False)

    assert found.hub == Hub(status="ok")
    assert [(model, token and token.reveal()) for model, token in asked] == [
        ("org/m", "hf_thisMustStayHidden"),
        ("org/m", None),
    ]
    assert "hf_thisMustStayHidden" not in repr(commands)
