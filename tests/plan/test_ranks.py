"""Plans of supervised `mp` servers: ranks that start and end together, and what a later run makes of them."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.errors import RequestError
from launcher.model import Inventory, Node, Secret
from launcher.placement import choose
from launcher.plan import containers
from launcher.plan.ranks import plan_ranks, specs
from launcher.plan.script import script
from launcher.plan.serve import Request, Seen, Start
from launcher.plan.shape import Step
from launcher.plan.supervised import Policy
from launcher.tools import docker
from launcher.tools.docker import Container
from launcher.tools.host import HostFacts
from tests.golden import check

NODES = (
    Node(name="n1", host="n1", ip="10.0.0.1", gpus=8, head=True),
    Node(name="n2", host="n2", ip="10.0.0.2", gpus=8),
)
INVENTORY = Inventory(path=Path("inventory.yaml"), cluster="c", image="base:1", nodes=NODES)
SECRETS = {"RAY_AUTH_TOKEN": Secret("ray-very-secret")}
REQUEST = Request(model="org/m", placement=choose(INVENTORY, 8, 2), backend="mp", host="0.0.0.0", port=8001)


def seen(*files: str, ranks: str = "", together: bool = True) -> Seen:
    """Return nodes of which the head has files, and all have rank containers in some state."""
    image = docker.Image(id="sha256:1", identity="1", digests=(), architecture="amd64", labels={})
    bare = HostFacts(listening=frozenset(), images={"base:1": image}, docker_version="27")
    facts = {node.name: replace(bare, files=dict.fromkeys(files, "0" * 64)) if node.head else bare for node in NODES}
    if ranks:
        for name, spec in specs(INVENTORY, Seen(facts=facts), REQUEST, SECRETS, together=together).items():
            own = Container(
                name=spec.name, id=spec.name, role="rank", node=name, image="base:1", status=ranks, spec=spec.hash, exit_code=0,
                restarts=0, env={}, labels=REQUEST.labels,
            )  # fmt: skip
            facts[name] = replace(facts[name], containers=(own,))
    return Seen(facts=facts)


def planned(there: Seen, request: Request = REQUEST, policy: Policy | None = Policy()) -> Start:  # noqa: B008 - it is frozen
    return plan_ranks(INVENTORY, there, request, SECRETS, supervise=policy)


def steps(start: Start, stage: str) -> list[Step]:
    return [step for each in start.plan.stages if each.id == stage for step in each.steps]


def test_the_script() -> None:
    """Every word that is sent: the supervisors, what they are told, and that they come back with their nodes."""
    check(Path(__file__).parent / "golden" / "serve-mp-supervised.sh", script(INVENTORY, [planned(seen()).plan]))


def test_each_rank_runs_under_a_supervisor_that_knows_the_others() -> None:
    """Rank 0 is met at the head's address; the command behind `--` is the one that runs without a supervisor."""
    first, second = (step.command.argv for step in steps(planned(seen()), "ranks"))
    bare = [step.command.argv for step in steps(planned(seen(), policy=None), "ranks")]

    for rank, argv in enumerate((first, second)):
        at = argv.index("python3")
        assert argv[at : at + 2] == ("python3", f"{containers.PAYLOAD}/group.py")
        assert argv[at + 2 : argv.index("--")] == (
            "--rank", str(rank), "--of", "2", "--head", "10.0.0.1", "--port", "29560", "--id", REQUEST.digest,
            "--node", f"n{rank + 1}", "--api-host", "127.0.0.1", "--api", "8001",
        )  # fmt: skip
        assert argv[argv.index("--") + 1 :] == bare[rank][bare[rank].index("vllm") :]
        assert [each[each.index("--restart") + 1] for each in (argv, bare[rank])] == ["unless-stopped", "no"]
    assert not any("ray-very-secret" in word for word in (*first, *second))


def test_what_is_wanted_lies_beside_rank_0(tmp_path: Path) -> None:
    """With the policy; what was known of an earlier server is gone, or its budget would be this one's."""
    (step,) = steps(planned(seen(), policy=Policy(canary=7, restarts=1)), "wanted")
    for name in ("server.json", "gave-up.json", "wanted.json", "answered.json"):
        (tmp_path / "server").mkdir(exist_ok=True)
        (tmp_path / "server" / name).write_text("{}", encoding="utf-8")
    run(step, tmp_path)
    wanted = json.loads((tmp_path / "server" / "wanted.json").read_text(encoding="utf-8"))

    assert step.command.node == "n1"
    assert {path.name for path in (tmp_path / "server").iterdir()} == {"wanted.json", "answered.json"}
    assert (wanted["id"], wanted["backend"], wanted["model"], wanted["image"]) == (REQUEST.digest, "mp", "org/m", "1")
    assert (wanted["policy"]["canary"], wanted["policy"]["restarts"]) == (7, 1)
    assert wanted["metadata"] == REQUEST.labels


