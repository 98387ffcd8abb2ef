"""`serve --replicas`: start, scale, and replace one after another, on simulated nodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from launcher.core.errors import GateError, StoppedError, VlaunchError
from launcher.serving.run_start import StartRun
from launcher.serving.start import Replica
from tests.command_line import INVENTORY, Cluster, Ran

SERVE = ("serve", "--name", "chat", "--skip-network-check", "--model", "org/m")
MP = ("--backend", "mp", "--tp", "2")


class Answers:
    """First answers: the record of those that came, and the errors of the others by `NAME ARGS`."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.came = list[str]()
        self.errors: dict[str, VlaunchError] = {}
        self.codes: dict[str, int] = {}
        self.meanwhile: Callable[[], None] = lambda: None

    def wait(self, run: StartRun, replica: Replica) -> None:
        """Answer, and add the server to the history like the supervisor."""
        spec = replica.spec
        key = " ".join((spec.name, *spec.args))
        self.meanwhile()
        if key in self.errors:
            raise self.errors[key]
        run.code = self.codes.pop(key, 0)
        if run.code:
            return
        self.came.append(key)
        files = self.cluster.world.machines["gpu01"].files
        desired = json.loads(files[f"server/{spec.name}/desired.json"])
        before = json.loads(files.get(f"server/{spec.name}/history.json", b"[]"))
        others = [entry for entry in before if entry["desired"]["id"] != desired["id"]]
        entries = [{"at": 1.0, "desired": desired}, *others]
        files[f"server/{spec.name}/history.json"] = json.dumps(entries).encode()
        run.rows[spec.name] = [f"endpoint     of {spec.name}", f"model        {spec.model}"]


@pytest.fixture
def answers(up: Cluster, monkeypatch: pytest.MonkeyPatch) -> Answers:
    answers = Answers(up)

    def wait(run: StartRun, replica: Replica) -> None:
        answers.wait(run, replica)

    monkeypatch.setattr(StartRun, "await_answer", wait)
    return answers


def serve(cluster: Cluster, *options: str, args: tuple[str, ...] = ()) -> Ran:
    return cluster.run(*SERVE, *MP, *options, *(("--", *args) if args else ()))


def servers(cluster: Cluster) -> dict[str, dict[str, Any]]:
    return {row["name"]: row["desired"] for row in cluster.world.servers() if row.get("desired")}


def args(cluster: Cluster) -> dict[str, str]:
    return {name: " ".join(spec["asked_for"]["args"]) for name, spec in servers(cluster).items()}


def test_replicas_start_together(up: Cluster, answers: Answers) -> None:
    """All checks come first; one summary shows them all."""
    ran = serve(up, "--replicas", "2")
    started = servers(up)

    assert ran.code == 0, ran.err
    assert {name: (spec["port"], spec["places"]) for name, spec in started.items()} == {
        "chat": (8000, {"gpu01": 2}),
        "chat.2": (8001, {"gpu02": 2}),
    }
    assert ran.out == (
        "server       chat\nendpoint     of chat\nmodel        org/m\n"
        "server       chat.2\nendpoint     of chat.2\n"
    )
    assert "2 replicas of org/m are ready (`chat`, `chat.2`)" in ran.err
    assert ran.err.index("for server `chat.2`") < ran.err.index("Create 2 servers")
    again = serve(up)  # as many as run
    assert (again.code, servers(up)) == (0, started)
    assert "already running as server `chat.2`" in again.err
    assert answers.came == ["chat", "chat.2"] * 2


def test_replicas_need_their_own_gpus_and_ports(up: Cluster, answers: Answers) -> None:
    """Rejected before anything changes."""
    up.world.machines["gpu02"].listening = (22, 8001)
    used = serve(up, "--replicas", "2")
    many = serve(up, "--replicas", "9")
    up.world.machines["gpu02"].listening = (22,)
    assert (
        up.run(*SERVE[:1], *SERVE[3:], *MP, "--pp", "1", "--gpus", "2", "--port", "9000").code == 0
    )
    fewer = serve(up, "--replicas", "8")

    assert (used.code, "port 8001 (vLLM API) is already in use" in used.err) == (1, True), used.err
    assert many.code == 2
    assert "9 replicas of 2 GPUs (TP 2 × PP 1) need 18 GPUs; the cluster has 16" in many.err
    assert fewer.code == 2
    assert (
        "8 replicas of 2 GPUs (TP 2 × PP 1) need 16 GPUs; the cluster has 16, of which 2 are used"
        " by server `default`" in fewer.err
    )
    assert list(servers(up)) == ["default"]


