"""Plans that start and stop a server: what they send, when they send nothing, and when they refuse."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.errors import PlacementError, RequestError
from launcher.model import Answer, Backend, Inventory, Node, Secret
from launcher.placement import choose
from launcher.plan import attached, containers, running, supervised
from launcher.plan.ranks import nodes_of, plan_ranks, specs
from launcher.plan.script import script
from launcher.plan.serve import Request, Seen, ask_model, model_gate, plan_files, plan_serve
from launcher.plan.stop import plan_forget, plan_stop
from launcher.plan.supervised import Policy
from launcher.tools import docker, payload
from launcher.tools.docker import Container, ContainerSpec
from launcher.tools.host import HostFacts

NODES = (
    Node(name="n1", host="n1", ip="10.0.0.1", gpus=8, head=True),
    Node(name="n2", host="n2", ip="10.0.0.2", gpus=8),
)
INVENTORY = Inventory(path=Path("inventory.yaml"), cluster="c", image="base:1", nodes=NODES)
SECRETS = {"VLLM_API_KEY": Secret("sk-very-secret"), "RAY_AUTH_TOKEN": Secret("ray-very-secret")}
IMAGE = docker.Image(id="sha256:1", identity="1", digests=(), architecture="amd64", labels={})


def request(backend: Any = "ray", tp: int = 8, pp: int = 2, **more: Any) -> Request:
    return Request(
        **{
            "model": "org/m", "placement": choose(INVENTORY, tp, pp), "backend": backend, "host": "0.0.0.0", "port": 8000,
            **more,
        }
    )  # fmt: skip


def container(name: str, status: str = "running", **more: Any) -> Container:
    given = {
        "name": name, "id": name, "role": "head", "node": "", "image": "i", "status": status, "spec": "", "exit_code": 0,
        "restarts": 0, "env": {}, "labels": {}, **more,
    }  # fmt: skip
    return Container(**given)


def seen(*jobs: dict[str, Any], ranks: dict[str, Container] | None = None, ray: bool = True, **said: Any) -> Seen:
    facts = {
        node.name: HostFacts(
            containers=(
                *([container(containers.name(INVENTORY, node))] if ray else []),
                *([ranks[node.name]] if ranks and node.name in ranks else []),
            ),
            listening=frozenset(),
            images={"base:1": IMAGE},
            docker_version="27",
        )
        for node in NODES
    }
    return Seen(facts=facts, said={"jobs": list(jobs), **said})


def job(asked: Request, n: int = 1, status: str = "RUNNING") -> dict[str, Any]:
    return {"submission_id": f"serve-{asked.digest}-{n}", "status": status, "metadata": asked.labels}


def started(wanted: dict[str, ContainerSpec], asked: Request, **status: str) -> dict[str, Container]:
    return {
        name: container(spec.name, status.get(name, "running"), role="rank", spec=spec.hash, labels=asked.labels)
        for name, spec in wanted.items()
    }


def sent(plan: Any, stage: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(s.command.node, s.command.argv) for each in plan.stages if each.id == stage for s in each.steps]


def test_submission() -> None:
    """One job on the head, described on standard input; all of it that a later run needs is in its metadata."""
    asked = request(args=("--max-model-len", "4096"))
    start = plan_serve(INVENTORY, seen(), asked)
    (step,) = start.plan.steps
    assert step.command.stdin is not None
    body = json.loads(step.command.stdin())

    assert (step.command.node, start.job, start.attached) == ("n1", f"serve-{asked.digest}-1", False)
    assert step.command.argv == (
        "docker", "exec", "--interactive", "vlaunch-c-n1", *payload.submit(INVENTORY.ports)
    )  # fmt: skip
    assert body["argv"] == [
        "env", "NCCL_DEBUG=INFO", f"NCCL_DEBUG_FILE=/tmp/vlaunch-nccl.{start.job}.%h.%p.log",
        "NCCL_DEBUG_SUBSYS=INIT,BOOTSTRAP,ENV,NET", *asked.argv,
    ]  # fmt: skip
    assert body["submission_id"] == start.job
    assert body["metadata"]["vlaunch.model"] == "org/m"
    assert all(isinstance(value, str) for value in body["metadata"].values())


def test_the_script_pipes_what_the_run_sends() -> None:
    """A dry run shows the job's whole description, quoted for a shell."""
    asked = request(args=("--chat-template", "it's"))
    start = plan_serve(INVENTORY, seen(), asked)
    text = script(INVENTORY, [start.plan])

    assert 'printf %s \'{"argv"' in text
    assert "it'\"'\"'s" in text
    assert "# gate free-gpus" in text


