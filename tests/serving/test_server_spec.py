"""The spec of a server: its processes, their GPUs, and their rendezvous."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.agent.desired import Policy
from launcher.core.domain import Backend
from launcher.tools import vllm
from launcher.tools.host import Gpu
from launcher.tools.host.survey import GpuProcess
from launcher.tools.site import Site
from tests.served import (
    BARE,
    INVENTORY,
    NODES,
    chat,
    make_snapshot,
    make_spec,
    option,
    request,
    server_row,
    uneven,
)


def test_a_ray_server() -> None:
    """One process on the head, with all fields for the supervisor and a rollback."""
    candidate = request(args=("--gpu-memory-utilization=0.5",))
    spec = make_spec(candidate, snapshot=make_snapshot(), policy=Policy(start_timeout=7200.0))
    (process,) = spec.processes

    assert (process.node, process.argv, process.gpus, process.replicas) == (
        "n1",
        candidate.build_command(("--cpu-distributed-timeout-seconds", "7200")),
        None,
        (0, 1),
    )
    assert process.env["VLLM_ENGINE_READY_TIMEOUT_S"] == "7200"
    assert (
        process.env["NCCL_DEBUG_FILE"] == f"/tmp/vlaunch-nccl.default-{candidate.digest}.%h.%p.log"
    )
    assert (spec.places, spec.tp, spec.replicas, spec.memory_share) == (
        {"n1": 8, "n2": 8},
        8,
        1,
        0.5,
    )
    assert (spec.visible, spec.image, spec.asked, spec.api_node) == (
        "CUDA_VISIBLE_DEVICES",
        "1",
        7.0,
        "n1",
    )
    assert spec.addresses == {"n1": "10.0.0.1", "n2": "10.0.0.2"}
    assert spec.ray is not None
    assert (spec.ray.gpus, spec.ray.reserve, spec.ray.dashboard) == (16, False, 8265)


@pytest.mark.parametrize("backend", ["ray", "mp"])
@pytest.mark.parametrize(
    ("timeout", "args", "seconds"),
    [
        (1800.0, (), []),
        (5400.0, (), ["5400"]),
        (5400.0, ("--cpu_distributed_timeout_seconds=60",), []),
    ],
)
def test_the_timeout_of_the_rendezvous(
    backend: Backend, timeout: float, args: tuple[str, ...], seconds: list[str]
) -> None:
    """A start timeout above Gloo's default is passed on unless the arguments set one; the server's
    identity is unchanged.
    """
    candidate = request(backend, args=args)
    spec = make_spec(candidate, policy=Policy(start_timeout=timeout))

    for process in spec.processes:
        own = process.argv[process.argv.index("--tensor-parallel-size") :]
        assert vllm.option_values(own, "--cpu-distributed-timeout-seconds") == seconds
    assert spec.id == candidate.digest


def test_a_single_node_has_no_timeout_option() -> None:
    """Its ranks start together."""
    alone = request("mp", nodes=("n1",), pp=1)
    (process,) = make_spec(alone, policy=Policy(start_timeout=5400.0)).processes

    assert "--cpu-distributed-timeout-seconds" not in process.argv


def test_variables_of_a_request() -> None:
    """All processes have them; variables of vlaunch and of the inventory stay."""
    env = {"A": "1", "NCCL_DEBUG": "TRACE"}
    first, two = make_spec(request("mp", env=env)).processes

    assert (first.env["A"], two.env["A"], first.env["NCCL_DEBUG"]) == ("1", "1", "INFO")


def test_an_mp_server() -> None:
    """One process per node with its rank, and an API only on the first; with Ray, its GPUs are
    reserved.
    """
    spec = make_spec(request("mp"))
    first, two = (process.argv for process in spec.processes)

    assert [process.node for process in spec.processes] == ["n1", "n2"]
    assert [option(argv, "--node-rank") for argv in (first, two)] == ["0", "1"]
    assert {
        option(argv, "--master-addr") + ":" + option(argv, "--master-port") for argv in (first, two)
    } == {"10.0.0.1:29501"}
    assert ("--headless" in first, "--headless" in two) == (False, True)
    assert spec.ray is not None
    assert (spec.ray.reserve, make_spec(request("mp"), BARE).ray) == (True, None)


def test_a_server_on_cpus() -> None:
    """No variable hides GPUs, their memory is not checked, and NCCL has no log."""
    cpu = replace(INVENTORY, accelerator="cpu")
    spec = make_spec(request(inventory=cpu), cpu)

    assert (spec.visible, spec.memory_share) == ("", None)
    assert list(spec.processes[0].env) == ["VLLM_ENGINE_READY_TIMEOUT_S"]


def test_variables_of_the_inventory_stay() -> None:
    """They are already in the container."""
    own = {
        "VLLM_ENGINE_READY_TIMEOUT_S": "9",
        "NCCL_DEBUG": "WARN",
        "VLLM_RAY_DP_PACK_STRATEGY": "fill",
    }
    inventory = replace(INVENTORY, nodes=(replace(NODES[0], env=own), NODES[1]))
    (process,) = make_spec(request(tp=4, pp=None, dp=4), inventory).processes

    assert not own.keys() & process.env.keys()
    assert process.env["VLLM_RAY_DP_PLACEMENT_NODE_IPS"] == "10.0.0.1,10.0.0.2"


def test_replicas_of_mp() -> None:
    """Every node runs its own, numbered from the first's, which alone has an API."""
    spec = make_spec(request("mp", tp=4, pp=None, dp=4))
    first, two = (process.argv for process in spec.processes)

    assert [process.replicas for process in spec.processes] == [(0, 2), (2, 2)]
    for argv in (first, two):
        assert option(argv, "--data-parallel-size") == "4"
        assert option(argv, "--data-parallel-size-local") == "2"
        assert option(argv, "--data-parallel-address") == "10.0.0.1"
        assert option(argv, "--data-parallel-rpc-port") == "29550"
        assert "--nnodes" not in argv
    assert ("--headless" in first, option(first, "--data-parallel-start-rank")) == (False, "")
    assert ("--headless" in two, option(two, "--data-parallel-start-rank")) == (True, "2")


