"""The network gate of `vlaunch serve`: a check before the start, a confirmation after it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher.core.domain import Answer
from tests.command_line import INVENTORY, SECRET, Cluster, Ran
from tests.simulated import World

RDMA, TCP = "NET/IB/0", "NET/Socket/0"
SERVE = ("serve", "--model", "org/m")
ROCE = "network: {fabric: roce, require: rdma}\n"
MOE = {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 48,
    "num_experts": 128,
}
CONFIG = {
    "hidden_size": 8192,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}


def line(host: str, via: str) -> str:
    """Return NCCL's line for a link."""
    direction = "0[0] -> 1[0] [send]" if host == "gpu01" else "0[0] -> 1[0] [receive]"
    return f"{host}:7:9 [0] NCCL INFO Channel 00/0 : {direction} via {via}\n"


@pytest.fixture
def ready(cluster: Cluster) -> Cluster:
    """A running cluster on which servers answer at once, with ranks over TCP."""
    assert cluster.run("up").code == 0
    return answering(cluster)


def answering(cluster: Cluster, via: str = TCP) -> Cluster:
    """Let a server answer at once, with this link in its ranks' logs."""
    world = cluster.world
    first = {"model": "org/m", "text": "Hi", "fingerprint": "f", "seconds": 0.1, "replicas": []}
    ready = {"state": "ready", "verdict": "answering", "first_answer": first}
    world.observed |= dict.fromkeys(("default", "chat"), ready)
    for name, machine in world.machines.items():
        machine.engine_log = line(name, via)
    world.changes.clear()
    cluster.commands.clear()
    return cluster


def measured(cluster: Cluster) -> list[tuple[str, ...]]:
    """Return the network probes since the last call, and clear them."""
    calls = [
        command.argv for command in cluster.commands if "/opt/vlaunch/network.pyz" in command.argv
    ]
    cluster.commands.clear()
    return calls


def network_row(ran: Ran) -> str:
    """Return the network row of the summary."""
    return next(
        (
            row.partition(" ")[2].strip()
            for row in ran.out.splitlines()
            if row.startswith("network")
        ),
        "",
    )


def test_the_network_is_checked_before_the_start(ready: Cluster) -> None:
    """The result is recorded before the spec is written; the summary includes the ranks' logs."""
    ran = ready.run(*SERVE)

    assert ran.code == 0, ran.err
    assert ready.world.verbs() == ["gpu01: forget", "gpu01: keep", "gpu01: want", "gpu01: keep"]
    assert [argv[argv.index("--pair-timeout") + 1] for argv in measured(ready)] == ["20", "20"]
    assert network_row(ran) == "NET/Socket, 2 links (from the engine's logs)"


def test_a_pair_may_take_longer(ready: Cluster) -> None:
    """`--pair-timeout` reaches the probes of `serve`, as it does those of `check-nccl`."""
    ran = ready.run(*SERVE, "--pair-timeout", "75")

    assert ran.code == 0, ran.err
    assert [argv[argv.index("--pair-timeout") + 1] for argv in measured(ready)] == ["75", "75"]


def test_a_verdict_is_reused_until_a_container_restarts(ready: Cluster) -> None:
    """It is about one incarnation of the containers."""
    assert ready.run("check-nccl").code == 0
    measured(ready)
    ran = ready.run(*SERVE)

    assert (ran.code, measured(ready)) == (0, [])
    assert "network verified " in ran.err
    ready.unwant()
    ready.world.container("gpu02")["State"]["StartedAt"] = "2026-11-21T01:00:00Z"
    assert ready.run(*SERVE).code == 0
    assert len(measured(ready)) == 2


@pytest.mark.parametrize("required", ["any", "auto"])
def test_a_verdict_for_a_lower_level_does_not_count(cluster: Cluster, required: str) -> None:
    """`check-nccl --require any` must not let `serve` use TCP on a cluster with RDMA."""
    cluster.write("network: {fabric: roce}\n" + INVENTORY)
    assert cluster.run("up").code == 0
    answering(cluster)
    assert cluster.run("check-nccl", "--require", required).code == (0 if required == "any" else 1)
    measured(cluster)
    ran = cluster.run(*SERVE)

    assert (ran.code, len(measured(cluster))) == (1, 2)
    assert cluster.world.servers() == []


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"passed": true}', b"\xff\x00", b"[" * 100_000]
)
def test_an_unreadable_record_proves_nothing(ready: Cluster, content: bytes) -> None:
    """A file on a node may contain anything."""
    ready.world.machines["gpu01"].files["network.json"] = content.decode("latin-1").encode()

    assert ready.run(*SERVE).code == 0
    assert len(measured(ready)) == 2