def test_gpus_are_disjoint_without_ray(up: Cluster, answers: Answers) -> None:
    """Replicas on one node get other GPUs and another rendezvous."""
    up.write(f"ray: none\n{INVENTORY}")
    assert up.run("up").code == 0
    assert serve(up, "--replicas", "3", "--nodes", "gpu02").code == 0

    processes = [spec["processes"][0] for spec in servers(up).values()]
    gpus = [gpu for process in processes for gpu in process["gpus"]]
    assert sorted(gpus) == list(range(6))


def test_only_the_difference_changes(up: Cluster, answers: Answers) -> None:
    """Scaling starts new replicas and stops the last ones; others stay untouched."""
    assert serve(up).code == 0
    (first,) = servers(up).values()
    grown = up.run(*SERVE, *MP, "--pp", "8", "--replicas", "1")
    assert (grown.code, servers(up)["chat"]) == (0, first), grown.err

    assert serve(up, "--replicas", "3", "--replace").code == 0
    three = servers(up)
    assert serve(up, "--replicas", "2").code == 0
    assert servers(up) == {name: three[name] for name in ("chat", "chat.2")}
    one = up.run(*SERVE, *MP, "--replicas", "1", "--json")

    assert servers(up) == {"chat": three["chat"]}
    assert one.events[-1]["data"]["servers"] == ["chat"]
    assert one.events[-1]["data"]["removed"] == ["chat.2"]


def test_another_spec_needs_replace(up: Cluster, answers: Answers) -> None:
    """As with one server; with --no-wait there is no order."""
    assert serve(up, "--replicas", "2").code == 0
    before = servers(up)
    refused = serve(up, args=("--seed", "7"))
    at_once = serve(up, "--replace", "--no-wait", args=("--seed", "7"))

    assert (refused.code, "server `chat` is already running org/m" in refused.err) == (2, True)
    assert (at_once.code, "--no-wait cannot replace replicas" in at_once.err) == (2, True)
    assert servers(up) == before


def test_replicas_are_replaced_in_turn(up: Cluster, answers: Answers) -> None:
    """The second one stays until the first has answered; the new one comes last."""
    assert serve(up, "--replicas", "2").code == 0
    states = list[dict[str, str]]()
    answers.meanwhile = lambda: states.append(args(up))
    ran = serve(up, "--replace", "--replicas", "3", args=("--seed", "7"))

    assert ran.code == 0, ran.err
    assert states == [
        {"chat": "--seed 7", "chat.2": ""},
        {"chat": "--seed 7", "chat.2": "--seed 7"},
        {"chat": "--seed 7", "chat.2": "--seed 7", "chat.3": "--seed 7"},
    ]


def test_the_first_failure_changes_nothing_else(up: Cluster, answers: Answers) -> None:
    """It returns to its old spec; the second one is not touched."""
    assert serve(up, "--replicas", "2").code == 0
    before = servers(up)
    answers.errors["chat --seed 7"] = GateError("no answer", evidence="the last line")
    ran = serve(up, "--replace", args=("--seed", "7"))
    after = servers(up)

    assert ran.code == 1
    assert after["chat.2"] == before["chat.2"]
    assert after["chat"]["id"] == before["chat"]["id"]
    assert (
        "server `chat`: org/m failed to start; rolled back to org/m (TP=2 PP=1, mp), which is ready"
        in ran.err
    )
    assert "unchanged: `chat.2`" in ran.err


def test_a_later_failure_names_what_changed(up: Cluster, answers: Answers) -> None:
    """The first one has the new spec already."""
    assert serve(up, "--replicas", "3").code == 0
    answers.errors["chat.2 --seed 7"] = GateError("no answer")
    ran = serve(up, "--replace", args=("--seed", "7"))

    assert ran.code == 1
    assert args(up) == {"chat": "--seed 7", "chat.2": "", "chat.3": ""}
    assert "changed before: `chat`" in ran.err
    assert "unchanged: `chat.3`" in ran.err


def test_an_interrupted_change_goes_on(up: Cluster, answers: Answers) -> None:
    """The same command waits for what has changed, and replaces the rest."""
    assert serve(up, "--replicas", "2").code == 0
    answers.codes["chat --seed 7"] = 130
    assert serve(up, "--replace", args=("--seed", "7")).code == 130
    first = servers(up)["chat"]
    assert args(up) == {"chat": "--seed 7", "chat.2": ""}

    answers.came.clear()
    assert serve(up, "--replace", args=("--seed", "7")).code == 0
    assert servers(up)["chat"] == first
    assert answers.came == ["chat --seed 7", "chat.2 --seed 7"]