def supervised_body(asked: Request, inventory: Inventory = INVENTORY) -> dict[str, Any]:
    plan = plan_serve(inventory, seen(), asked, supervise=Policy(canary=2, restarts=1, start_timeout=60)).plan
    (step,) = plan.steps
    assert step.command.stdin is not None
    found: dict[str, Any] = json.loads(step.command.stdin())
    return found


def test_submission_to_a_supervisor() -> None:
    """It gets everything that a start needs, also one without the launcher; no value of a secret is among it."""
    asked = request()
    body = supervised_body(asked)
    wanted = body["wanted"]

    assert "argv" not in body
    assert (wanted["id"], wanted["argv"], wanted["metadata"]) == (asked.digest, list(asked.argv), asked.labels)
    assert wanted["cluster"] == {"nodes": {"10.0.0.1": 8, "10.0.0.2": 8}, "needs": 16, "port": INVENTORY.ports.node_manager}
    assert wanted["env"]["NCCL_DEBUG_FILE"] == f"/tmp/vlaunch-nccl.{body['submission_id']}.%h.%p.log"
    assert (wanted["api"], wanted["dashboard"], wanted["image"]) == ({"host": "127.0.0.1", "port": 8000}, 8265, "1")
    assert {"canary": 2, "restarts": 1, "start_timeout": 60}.items() <= wanted["policy"].items()


def test_submission_without_a_supervisor() -> None:
    """vLLM is the job, and what was wanted before is forgotten."""
    (step,) = plan_serve(INVENTORY, seen(), request()).plan.steps
    assert step.command.stdin is not None
    body = json.loads(step.command.stdin())

    assert (body["wanted"], body["argv"][-len(request().argv) :]) == (None, list(request().argv))


def recovering(asked: Request, **more: Any) -> dict[str, Any]:
    """Return what the head says of a server that waits to be handed to Ray."""
    return {
        "id": asked.digest,
        "state": "recovering",
        "wanted": True,
        "age": 2,
        "backend": "ray",
        "metadata": asked.labels,
        **more,
    }


def test_a_server_that_comes_back_by_itself_runs() -> None:
    """The head has restarted, and Ray has no job of it yet: it is watched, refused, or stopped like any other."""
    asked = request()
    there = seen(supervised=recovering(asked))
    found = running.find(INVENTORY, there.facts, there.said)
    start = plan_serve(INVENTORY, there, asked)

    assert [(each.id, each.model, each.gpus) for each in found] == [(f"serve-{asked.digest}-0", "org/m", 16)]
    assert (start.attached, start.job) == (True, f"serve-{asked.digest}-0")
    with pytest.raises(RequestError, match="another server runs"):
        plan_serve(INVENTORY, there, replace(asked, model="other"))
    assert "--job" in plan_stop(INVENTORY, there.facts, found, 15).steps[0].command.argv


@pytest.mark.parametrize(
    "more", [{"age": 600}, {"wanted": False}, {"state": "gave-up"}, {"metadata": None}, {"id": 7}, {"backend": "mp"}]
)
def test_a_server_that_does_not_come_back_does_not_run(more: dict[str, Any]) -> None:
    """What a supervisor wrote long ago, or of a server that was stopped, holds nobody up."""
    there = seen(supervised=recovering(request(), **more))

    assert running.find(INVENTORY, there.facts, there.said) == []