@pytest.mark.parametrize("spoil", ["level", "probe"])
def test_a_failed_check_starts_no_server(cluster: Cluster, spoil: str) -> None:
    """Exit code 1, with the pair or node, and the fix."""
    cluster.write(ROCE + INVENTORY if spoil == "level" else INVENTORY)
    assert cluster.run("up").code == 0
    answering(cluster)
    if spoil == "probe":
        cluster.world.reports["gpu02"] = "Error response from daemon: no such container"
    ran = cluster.run(*SERVE)

    assert ran.code == 1
    assert ("gpu01 ↔ gpu02" if spoil == "level" else "gpu02: its probe sent no report") in ran.err
    assert "hint: " in ran.err
    assert cluster.world.verbs() == ["gpu01: forget"]
    assert "network.json" not in cluster.world.machines["gpu01"].files
    assert cluster.world.servers() == []


def test_a_skipped_check_is_reported(ready: Cluster) -> None:
    """Without measurements, the summary claims nothing."""
    ran = ready.run(*SERVE, "--skip-network-check")

    assert (ran.code, measured(ready)) == (0, [])
    assert "NETWORK CHECK SKIPPED" in ran.err
    assert "verified before" not in ran.out


def test_skipping_does_not_borrow_an_older_verdict(ready: Cluster) -> None:
    """A record of old containers does not count."""
    assert ready.run("check-nccl").code == 0
    ready.world.container("gpu02")["State"]["StartedAt"] = "2026-11-21T01:00:00Z"
    for machine in ready.world.machines.values():
        machine.engine_log = ""
    ran = ready.run(*SERVE, "--skip-network-check")

    assert network_row(ran) == "not verified; not confirmed by the engine's logs"


@pytest.mark.parametrize(("allow", "code"), [(False, 1), (True, 0)])
def test_ranks_below_the_level_stop_the_server(cluster: Cluster, allow: bool, code: int) -> None:
    """The check passes, yet the engine's ranks use TCP: unless that is allowed."""
    cluster.write(ROCE + INVENTORY)
    assert cluster.run("up").code == 0
    cluster.world.links["gpu01", "gpu02"] = RDMA
    answering(cluster, TCP)
    ran = cluster.run(*SERVE, *(["--skip-network-check"] if allow else []))

    assert ran.code == code
    assert "NET/Socket (TCP)" in ran.err
    assert bool(cluster.world.servers()) is allow
    assert ("its network is below the required level" in ran.err) is not allow
    assert allow or "hint: " in ran.err


def test_other_replicas_are_not_stopped(cluster: Cluster) -> None:
    """Only the one whose ranks are below the level, although all were requested at once."""
    cluster.write(ROCE + INVENTORY)
    assert cluster.run("up").code == 0
    cluster.world.links["gpu01", "gpu02"] = RDMA
    answering(cluster, TCP)
    layout = ("--backend", "mp", "--gpus", "4", "--tp", "4", "--pp", "2")
    ran = cluster.run(*SERVE, "--replicas", "2", *layout)

    assert (ran.code, "server `default`: the server answered, but" in ran.err) == (1, True), ran.err
    assert [server["name"] for server in cluster.world.servers()] == ["default.2"]


def test_an_attached_server_is_not_stopped(cluster: Cluster) -> None:
    """It only warns; the operator decides about a stop."""
    cluster.write(ROCE + INVENTORY)
    assert cluster.run("up").code == 0
    cluster.world.links["gpu01", "gpu02"] = RDMA
    answering(cluster, RDMA)
    assert cluster.run(*SERVE).code == 0
    answering(cluster, TCP)
    ran = cluster.run(*SERVE)

    assert ran.code == 1
    assert len(cluster.world.servers()) == 1


def test_a_server_that_cannot_be_stopped_is_reported(cluster: Cluster) -> None:
    """The first error stays the message."""
    cluster.write(ROCE + INVENTORY)
    assert cluster.run("up").code == 0
    cluster.world.links["gpu01", "gpu02"] = RDMA
    answering(cluster, TCP)
    cluster.world.fail["gpu01", "unwant"] = Answer(
        node="gpu01", code=1, err="rm: cannot remove: Permission denied"
    )
    ran = cluster.run(*SERVE)

    assert ran.code == 1
    assert "its network is below the required level" in ran.err
    assert "stopping the server failed" in ran.err


def test_required_rdma_is_in_the_summary(cluster: Cluster) -> None:
    """And in the event of `--json`."""
    cluster.write(ROCE + INVENTORY)
    assert cluster.run("up").code == 0
    cluster.world.links["gpu01", "gpu02"] = RDMA
    answering(cluster, RDMA)
    done = cluster.run(*SERVE, "--json").events[-1]

    assert (done["kind"], done["data"]["network"]) == (
        "done",
        "NET/IB, 2 links (from the engine's logs)",
    )