def test_a_stop_meanwhile_is_no_fault(up: Cluster, answers: Answers) -> None:
    """Another operator's `stop` ends the change without a rollback."""
    assert serve(up, "--replicas", "2").code == 0
    answers.errors["chat --seed 7"] = StoppedError("stopped while watched")
    ran = serve(up, "--replace", args=("--seed", "7"))

    assert (ran.code, args(up)) == (1, {"chat": "--seed 7", "chat.2": ""})
    assert "server `chat`: stopped while watched" in ran.err


def test_ray_places_replicas(up: Cluster, answers: Answers) -> None:
    """Ports differ; the sum must fit."""
    options = ("--backend", "ray", "--tp", "8")
    ran = up.run(*SERVE, *options, "--replicas", "2")
    many = up.run(*SERVE, *options, "--replicas", "3")

    assert ran.code == 0, ran.err
    assert "stay unused" not in ran.err
    assert sorted(spec["port"] for spec in servers(up).values()) == [8000, 8001]
    assert (many.code, "need 24 GPUs; the cluster has 16" in many.err) == (2, True)


def test_the_group_is_stopped_by_its_name(up: Cluster, answers: Answers) -> None:
    """Or one replica; without a name, if there is no other server."""
    assert serve(up, "--replicas", "3").code == 0
    one = up.run("stop", "chat.2")
    assert (one.code, sorted(servers(up))) == (0, ["chat", "chat.3"]), one.err
    assert up.run(*SERVE, *MP).code == 0
    assert sorted(servers(up)) == ["chat", "chat.3"]
    assert serve(up, "--replicas", "3").code == 0
    assert up.run("stop", "chat").code == 0
    assert servers(up) == {}
    assert serve(up, "--replicas", "2").code == 0
    assert up.run("stop").code == 0
    assert servers(up) == {}


def test_the_group_is_rolled_back_in_turn(up: Cluster, answers: Answers) -> None:
    """An interrupted rollback goes on; `NAME.2` rolls back one replica."""
    assert serve(up, "--replicas", "2").code == 0
    before = servers(up)
    assert serve(up, "--replace", args=("--seed", "7")).code == 0
    answers.codes["chat"] = 130
    assert up.run("rollback", "--skip-network-check").code == 130
    assert args(up) == {"chat": "", "chat.2": "--seed 7"}
    states = list[dict[str, str]]()
    answers.meanwhile = lambda: states.append(args(up))
    ran = up.run("rollback", "chat", "--skip-network-check")

    assert ran.code == 0, ran.err
    assert states == [{"chat": "", "chat.2": "--seed 7"}, {"chat": "", "chat.2": ""}]
    assert {name: spec["id"] for name, spec in servers(up).items()} == {
        name: spec["id"] for name, spec in before.items()
    }
    assert up.run("rollback", "chat.2", "--skip-network-check").code == 0
    assert args(up) == {"chat": "", "chat.2": "--seed 7"}


def test_an_interrupted_change_is_rolled_back(up: Cluster, answers: Answers) -> None:
    """Replicas that differ return to the spec of those that have not changed."""
    assert serve(up, "--replicas", "2").code == 0
    answers.codes["chat --seed 7"] = 130
    assert serve(up, "--replace", args=("--seed", "7")).code == 130
    ran = up.run("rollback", "chat", "--skip-network-check")

    assert ran.code == 0, ran.err
    assert args(up) == {"chat": "", "chat.2": ""}


def test_a_group_without_another_spec(up: Cluster, answers: Answers) -> None:
    """There is nothing to return to."""
    assert serve(up, "--replicas", "2").code == 0
    ran = up.run("rollback")

    assert ran.code == 2
    assert "only the current one has: org/m (TP=2 PP=1, mp)" in ran.err


def test_a_dry_run_shows_all(up: Cluster, answers: Answers) -> None:
    """And changes nothing."""
    ran = serve(up, "--replicas", "2", "--dry-run")
    offline = serve(up, "--replicas", "2", "--dry-run", "--offline")

    assert ran.code == 0, ran.err
    assert "server/chat " in ran.out
    assert "server/chat.2 " in ran.out
    assert servers(up) == {}
    assert (offline.code, "--offline cannot be combined" in offline.err) == (2, True)