def test_a_job_outdoes_what_its_supervisor_wrote() -> None:
    """While Ray knows the server, there is one, not two."""
    asked = request()
    there = seen(job(asked), supervised=recovering(asked))

    assert [each.id for each in running.find(INVENTORY, there.facts, there.said)] == [f"serve-{asked.digest}-1"]


def test_the_same_request_attaches() -> None:
    """A server that runs already is watched, and nothing is sent."""
    start = plan_serve(INVENTORY, seen(job(request(), 3)), request())

    assert (start.attached, start.job, start.plan.steps) == (True, f"serve-{request().digest}-3", ())


def kept(policy: Policy | None, asked: Request) -> dict[str, Any]:
    """Return what the head's folder says while a server runs."""
    if policy is None:
        return {}
    return supervised.wanted(INVENTORY, asked, policy, argv=asked.argv, env={}, image="1", host="127.0.0.1")


FIGURES = "restarts 3 and not 7, canary 5 and not 2.5"


@pytest.mark.parametrize(
    ("runs", "asked", "said"),
    [
        (Policy(), Policy(), ""),
        (None, None, ""),
        (None, Policy(), "nobody supervises it: it stays dead when a rank, a node or the engine dies"),
        (Policy(), None, "it is supervised"),
        (Policy(), Policy(restarts=7, canary=2.5, start_timeout=60), f"it was started with {FIGURES}"),
    ],
)
def test_the_same_server_under_another_supervision(runs: Policy | None, asked: Policy | None, said: str) -> None:
    """It is watched as it is, and what differs is told; `--replace` starts it anew, which it does not when nothing differs."""
    there = replace(seen(job(request())), wanted=kept(runs, request()))
    start = plan_serve(INVENTORY, there, request(), supervise=asked)
    anew = plan_serve(INVENTORY, there, request(), supervise=asked, replace_other=True)

    assert start.attached
    assert start.plan.notes == ((f"{said}; `--replace` starts it anew as asked",) if said else ())
    assert anew.attached is not bool(said)
    assert [stage.id for stage in anew.plan.stages] == (["preflight", "stop", "submit"] if said else [])


def test_a_flag_that_the_running_server_contradicts() -> None:
    """`--no-supervise` is not forgotten silently; it is no contradiction where nobody supervises, or where nobody knows."""
    there = seen(job(request()))
    with pytest.raises(RequestError, match=r"org/m runs already .*, and it is supervised") as refused:
        plan_serve(INVENTORY, replace(there, wanted=kept(Policy(), request())), request(), insist=True)

    assert "`--replace`" in refused.value.hint
    for wanted in (kept(None, request()), kept(Policy(), request(args=("--seed", "1"))), None):
        assert plan_serve(INVENTORY, replace(there, wanted=wanted), request(), insist=True).attached


@pytest.mark.parametrize(
    "said", ["", "[1]", '{"id": 7}', "nonsense", *(f'{{"id": "ID", "policy": {each}}}' for each in ("7", '{"restarts": "x"}'))]
)
def test_what_a_head_says_is_wanted_may_be_anything(said: str) -> None:
    """The server is watched all the same."""
    text = said.replace("ID", request().digest)
    wanted = attached.read(Answer(node="n1", code=0, out=f"[]\n\x1e\n{text}\n\x1e\n"))

    assert plan_serve(INVENTORY, replace(seen(job(request())), wanted=wanted), request(), supervise=Policy()).attached
    assert attached.read(Answer(node="n1", code=255, err="lost")) is None


@pytest.mark.parametrize("status", ["FAILED", "STOPPED", "SUCCEEDED"])
def test_a_job_that_is_over_is_followed_by_the_next(status: str) -> None:
    """Ray keeps the names of old jobs, so the next one gets another number."""
    start = plan_serve(INVENTORY, seen(job(request(), 9, status)), request())

    assert (start.attached, start.job) == (False, f"serve-{request().digest}-10")