def test_a_node_with_silent_ranks_is_named(cluster: Cluster) -> None:
    """The other node's lines prove nothing about it; `status` repeats the result."""
    cluster.write(ROCE + INVENTORY)
    assert cluster.run("up").code == 0
    cluster.world.links["gpu01", "gpu02"] = RDMA
    answering(cluster, RDMA)
    cluster.world.machines["gpu02"].engine_log = "gpu02:7:9 [0] NCCL INFO Using network Socket\n"
    ran = cluster.run(*SERVE)

    assert ran.code == 0, ran.err
    assert "gpu02: no link between nodes in the ranks' logs" in ran.err
    assert "gpu02 not confirmed" in network_row(ran)
    assert "gpu02 not confirmed" in json.loads(cluster.run("status", "--json").out)["network"]


@pytest.mark.parametrize(("env", "named"), [("", False), ("env: {NCCL_DEBUG: WARN}\n", True)])
def test_silent_ranks_are_a_warning_and_never_a_pass(
    cluster: Cluster, env: str, named: bool
) -> None:
    """The server stays, and the summary does not confirm its network."""
    cluster.write(env + INVENTORY)
    assert cluster.run("up").code == 0
    answering(cluster)
    for machine in cluster.world.machines.values():
        machine.engine_log = "gpu01:7:9 [0] NCCL INFO Using network IB\n"
    ran = cluster.run(*SERVE)

    assert ran.code == 0, ran.err
    assert "no link between nodes in the ranks' logs" in ran.err
    assert ("remove NCCL_DEBUG from `env:`" in ran.err) is named
    assert network_row(ran).endswith("not confirmed by the engine's logs")
    assert "2 pairs" not in network_row(ran)
    assert len(cluster.world.servers()) == 1


def test_logs_and_records_are_sanitized(ready: Cluster) -> None:
    """The summary quotes nodes."""
    for machine in ready.world.machines.values():
        machine.engine_log = line("gpu01", "NET/\x1b[31mEvil\x1b[2J/0")
    ran = ready.run(*SERVE)

    assert "\x1b" not in ran.out + ran.err


def test_ranks_of_cpus_have_no_log_of_nccl(cluster: Cluster) -> None:
    """The summary has the earlier result."""
    assert cluster.run("up").code == 0
    cluster.write("accelerator: cpu\n" + INVENTORY)
    answering(cluster)
    ran = cluster.run(*SERVE)

    assert ran.code == 0, ran.err
    assert network_row(ran).startswith("1 pair over Gloo/TCP")
    assert network_row(ran).endswith("(verified before the start)")


def test_a_single_node_has_no_gate(cluster: Cluster) -> None:
    """It has no network between nodes."""
    cluster.write(
        "cluster: c\nimage: vllm/vllm-openai:v0.32.0\nnodes: [{host: gpu01, ip: 10.0.0.11, gpus:"
        " 8}]\n"
    )
    assert cluster.run("up").code == 0
    answering(cluster)
    ran = cluster.run(*SERVE)

    assert (ran.code, measured(cluster), network_row(ran)) == (0, [], "")


@pytest.mark.parametrize(("first", "second"), [("ray", "mp"), ("mp", "ray")])
def test_a_verdict_holds_for_both_backends(ready: Cluster, first: str, second: str) -> None:
    """They run in the same containers."""
    assert ready.run(*SERVE, "--backend", first, "--no-wait").code == 0
    assert len(measured(ready)) == 2
    ready.unwant()
    ran = ready.run(*SERVE, "--backend", second, "--no-wait")

    assert (ran.code, measured(ready)) == (0, []), ran.err
    assert "network verified " in ran.err


def test_only_the_nodes_of_an_mp_server_are_measured(cluster: Cluster) -> None:
    """Ray may place ranks anywhere; a verdict between some nodes does not cover others."""
    cluster.write(INVENTORY + "  - {host: gpu03, ip: 10.0.0.13, gpus: 8}\n")
    cluster.world = World(cluster.world.inventory)
    assert cluster.run("up").code == 0
    answering(cluster)
    args = (*SERVE, "--no-wait", "--replace", "--backend", "mp", "--nodes")
    assert cluster.run(*args, "gpu[02-03]").code == 0
    assert [
        command.node for command in cluster.commands if "/opt/vlaunch/network.pyz" in command.argv
    ] == [
        "gpu02",
        "gpu03",
    ]
    measured(cluster)

    assert (cluster.run(*args, "gpu03,gpu02", "--tp", "4").code, measured(cluster)) == (0, [])
    assert (cluster.run(*args, "gpu[01-02]").code, len(measured(cluster))) == (0, 2)
    assert json.loads(cluster.world.machines["gpu01"].files["network.json"])["nodes"] == [
        "gpu01",
        "gpu02",
    ]