def run(step: Step, folder: Path) -> None:
    """Run a step on this machine, in a folder of ours."""
    argv = [str(folder) if word.endswith("/.vlaunch/c") else word for word in step.command.argv]
    given = step.command.stdin() if step.command.stdin else b""
    subprocess.run(argv, input=given, check=True, timeout=10)


def test_without_a_supervisor_nothing_is_wanted_any_more(tmp_path: Path) -> None:
    """What an earlier one left would be told of this server; where it left nothing, nothing is sent."""
    (step,) = steps(planned(seen("server/server.json"), policy=None), "wanted")
    run(step, tmp_path)

    assert step.title == "forgetting the server that was wanted before"
    assert steps(planned(seen(), policy=None), "wanted") == []


def test_the_same_server_is_watched_whatever_its_policy() -> None:
    """How often it is looked at, and how long it may take, does not make it another one."""
    other = Policy(canary=9, restarts=9, start_timeout=9)

    assert planned(seen(ranks="running")).attached
    assert planned(seen(ranks="running"), policy=other).attached


def test_another_policy_is_told_and_may_be_had() -> None:
    """By replacing it; the policy lies beside rank 0."""
    there = replace(seen(ranks="running"), wanted={"id": REQUEST.digest, "policy": {"canary": 5, "restarts": 3}})
    asked = Policy(restarts=9)
    anew = plan_ranks(INVENTORY, there, REQUEST, SECRETS, supervise=asked, replace_other=True)

    assert planned(there).plan.notes == ()
    assert planned(there, policy=asked).attached
    assert "restarts 3 and not 9; `--replace`" in planned(there, policy=asked).plan.notes[0]
    assert (anew.attached, len(steps(anew, "wanted"))) == (False, 1)


def test_a_group_that_gave_up_makes_room() -> None:
    """Its containers run, so that they can be asked why; they serve nobody. Another server need not be told to replace it."""
    there, other = seen("server/gave-up.json", ranks="running"), replace(REQUEST, model="org/other")
    for request in (REQUEST, other):
        start = planned(there, request)
        assert not start.attached
        assert [stage.id for stage in start.plan.stages if stage.steps] == ["files", "ranks", "wanted", "ranks"]
    with pytest.raises(RequestError, match="another server runs"):
        planned(seen(ranks="running"), other)


@pytest.mark.parametrize("beside", [True, False])
def test_secrets_that_a_ray_container_has_mounted_stay(beside: bool) -> None:
    """A changed `secrets_in` moves them with the next `up`: Ray would lose its token."""
    there, moved = seen(), replace(INVENTORY, secrets_in="memory")
    ray = Container(
        name=containers.name(moved, moved.head), id="r", role="head", node="n1", image="i", status="running", spec="of-before",
        exit_code=0, restarts=0, env={}, labels={},
    )  # fmt: skip
    own = replace(there.facts["n1"], secret_names=("RAY_AUTH_TOKEN",), containers=(ray,) if beside else ())
    start = plan_ranks(moved, Seen(facts={**there.facts, "n1": own}), REQUEST, SECRETS, supervise=Policy())
    removed = [step.command.node for step in steps(start, "files") if step.title.startswith("removing")]

    assert removed == ([] if beside else ["n1"])


@pytest.mark.parametrize("of", [1, 2])
def test_the_port_where_supervisors_meet_is_looked_at(of: int) -> None:
    """It is named with its key; one node has nobody to meet."""
    placed = replace(REQUEST, placement=choose(INVENTORY, 8, of))
    there = seen()
    taken = replace(there.facts["n1"], listening=frozenset({("0.0.0.0", 29560)}))
    plan = planned(Seen(facts={**there.facts, "n1": taken}), placed).plan
    found = [gate.judge({})[0] for stage in plan.stages for gate in stage.gates if gate.id == "group-port"]

    assert [(each.status, "`ports: {group: …}`" in each.fix) for each in found] == [("fail", True)] * (of - 1)