@pytest.mark.parametrize(
    "change",
    [{"model": "org/other"}, {"port": 8001}, {"args": ("--seed", "1")}, {"placement": choose(INVENTORY, 4, 4)}],
)
def test_another_server_is_not_pushed_aside(change: dict[str, Any]) -> None:
    """Whatever differs makes another server; it is refused, unless it is to take the place."""
    there, asked = seen(job(request())), replace(request(), **change)
    with pytest.raises(RequestError, match="another server runs: org/m") as refused:
        plan_serve(INVENTORY, there, asked)
    start = plan_serve(INVENTORY, there, asked, replace_other=True)

    assert "--replace" in refused.value.hint
    assert [stage.id for stage in start.plan.stages] == ["preflight", "stop", "submit"]


def test_jobs_of_others_are_left_alone() -> None:
    """A Ray job without our metadata is nobody's server."""
    other = {"submission_id": "raysubmit_1", "status": "RUNNING", "metadata": {}}

    assert running.find(INVENTORY, seen(other).facts, seen(other).said) == []
    assert plan_serve(INVENTORY, seen(other), request()).plan.steps


def test_preflight_of_the_ray_backend() -> None:
    """What would make vLLM wait or fail later is looked at first."""
    gates = [gate.id for stage in plan_serve(INVENTORY, seen(), request()).plan.stages for gate in stage.gates]

    assert gates == ["cluster", "model", "free-gpus", "api-port"]


def test_ranks() -> None:
    """One container a node at once: the same command, the rank, and no API but on the first; key and token only as files."""
    plan = plan_ranks(INVENTORY, seen(ray=False), request("mp"), SECRETS).plan
    ((first, one), (second, two)) = sent(plan, "ranks")

    assert (first, second) == ("n1", "n2")
    assert one[one.index("--node-rank") :][:2] == ("--node-rank", "0")
    assert two[two.index("--node-rank") :][:2] == ("--node-rank", "1")
    assert ("--headless" in one, "--headless" in two) == (False, True)
    assert "vlaunch.role=rank" in one
    assert not any("very-secret" in word for _, argv in (*sent(plan, "files"), *sent(plan, "ranks")) for word in argv)
    assert "very-secret" not in script(INVENTORY, [plan])


def test_ranks_do_not_need_ray() -> None:
    """Without `up`, files and secrets are brought along; Ray's image is not used."""
    plan = plan_ranks(INVENTORY, seen(ray=False), request("mp"), SECRETS).plan
    titles = [step.title for stage in plan.stages if stage.id == "files" for step in stage.steps]

    assert titles.count("writing secret VLLM_API_KEY") == 2
    assert titles.count("writing the helper files that containers mount") == 2
    assert all("base:1" in argv for _, argv in sent(plan, "ranks"))


def replicated(
    backend: Any = "mp", dp: int = 4, tp: int | None = None, inventory: Inventory = INVENTORY, **more: Any
) -> Request:
    placed = choose(inventory, tp, None, dp=dp, backend=backend)
    return request(backend, placement=placed, **more)


def option(argv: tuple[str, ...] | list[str], name: str) -> str:
    return argv[argv.index(name) + 1] if name in argv else ""


def test_replicas_of_mp() -> None:
    """Each node runs its own, numbered on from the head's, which alone has an API; all meet at the head."""
    plan = plan_ranks(INVENTORY, seen(ray=False), replicated(), SECRETS).plan
    ((first, one), (second, two)) = sent(plan, "ranks")

    assert (first, second) == ("n1", "n2")
    for argv in (one, two):
        assert option(argv, "--data-parallel-size") == "4"
        assert option(argv, "--data-parallel-size-local") == "2"
        assert option(argv, "--data-parallel-address") == "10.0.0.1"
        assert option(argv, "--data-parallel-rpc-port") == "29550"
        assert option(argv, "--tensor-parallel-size") == "4"
        assert "--nnodes" not in argv
        assert "vlaunch.dp=4" in argv
    assert ("--headless" in one, option(one, "--data-parallel-start-rank")) == (False, "")
    assert ("--headless" in two, option(two, "--data-parallel-start-rank")) == (True, "2")