def test_replicas_of_mp_behind_an_endpoint_of_every_node() -> None:
    """None is headless; vLLM's mode is unchanged, and every start number is known."""
    hybrid = "--data-parallel-hybrid-lb"
    spec = make_spec(request("mp", tp=4, pp=None, dp=4, args=(hybrid,)))
    first, two = (process.argv for process in spec.processes)

    assert [api.node for api in spec.apis] == ["n1", "n2"]
    for argv in (first, two):
        assert (hybrid in argv, "--headless" in argv) == (True, False)
        assert option(argv, "--data-parallel-size-local") == "2"
        assert option(argv, "--data-parallel-address") == "10.0.0.1"
    assert (option(first, "--data-parallel-start-rank"), spec.id) != ("2", make_spec(chat()).id)
    assert option(two, "--data-parallel-start-rank") == "2"


def test_replicas_of_mp_with_explicit_numbers() -> None:
    """vLLM takes a start number for hybrid load balancing, and rejects the two together."""
    external = "--data-parallel-external-lb"
    spec = make_spec(request("mp", tp=8, pp=None, dp=2, args=(external,)))

    for number, process in enumerate(spec.processes):
        assert option(process.argv, "--data-parallel-rank") == str(number)
        assert "--data-parallel-start-rank" not in process.argv
        assert process.replicas == (number, 1)


def test_uneven_nodes() -> None:
    """The first share starts at zero, the next at its end."""
    inventory = uneven(4, 2, 8)
    spec = make_spec(request("mp", tp=2, pp=None, dp=7, inventory=inventory), inventory)

    assert [(process.node, process.replicas) for process in spec.processes] == [
        ("n1", (0, 2)),
        ("n3", (2, 4)),
        ("n2", (6, 1)),
    ]