@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_ranks_log_under_the_name_of_their_server(ready: Cluster, backend: str) -> None:
    """The configured log is the one that is read; its result is stored under the server's name."""
    assert ready.run(*SERVE, "--backend", backend, "--name", "chat").code == 0
    (server,) = ready.world.servers()
    calls = [command.argv for command in ready.commands if "log" in command.argv]
    records = json.loads(ready.world.machines["gpu01"].files["network.json"])["servers"]
    name = f"chat-{server['desired']['id']}"

    assert {process["env"]["NCCL_DEBUG_FILE"] for process in server["desired"]["processes"]} == {
        f"/tmp/vlaunch-nccl.{name}.%h.%p.log"
    }
    assert [argv[-1] for argv in calls] == [name] * 2
    assert records["chat"] == {
        "id": server["desired"]["id"],
        "said": "NET/Socket, 2 links (from the engine's logs)",
    }


@pytest.mark.parametrize("flags", [["--dry-run"], ["--dry-run", "--offline"]])
@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_a_dry_run_measures_nothing_and_shows_no_secret(
    ready: Cluster, flags: list[str], backend: str
) -> None:
    """The script names the gate; two scripts are equal."""
    ran = ready.run(*SERVE, "--backend", backend, *flags)
    again = ready.run(*SERVE, "--backend", backend, *flags)

    assert ran.code == 0, ran.err
    assert "# == Check the network between the nodes" in ran.out
    assert ran.out == again.out
    assert SECRET not in ran.out + ran.err
    assert (measured(ready), ready.world.changes) == ([], [])


def replicated(cluster: Cluster, config: Any) -> Cluster:
    """Let a model with this configuration answer as two replicas."""
    cluster.world.observed["default"]["first_answer"]["replicas"] = [0.1, 0.1]
    for machine in cluster.world.machines.values():
        machine.config = config
    return cluster


def test_replicas_of_a_dense_model_need_no_check(ready: Cluster) -> None:
    """They are independent engines: no measurements, and a note with the reason."""
    ran = replicated(ready, CONFIG).run(*SERVE, "--data-parallel-size", "2")

    assert (ran.code, measured(ready)) == (0, [])
    assert ready.world.verbs() == ["gpu01: want"]
    assert "replicas of a dense model exchange no data" in ran.err
    assert network_row(ran).startswith("replicas of a dense model exchange no data")
    assert "replicas     all 2 answered: DP0 in 0.1s, DP1 in 0.1s" in ran.out


def test_skipping_an_unnecessary_check_is_no_warning(ready: Cluster) -> None:
    """Useless warnings train users to ignore them."""
    ran = replicated(ready, CONFIG).run(*SERVE, "--dp", "2", "--skip-network-check")

    assert ran.code == 0
    assert "NETWORK CHECK SKIPPED" not in ran.err


@pytest.mark.parametrize(
    ("config", "args", "message"),
    [
        (MOE, [], "the model's 128 experts are split over all 16 ranks"),
        (
            MOE,
            ["--", "--enable-expert-parallel"],
            "the model's 128 experts are spread over all 16 ranks",
        ),
        (None, [], "cannot tell whether the model is a mixture of experts"),
    ],
)
@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_replicas_that_exchange_tokens_need_a_check(
    ready: Cluster, backend: str, config: Any, args: list[str], message: str
) -> None:
    """Every layer of a mixture of experts crosses the nodes: collectives are measured."""
    start = (*SERVE, "--dp", "2", "--backend", backend, "--no-wait", *args)
    ran = replicated(ready, config).run(*start)

    assert ran.code == 0, ran.err
    assert len(measured(ready)) == 2
    assert message in ran.err
    assert json.loads(ready.world.machines["gpu01"].files["network.json"])["collective"] is True


def test_replicas_do_not_rely_on_a_verdict_without_collectives(ready: Cluster) -> None:
    """A check for pipeline stages covers less."""
    replicated(ready, MOE)
    assert ready.run("check-nccl").code == 0
    record = json.loads(ready.world.machines["gpu01"].files["network.json"])
    ready.world.machines["gpu01"].files["network.json"] = json.dumps(
        {**record, "collective": False}
    ).encode()
    measured(ready)
    ran = ready.run(*SERVE, "--dp", "2", "--no-wait")

    assert (ran.code, len(measured(ready))) == (0, 2)