def test_uneven_nodes_hold_what_they_can() -> None:
    """The first node's share begins at nothing, the next where it ends."""
    nodes = tuple(Node(name=f"n{i}", host="h", ip=f"10.0.0.{i}", gpus=g, head=i == 0) for i, g in enumerate((4, 2, 8)))
    inventory = replace(INVENTORY, nodes=nodes)
    plan = plan_ranks(inventory, Seen(), replicated(dp=7, tp=2, inventory=inventory), SECRETS).plan
    shares = [
        (node, option(argv, "--data-parallel-size-local"), option(argv, "--data-parallel-start-rank"))
        for node, argv in sent(plan, "ranks")
    ]

    assert shares == [("n0", "2", ""), ("n2", "4", "2"), ("n1", "1", "6")]


def test_the_same_replicas_attach() -> None:
    """Another number of replicas is another server."""
    asked = replicated()
    there = seen(ranks=started(specs(INVENTORY, seen(), asked, SECRETS), asked))
    start = plan_ranks(INVENTORY, there, asked, SECRETS)

    assert (start.attached, start.plan.steps) == (True, ())
    with pytest.raises(RequestError, match="another server runs"):
        plan_ranks(INVENTORY, there, replicated(dp=2, tp=4), SECRETS)


def test_the_port_where_replicas_meet_is_looked_at() -> None:
    """It is taken, and what to change is named; ranks of one model meet at another."""
    there = seen(ray=False)
    taken = {**there.facts, "n1": replace(there.facts["n1"], listening=frozenset({("0.0.0.0", 29550)}))}
    for asked, id, status in ((replicated(), "dp-port", "fail"), (request("mp"), "mp-port", "pass")):
        plan = plan_ranks(INVENTORY, replace(there, facts=taken), asked, SECRETS).plan
        (found,) = next(g for stage in plan.stages for g in stage.gates if g.id == id).judge({})

        assert found.status == status
        assert status == "pass" or "`ports: {dp_rpc: …}`" in found.fix
    one_node = plan_ranks(INVENTORY, there, replicated(dp=2, tp=4), SECRETS).plan
    assert not [g for stage in one_node.stages for g in stage.gates if g.id.endswith("-port") and g.id != "api-port"]


@pytest.mark.parametrize(
    ("gpus", "dp", "local", "strategy"), [((8, 8), 4, "2", "strict"), ((8, 4), 3, "2", "fill"), ((4, 4, 4, 4), 2, "", "span")]
)
def test_replicas_in_ray(gpus: tuple[int, ...], dp: int, local: str, strategy: str) -> None:
    """One job on the head; where the replicas belong is in its environment."""
    nodes = tuple(Node(name=f"n{i + 1}", host="h", ip=f"10.0.0.{i + 1}", gpus=g, head=i == 0) for i, g in enumerate(gpus))
    inventory = replace(INVENTORY, nodes=nodes)
    (step,) = plan_serve(inventory, Seen(), replicated("ray", dp=dp, inventory=inventory)).plan.steps
    assert step.command.stdin is not None
    body = json.loads(step.command.stdin())

    assert option(body["argv"], "--data-parallel-size") == body["metadata"]["vlaunch.dp"] == str(dp)
    assert option(body["argv"], "--data-parallel-backend") == "ray"
    assert option(body["argv"], "--data-parallel-size-local") == local
    assert f"VLLM_RAY_DP_PACK_STRATEGY={strategy}" in body["argv"]
    assert f"VLLM_RAY_DP_PLACEMENT_NODE_IPS={','.join(node.ip for node in nodes)}" in body["argv"]


def test_the_users_own_placement_of_replicas_stays() -> None:
    """A variable that the inventory sets is not set again; a single replica has none of these."""
    inventory = replace(INVENTORY, nodes=(replace(NODES[0], env={"VLLM_RAY_DP_PACK_STRATEGY": "fill"}), NODES[1]))
    for asked, expected in ((replicated("ray"), ["VLLM_RAY_DP_PLACEMENT_NODE_IPS"]), (request(), [])):
        (step,) = plan_serve(inventory, Seen(), asked).plan.steps
        assert step.command.stdin is not None
        words = json.loads(step.command.stdin())["argv"]

        assert [word.partition("=")[0] for word in words if word.startswith("VLLM_RAY_DP")] == expected


