"""Command line of vLLM, and parsers of its recorded logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.core.domain import Argv, ServerSpec
from launcher.tools import vllm

LOGS = Path(__file__).parent.parent / "fixtures" / "vllm"
ALL = ["config", "engine", "placement", "workers", "load", "warm-up", "kv-cache", "api", "answer"]


def log(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


def command(model: str, *, multi_node: Argv = (), **spec: Any) -> Argv:
    return vllm.serve(ServerSpec(model=model, **spec), multi_node)


def without(*phases: str) -> list[str]:
    return [phase for phase in ALL if phase not in phases]


def test_serve_under_ray() -> None:
    """Ray is always named, because vLLM would not choose it; our options come last, and win."""
    assert command(
        "org/m",
        tp=8,
        pp=2,
        backend="ray",
        host="0.0.0.0",
        port=8000,
        args=("--max-model-len", "512"),
    ) == (
        "vllm",
        "serve",
        "org/m",
        "--max-model-len",
        "512",
        "--tensor-parallel-size",
        "8",
        "--pipeline-parallel-size",
        "2",
        "--distributed-executor-backend",
        "ray",
        "--host",
        "0.0.0.0",
        "--port",
        "8000",
    )


def test_a_single_rank_needs_no_executor() -> None:
    """One process on one GPU: vLLM chooses the executor."""
    assert "--distributed-executor-backend" not in command(
        "m", tp=1, pp=1, backend="mp", host="::", port=1
    )


def test_ranks_of_several_nodes() -> None:
    """Only the first node has an API; a single node gets no options."""
    common = (
        "--nnodes",
        "2",
        "--node-rank",
        "0",
        "--master-addr",
        "10.0.0.1",
        "--master-port",
        "29501",
    )

    assert common == vllm.rank_options(2, 0, "10.0.0.1", 29501)
    assert (*common[:3], "1", *common[4:], "--headless") == vllm.rank_options(
        2, 1, "10.0.0.1", 29501
    )
    assert vllm.rank_options(1, 0, "10.0.0.1", 29501) == ()


def test_replicas() -> None:
    """A single replica gets no options; the executor depends on the layout of a replica."""
    plain = command("m", tp=1, pp=1, dp=1, backend="mp", host="::", port=1)
    two = command(
        "m",
        tp=2,
        pp=1,
        dp=4,
        backend="ray",
        host="::",
        port=1,
        multi_node=("--data-parallel-size-local", "2"),
    )

    assert not any("data-parallel" in argument for argument in plain)
    assert two[7:] == (
        "--distributed-executor-backend",
        "ray",
        "--data-parallel-size",
        "4",
        "--data-parallel-backend",
        "ray",
        "--data-parallel-size-local",
        "2",
        "--host",
        "::",
        "--port",
        "1",
    )


def test_replicas_of_several_nodes() -> None:
    """Only the first node has an API: a start rank without `--headless` would mean another
    balancing mode.
    """
    common = (
        "--data-parallel-size-local",
        "2",
        "--data-parallel-address",
        "10.0.0.1",
        "--data-parallel-rpc-port",
        "29550",
    )

    assert common == vllm.replica_options(2, 0, "10.0.0.1", 29550)
    assert (*common, "--data-parallel-start-rank", "2", "--headless") == vllm.replica_options(
        2, 2, "10.0.0.1", 29550
    )


@pytest.mark.parametrize(
    ("spans", "alike", "strategy"),
    [(False, True, "strict"), (False, False, "fill"), (True, True, "span")],
)
def test_placement_of_replicas_in_ray(spans: bool, alike: bool, strategy: str) -> None:
    """On the selected nodes, whatever else is in the cluster."""
    assert vllm.ray_replica_env(["10.0.0.1", "10.0.0.2"], spans=spans, uniform=alike) == {
        "VLLM_RAY_DP_PACK_STRATEGY": strategy,
        "VLLM_RAY_DP_PLACEMENT_NODE_IPS": "10.0.0.1,10.0.0.2",
    }


def test_ray_passes_variables_to_replicas() -> None:
    """Of unknown variables, only those listed for vLLM."""
    env = vllm.ray_replica_env(["10.0.0.1"], spans=False, uniform=True, copied_variables=["A", "B"])

    assert env["VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"] == "A,B"


@pytest.mark.parametrize(
    "count", [("--api-server-count", "4"), ("--api_server_count=4",), ("-asc", "4")]
)
def test_a_process_without_an_api_gets_no_count(count: tuple[str, ...]) -> None:
    """vLLM rejects the two together; the node with the API keeps it."""
    args = ("--seed", "1", *count, "--dtype", "auto")
    options = {"tp": 1, "pp": 1, "dp": 2, "backend": "mp", "host": "::", "port": 1, "args": args}
    first = command("m", **options, multi_node=vllm.replica_options(1, 0, "10.0.0.1", 1))
    second = command("m", **options, multi_node=vllm.replica_options(1, 1, "10.0.0.1", 1))

    assert first[3 : 3 + len(args)] == args
    assert second[3:7] == ("--seed", "1", "--dtype", "auto")


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("-tp", "2"), ["-tp"]),
        (("--tensor-parallel-size=2",), ["--tensor-parallel-size"]),
        (("--pipeline_parallel_size", "2"), ["--pipeline-parallel-size"]),
        (("--api-key", "sk-1"), ["--api-key"]),
        (("--data-parallel-size-local", "2", "-dpl", "2"), ["--data-parallel-size-local", "-dpl"]),
        (("-dph", "--data_parallel_external_lb"), []),
        (("--data-parallel-hybrid", "-dph=1"), ["--data-parallel-hybrid", "-dph"]),
        (("--headless", "--nnodes", "2"), ["--headless", "--nnodes"]),
        (("--ssl-keyfile", "k"), ["--ssl-keyfile"]),
        (("--hf-token", "hf_1"), ["--hf-token"]),
        (("--hf_token=hf_1",), ["--hf-token"]),
        (("--api-ke", "sk-1"), ["--api-ke"]),
        (("--api_ke=sk-1",), ["--api-ke"]),
        (("--tensor-parallel", "3"), ["--tensor-parallel"]),
        (("--ssl", "--data-par=2"), ["--ssl", "--data-par"]),
        (("-n2", "-r", "1"), ["-n", "-r"]),
        (("--seed", "-1", "--rope-scaling", "-", "--headless-not", "--", "--node"), ["--node"]),
        (("--max-model-len", "8", "--port-range", "1", "--dtype", "auto", "-cc.mode=2"), []),
    ],
)
def test_collisions(args: tuple[str, ...], named: list[str]) -> None:
    """Arguments set by vlaunch are named, abbreviated or not, with the alternative; values are not
    shown.
    """
    messages = vllm.describe_collisions(args)

    assert named == [message.split("`")[1] for message in messages]
    assert not any("sk-1" in message or "hf_1" in message for message in messages)


@pytest.mark.parametrize(
    ("name", "phases"),
    [
        ("serve_ray_pp2_ok", ALL),
        ("serve_ray_tp2_ok", without("warm-up")),
        ("serve_mp_pp2_node0_ok", without("placement")),
        ("serve_mp_dp2_node0_ok", without("placement")),
        ("serve_ray_dp2_ok", without("engine")),
        ("pending_placement_group_ok", without("warm-up")),
        ("rust_front_end", ["api", "answer"]),
        ("fail_gloo_loopback", ["config", "engine", "placement", "workers"]),
        ("fail_cpu_platform_refuses_ray", ["config", "engine"]),
    ],
)
def test_phases(name: str, phases: list[str]) -> None:
    """A recorded start passes through its phases in order, once each."""
    assert phases == vllm.later_phases("start", log(name).splitlines())


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        ("gpu01:1:1 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.11<0>", "workers"),
        ("gpu01:1:1 [0] NCCL INFO Bootstrap : Using eth0:10.0.0.11<0>", "workers"),
        ("INFO 11-24 11:15:42 [monitor.py:48] torch.compile took 12.3 s in total", "warm-up"),
    ],
)
def test_phase_of_a_line(line: str, phase: str) -> None:
    """Lines that no recorded start has: NCCL's since 2.27 and before, and vLLM's on GPUs."""
    assert vllm.later_phases("start", [line]) == [phase]


def test_phases_only_move_forward() -> None:
    """Lines of slower ranks do not move the start back."""
    assert vllm.later_phases("kv-cache", log("serve_ray_pp2_ok").splitlines()[:20]) == []


def test_a_log_in_pieces_has_the_same_phases() -> None:
    """Line by line, or at once."""
    phase, phases = "start", []
    for line in log("serve_ray_pp2_ok").splitlines():
        phases += vllm.later_phases(phase, [line])
        phase = phases[-1] if phases else phase

    assert phases == ALL


def test_shards() -> None:
    """The newest progress line counts."""
    lines = log("serve_ray_pp2_ok").splitlines()

    assert vllm.shard_progress(lines) == "1 of 1 files"
    assert (
        vllm.shard_progress(
            ["Loading safetensors checkpoint shards:  25% Completed | 2/8 [00:01<00:04]"]
        )
        == "2 of 8 files"
    )
    assert vllm.shard_progress(lines[:5]) == ""


@pytest.mark.parametrize(
    ("labels", "name", "tokens", "concurrency"),
    [
        (
            {"kv_cache_size_tokens": "262144", "kv_cache_max_concurrency": "512.0"},
            "",
            262144,
            512.0,
        ),
        ({"num_gpu_blocks": "2048", "block_size": "16"}, "", 32768, None),
        ({"num_gpu_blocks": "None", "block_size": "16"}, "", None, None),
        ({}, "serve_ray_pp2_ok", 65536, 128.0),
        ({}, "kv_cache_older", 643232, 15.7),
        ({}, "", None, None),
    ],
)
def test_capacity(
    labels: dict[str, str], name: str, tokens: int | None, concurrency: float | None
) -> None:
    """The metric wins; an older vLLM is parsed by its blocks or its log."""
    capacity = vllm.parse_capacity(labels, log(name) if name else "")

    assert (tokens, concurrency) == (capacity.tokens, capacity.concurrency)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("fail_cpu_shm_across_hosts", "RuntimeError: open shm in SHMManager failed. errno: 2"),
        ("fail_gloo_loopback", "RuntimeError: Gloo connectFullMesh failed"),
        (
            "fail_validation",
            "Value error, Offline data parallel mode is not supported/useful for dense models.",
        ),
        ("fail_enforce_eager", "AssertionError"),
        ("serve_ray_pp2_ok", ""),
    ],
)
def test_root_cause(name: str, cause: str) -> None:
    """A failure is the first exception, not those that report it."""
    raised = vllm.find_exception(log(name))
    text = raised.text if raised else ""

    assert text.startswith(cause)
    assert bool(text) == bool(cause)


@pytest.mark.parametrize(
    ("args", "size"),
    [
        ((), 1),
        (("--prefill-context-parallel-size", "2"), 2),
        (("--prefill_context_parallel_size=4",), 4),
        (("-pcp", "2", "-pcp", "8"), 8),
        (("-pcp", "two"), 1),
        (("-pcp",), 1),
    ],
)
def test_prefill_context_parallelism_is_read(args: tuple[str, ...], size: int) -> None:
    """In either form, the last one counts."""
    assert vllm.prefill_context_parallel(args) == size