@pytest.mark.parametrize(
    ("gpus", "dp", "local", "strategy"),
    [((8, 8), 4, "2", "strict"), ((8, 4), 3, "2", "fill"), ((4, 4, 4, 4), 2, "", "span")],
)
def test_replicas_in_ray(gpus: tuple[int, ...], dp: int, local: str, strategy: str) -> None:
    """One process on the head; its environment has the replicas' placement."""
    inventory = uneven(*gpus)
    spec = make_spec(request(tp=None, pp=None, dp=dp, inventory=inventory), inventory)
    (process,) = spec.processes

    assert (option(process.argv, "--data-parallel-size"), process.replicas) == (str(dp), (0, dp))
    assert option(process.argv, "--data-parallel-backend") == "ray"
    assert option(process.argv, "--data-parallel-size-local") == local
    assert process.env["VLLM_RAY_DP_PACK_STRATEGY"] == strategy
    assert process.env["VLLM_RAY_DP_PLACEMENT_NODE_IPS"] == ",".join(
        node.ip for node in inventory.nodes
    )


def test_ray_assigns_gpu_numbers_itself() -> None:
    """The supervisor gets them from Ray; all GPUs of a node need no numbers."""
    assert [process.gpus for process in make_spec(chat()).processes] == [None]
    assert [
        ray.partial
        for candidate in (chat(), chat(tp=8), request())
        if (ray := make_spec(candidate).ray)
    ] == [True, False, False]
    assert [process.gpus for process in make_spec(chat(tp=8), BARE).processes] == [None]
    assert [process.gpus for process in make_spec(chat(), BARE).processes] == [(0, 1, 2, 3)]


def test_used_gpus_are_avoided() -> None:
    """Other GPUs come first, if they suffice. Indexes are those inside the container, which has
    only the node's GPUs.
    """
    gpus = tuple(
        Gpu(
            index=index,
            name="H100",
            memory_total=80000,
            memory_used=0,
            driver="580",
            uuid=f"GPU-{index}",
        )
        for index in range(8)
    )
    ada = GpuProcess(gpu="GPU-2", pid=7, name="python3", memory=70000, user="ada")
    nodes = (replace(NODES[0], gpus=6, gpu_ids=tuple("234567")), NODES[1])
    inventory = replace(BARE, nodes=nodes)
    snapshot = make_snapshot()
    facts = replace(snapshot.site.facts["n1"], gpus=gpus, gpu_processes=(ada,))
    snapshot = replace(snapshot, site=Site(inventory, {**snapshot.site.facts, "n1": facts}))

    def assigned(tp: int) -> tuple[int, ...] | None:
        candidate = chat(tp=tp, inventory=inventory)
        return make_spec(candidate, inventory, snapshot=snapshot).processes[0].gpus

    assert (assigned(4), assigned(5)) == ((1, 2, 3, 4), (1, 2, 3, 4, 5))
    candidate = chat(tp=4, inventory=inventory, args=("--gpu-memory-utilization=0.1",))
    assert make_spec(candidate, inventory, snapshot=snapshot).processes[0].gpus == (0, 1, 2, 3)


def test_a_port_in_use_is_no_rendezvous() -> None:
    """The next one is; it does not affect the server's identity."""
    snapshot = make_snapshot()
    facts = {
        **snapshot.site.facts,
        "n1": replace(snapshot.site.facts["n1"], listening=frozenset({("0.0.0.0", 29501)})),
    }
    spec = make_spec(request("mp"), snapshot=replace(snapshot, site=Site(INVENTORY, facts)))

    assert option(spec.processes[1].argv, "--master-port") == "29502"
    assert spec.id == make_spec(request("mp")).id


def test_a_stopping_server_has_no_spec() -> None:
    """Only its record has its ports and GPUs, which the plan does without."""
    other = {**server_row(request("mp", name="other", port=8001)), "desired": None}
    spec = make_spec(request("mp"), snapshot=make_snapshot(other))

    assert option(spec.processes[1].argv, "--master-port") == "29501"


def test_the_api_is_on_the_first_node_of_an_mp_server() -> None:
    """It need not be the head."""
    spec = make_spec(request("mp", tp=8, pp=1, nodes=("n2",)))

    assert (spec.api_node, spec.places, [process.node for process in spec.processes]) == (
        "n2",
        {"n2": 8},
        ["n2"],
    )