def test_all_replicas_need_free_gpus() -> None:
    """Ray would let vLLM wait for the last replica without a word."""
    group = {"state": "CREATED", "bundles": [{"unit_resources": {"GPU": 1.0}}]}
    plan = plan_serve(INVENTORY, seen(groups={"data": {"result": {"result": [group]}}}), replicated("ray")).plan
    (found,) = next(g for stage in plan.stages for g in stage.gates if g.id == "free-gpus").judge({})

    assert (found.status, found.text[:70]) == ("fail", "15 of 16 GPUs are free in Ray, DP 4 × TP 4 × PP 1 needs 16")


@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_replicas_are_told(backend: str) -> None:
    """Where they will be, and how they answer."""
    asked = replicated(backend)
    start = plan_serve(INVENTORY, seen(), asked) if backend == "ray" else plan_ranks(INVENTORY, seen(), asked, SECRETS)

    assert start.plan.notes[0].startswith("DP 4 × TP 4 × PP 1 (each replica gets 4 of 16 GPUs as TP)")
    assert start.plan.notes[1].startswith("4 replicas (2 on n1, 2 on n2) answer behind one endpoint")


def test_the_same_ranks_attach() -> None:
    """Containers with the same hash that all run are watched, and nothing is sent."""
    asked = request("mp")
    wanted = specs(INVENTORY, seen(), asked, SECRETS)
    start = plan_ranks(INVENTORY, seen(ranks=started(wanted, asked)), asked, SECRETS)

    assert (start.attached, start.plan.steps) == (True, ())


def test_ranks_of_which_one_has_ended_start_anew() -> None:
    """What cannot serve any more is cleared away without being asked."""
    asked = request("mp")
    wanted = specs(INVENTORY, seen(), asked, SECRETS)
    start = plan_ranks(INVENTORY, seen(ranks=started(wanted, asked, n2="exited")), asked, SECRETS)

    assert not start.attached
    assert [stage.id for stage in start.plan.stages] == ["preflight", "same-image", "files", "ranks", "ranks"]


def test_other_ranks_are_not_pushed_aside() -> None:
    """Another model in the rank containers, or a server in Ray, is refused unless it is to be replaced."""
    other = request("mp", model="org/other")
    there = seen(ranks=started(specs(INVENTORY, seen(), other, SECRETS), other))
    with pytest.raises(RequestError, match="org/other"):
        plan_ranks(INVENTORY, there, request("mp"), SECRETS)
    with pytest.raises(RequestError, match="org/other"):
        plan_serve(INVENTORY, there, request())
    with pytest.raises(RequestError, match="Ray job serve-"):
        plan_ranks(INVENTORY, seen(job(request())), request("mp"), SECRETS)

    assert plan_ranks(INVENTORY, there, request("mp"), SECRETS, replace_other=True).plan.steps


def test_mp_is_refused_while_ray_holds_gpus() -> None:
    """A batch job in Ray is not told to vLLM's own ranks, which would take the same GPUs."""
    group = {"state": "CREATED", "bundles": [{"unit_resources": {"GPU": 1.0}}]}
    there = seen(groups={"data": {"result": {"result": [group]}}})
    gates = [gate for stage in plan_ranks(INVENTORY, there, request("mp"), SECRETS).plan.stages for gate in stage.gates]
    (found,) = next(gate for gate in gates if gate.id == "free-gpus").judge({})

    assert (found.status, found.text) == ("fail", "work in Ray holds 1 of 16 GPUs")


@pytest.mark.parametrize("backend", ["ray", "mp"])
@pytest.mark.parametrize(("theirs", "status"), [("12", "fail"), ("0", "pass")])
def test_a_server_is_not_replaced_by_one_that_lacks_room(backend: Backend, theirs: str, status: str) -> None:
    """What the old one holds is counted as free, what a batch job needs is not."""
    batch = {"submission_id": "b-1", "status": "RUNNING", "metadata": {"vlaunch.batch": "b", "vlaunch.gpus": theirs}}
    old = job(request(model="org/other"))
    group = {"state": "CREATED", "bundles": [{"unit_resources": {"GPU": 1.0}}] * 16}
    there = seen(old, batch, groups={"data": {"result": {"result": [group]}}})
    start = (
        plan_serve(INVENTORY, there, request(), replace_other=True)
        if backend == "ray"
        else plan_ranks(INVENTORY, there, request("mp"), SECRETS, replace_other=True)
    )
    gates = [gate for stage in start.plan.stages for gate in stage.gates]
    (found,) = next(gate for gate in gates if gate.id == "free-gpus").judge({})

    assert found.status == status


def test_mp_is_refused_beside_a_batch_job_that_has_just_begun() -> None:
    """It holds nothing yet; who it is and how to end it is told."""
    batch = {"submission_id": "b-1", "status": "RUNNING", "metadata": {"vlaunch.batch": "b", "vlaunch.gpus": "2"}}
    gates = [gate for stage in plan_ranks(INVENTORY, seen(batch), request("mp"), SECRETS).plan.stages for gate in stage.gates]
    (found,) = next(gate for gate in gates if gate.id == "free-gpus").judge({})

    assert (found.status, found.text) == ("fail", "batch job `b` holds 2 of 16 GPUs")
    assert found.fix == "wait for it, or end it: `vlaunch stop b`"


def test_mp_is_refused_while_ray_does_not_say_what_it_holds() -> None:
    """A dashboard that hangs has not said that the GPUs are free."""
    there = seen(error="timed out")
    gates = [gate for stage in plan_ranks(INVENTORY, there, request("mp"), SECRETS).plan.stages for gate in stage.gates]
    (found,) = next(gate for gate in gates if gate.id == "free-gpus").judge({})

    assert (found.status, found.node) == ("fail", "n1")
    assert "timed out" in found.text


def test_ranks_run_in_the_same_image() -> None:
    """A tag that means another build on one node is found before any rank starts."""
    there = seen(ray=False)
    other = replace(IMAGE, id="sha256:2", identity="2")
    facts = {**there.facts, "n2": replace(there.facts["n2"], images={"base:1": other})}
    plan = plan_ranks(INVENTORY, replace(there, facts=facts), request("mp"), SECRETS).plan
    findings = [f for stage in plan.stages for gate in stage.gates if gate.id == "image" for f in gate.judge({})]

    assert "fail" in [each.status for each in findings]


def test_the_note_and_the_model_gate_of_mp_name_the_nodes_that_get_ranks() -> None:
    """A node in between that is too small is left out of both."""
    nodes = tuple(Node(name=f"n{i}", host="h", ip=f"10.0.0.{i}", gpus=count, head=i == 0) for i, count in enumerate((2, 1, 2)))
    inventory = replace(INVENTORY, nodes=nodes)
    asked = request("mp", placement=choose(inventory, 2, 2, backend="mp"))
    plan = plan_ranks(inventory, Seen(), asked, SECRETS).plan
    judged = [each.node for each in model_gate(inventory, Seen(), asked).judge({})]

    assert any("ranks expected 2 on n0, 2 on n2" in note for note in plan.notes)
    assert [node for node, _ in sent(plan, "ranks")] == judged == ["n0", "n2"]


@pytest.mark.parametrize(
    ("gpus", "tp", "pp", "names"),
    [
        ((8, 8), 8, 2, ["n0", "n1"]),
        ((8, 8), 8, 1, ["n0"]),
        ((4, 8, 8), 4, 2, ["n0", "n1"]),
        ((2, 4, 4), 2, 3, ["n0", "n1", "n2"]),
    ],
)
def test_nodes_share_equally(gpus: tuple[int, ...], tp: int, pp: int, names: list[str]) -> None:
    """As few nodes as can take equal shares, the head always among them."""
    nodes = tuple(Node(name=f"n{i}", host="h", ip="10.0.0.1", gpus=count, head=i == 0) for i, count in enumerate(gpus))
    inventory = replace(INVENTORY, nodes=nodes)

    assert names == [node.name for node in nodes_of(inventory, choose(inventory, tp, pp))]


def test_nodes_that_cannot_share_equally() -> None:
    """vLLM gives each of its nodes the same number of ranks."""
    inventory = replace(INVENTORY, nodes=(replace(NODES[0], gpus=8), replace(NODES[1], gpus=4)))
    with pytest.raises(PlacementError, match="shared equally"):
        nodes_of(inventory, choose(inventory, 4, 3))


def test_stop() -> None:
    """Jobs and rank containers are stopped, ended ones too, and both are proven gone."""
    asked = request("mp")
    wanted = specs(INVENTORY, seen(), asked, SECRETS)
    there = seen(job(request()), ranks=started(wanted, asked, n2="exited"))
    plan = plan_stop(INVENTORY, there.facts, running.find(INVENTORY, there.facts, there.said), 15)

    assert [stage.id for stage in plan.stages] == ["stop", "ranks"]
    assert [gate.id for stage in plan.stages for gate in stage.gates] == ["server-gone", "ranks-gone"]
    assert [node for node, _ in sent(plan, "ranks")] == ["n1", "n2"]
    assert sent(plan, "stop")[0][1][-6:] == ("--dashboard", "8265", "--job", f"serve-{request().digest}-1", "--grace", "15")


def test_nothing_to_stop() -> None:
    """Without a server there is no step."""
    assert plan_stop(INVENTORY, seen().facts, [], 15).stages == ()


def test_what_does_not_run_and_is_wanted_is_forgotten(tmp_path: Path) -> None:
    """On the head alone, and by the login's own shell; where something is stopped on the head, that does it."""
    there = seen(job(request()), ray=False)
    facts = {name: replace(each, files={"server/wanted.json": "0" * 64}) for name, each in there.facts.items()}
    nothing, something = (
        plan_stop(INVENTORY, facts, [], 15),
        plan_stop(INVENTORY, facts, running.find(INVENTORY, facts, there.said), 15),
    )
    (step,) = plan_forget(INVENTORY, facts, nothing, gave_up=True).steps
    folder = tmp_path / "server"
    folder.mkdir()
    for name in ("wanted.json", "server.json"):
        (folder / name).write_text("{}")
    (folder / "answered.json").write_text("[]")
    argv = [str(tmp_path) if word == "/root/.vlaunch/c" else word for word in step.command.argv]
    subprocess.run(argv, check=True, timeout=10)

    assert step.command.node == "n1"
    assert [path.name for path in folder.iterdir()] == ["answered.json"]
    assert plan_forget(INVENTORY, facts, something, gave_up=True).steps == ()
    assert plan_forget(INVENTORY, there.facts, nothing, gave_up=False).steps == ()
    assert plan_forget(INVENTORY, {}, nothing, gave_up=True).steps == ()


def test_the_model_is_asked_for_where_it_is_used() -> None:
    """In the running container, which has the mounts; else in a throw-away one with the same; else not at all."""
    inside = ask_model(INVENTORY, seen().facts, "/m")
    fresh = ask_model(replace(INVENTORY, mounts=()), seen(ray=False).facts, "/m")
    nobody = ask_model(INVENTORY, {name: HostFacts() for name in ("n1", "n2")}, "/m")

    assert [command.argv[:3] for command in inside] == [("docker", "exec", "vlaunch-c-n1"), ("docker", "exec", "vlaunch-c-n2")]
    assert fresh[0].argv[3:5] == ("once", "vlaunch-c-n1-probe")
    assert {"vlaunch.cluster=c", "vlaunch.node=n1"} <= set(fresh[0].argv)
    assert "/data/huggingface:/data/huggingface" in fresh[0].argv
    assert nobody == []


def test_helper_files_of_running_containers_are_brought_up_to_date() -> None:
    """A newer vlaunch asks questions that an older helper program does not understand."""
    assert len(plan_files(INVENTORY, seen().facts).steps) == 2
    assert plan_files(INVENTORY, {}).steps == ()
