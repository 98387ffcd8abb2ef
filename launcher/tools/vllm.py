"""Command line of vLLM (0.32), and parsers for its arguments, log and capacity.

Log lines have prefixes from Ray and vLLM's processes, so patterns do not match from the start.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from launcher import upstream
from launcher.agent import cause
from launcher.core import untrusted
from launcher.core.domain import Argv, ServerSpec, long_options

# Requests are distributed by one API for all replicas, one per node, or one per replica.
Balancing = Literal["internal", "hybrid", "external"]


class Phase(NamedTuple):
    """Phase of a server's start, recognised by its first log line."""

    id: str
    title: str
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Capacity of a server: tokens in the KV cache, and concurrent requests of full length."""

    tokens: int | None = None
    concurrency: float | None = None


EXPERT_PARALLEL = "--enable-expert-parallel"
# Of uvicorn, and of the Rust front end (VLLM_USE_RUST_FRONTEND; rust/src/server/src/lib.rs).
API_READY = upstream.any_of("vllm.application-ready", "vllm.application-ready-rust")
# In order. Lines of several ranks interleave, so phases only advance.
PHASES = (
    Phase("start", "starting vLLM", r"(?!)"),
    Phase(
        "config",
        "reading the model's configuration",
        upstream.any_of("vllm.config-arguments", "vllm.config-architecture"),
    ),
    Phase("engine", "starting the engine", upstream.text("vllm.engine-start")),
    Phase(
        "placement",
        "placing ranks on GPUs",
        upstream.any_of(
            "vllm.placement-group-new",
            "vllm.placement-group-waits",
            "vllm.placement-group-replicas",
        ),
    ),
    Phase(
        "workers",
        "connecting the ranks",
        upstream.any_of("vllm.worker-rank", "nccl.bootstrap", "vllm.nccl-version"),
    ),
    Phase("load", "loading weights", upstream.any_of("vllm.load-start", "vllm.load-shards")),
    Phase(
        "warm-up",
        "compiling and warming up",
        upstream.any_of(
            "vllm.warm-up-cpu",
            "vllm.warm-up-dynamo",
            "vllm.warm-up-compiles",
            "vllm.warm-up-compiled",
        ),
    ),
    Phase("kv-cache", "allocating the KV cache", upstream.text("vllm.kv-cache-size")),
    Phase("graphs", "capturing graphs", upstream.text("vllm.graphs-start")),
    Phase("api", "starting the API", upstream.any_of("vllm.api-start", "vllm.api-routes")),
    Phase("answer", "getting the first answer", API_READY),
)

_MEMORY_SHARE = float(upstream.text("vllm.default-gpu-memory-utilization"))
_GLOO_TIMEOUT = 1800.0  # seconds; torch's default (torch/csrc/distributed/c10d/Backend.hpp)
_SHARDS = re.compile(upstream.text("vllm.load-progress"))
_KV_LINE = re.compile(upstream.text("vllm.kv-cache-size"))
_CONCURRENCY = re.compile(upstream.text("vllm.kv-cache-concurrency"))
# Options that vlaunch sets, with the alternatives. A name that ends in `*` is a prefix.
RESERVED = {
    "--model": "`--model` before the `--`",
    "--tensor-parallel-size": "vlaunch's `--tp`",
    "-tp": "vlaunch's `--tp`",
    "--pipeline-parallel-size": "vlaunch's `--pp`",
    "-pp": "vlaunch's `--pp`",
    "--distributed-executor-backend": "vlaunch's `--backend`",
    "--host": "`--bind` of `vlaunch serve`, or `serve: {bind: …}` in the inventory",
    "--port": "`--port` of `vlaunch serve`, or `ports: {api: …}` in the inventory",
    "--api-key": "VLLM_API_KEY under `secrets:` in the inventory, so that no command line shows it",
    "--hf-token": "HF_TOKEN under `secrets:` in the inventory, so that no command line shows it",
    "--nnodes": "`--backend mp`, which sets it on each node",
    "-n": "`--backend mp`, which sets it on each node",
    "--node-rank": "`--backend mp`, which sets it on each node",
    "-r": "`--backend mp`, which sets it on each node",
    "--master-addr": "`--backend mp`, which sets it on each node",
    "--master-port": "`ports: {mp_master: …}` in the inventory",
    "--headless": "`--backend mp`, which sets it where it is needed",
    "--data-parallel*": ("vlaunch's `--data-parallel-size`, which sets it on each node"),
    "-dp*": "vlaunch's `--data-parallel-size`, which sets it on each node",
    "--uds": "vlaunch's `--bind` and `--port`; vlaunch queries the server over TCP",
    "--ssl-*": "a TLS proxy in front of the endpoint; vlaunch queries the server over plain HTTP",
}


# Options that start with `--data-parallel`, but that users may set.
_BALANCING: Mapping[str, Balancing] = {
    "--data-parallel-hybrid-lb": "hybrid",
    "-dph": "hybrid",
    "--data-parallel-external-lb": "external",
    "-dpe": "external",
}


def serve(server: ServerSpec, multi_node: Argv = ()) -> Argv:
    """Serve a model (`vllm serve`).

    vlaunch's options come last, because vLLM uses the last of repeated options.
    """
    tp, pp, dp = (size or 1 for size in (server.tp, server.pp, server.dp))
    own_options = long_options(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    if server.backend == "ray" or tp * pp > 1:
        own_options += long_options(distributed_executor_backend=server.backend)
    if dp > 1:
        own_options += long_options(data_parallel_size=dp, data_parallel_backend=server.backend)
    arguments = without_api_servers(server.args) if "--headless" in multi_node else server.args
    address = long_options(host=server.host, port=server.port)
    return ("vllm", "serve", server.model, *arguments, *own_options, *multi_node, *address)


def rank_options(nnodes: int, rank: int, master: str, port: int) -> Argv:
    """Return the options of a node's process without Ray; only the first node has an API."""
    if nnodes == 1:
        return ()
    own_options = long_options(nnodes=nnodes, node_rank=rank, master_addr=master, master_port=port)
    return (*own_options, "--headless") if rank else own_options


def gloo_timeout_option(args: Sequence[str], nodes: int, seconds: float) -> Argv:
    """Return the option that extends Gloo's timeout between nodes to the duration of a start; empty
    if the default of 1800 s suffices or the arguments set it.

    Otherwise a node that loads its weights late fails the start
    (`cpu_distributed_timeout_seconds` in vllm/config/parallel.py, since vLLM 0.22).
    """
    option = "--cpu-distributed-timeout-seconds"
    sufficient = nodes == 1 or seconds <= _GLOO_TIMEOUT or option_values(args, option)
    return () if sufficient else (option, f"{seconds:.0f}")


def replica_options(
    local: int, first_replica: int, head: str, port: int, balancing: Balancing = "internal"
) -> Argv:
    """Return the options of a node that runs `local` replicas from number `first_replica` on.

    With `internal` balancing only the first node has an API, from which vLLM distributes requests
    to all replicas (v1/engine/core_client.py, `DPLBAsyncMPClient`); otherwise each node has one. An
    `external` replica needs its rank instead of the start rank (engine/arg_utils.py).
    """
    address = long_options(data_parallel_address=head, data_parallel_rpc_port=port)
    if balancing == "external":
        return (*long_options(data_parallel_rank=first_replica), *address)
    local_options = (*long_options(data_parallel_size_local=local), *address)
    headless = ("--headless",) if balancing == "internal" else ()
    return (
        (*local_options, *long_options(data_parallel_start_rank=first_replica), *headless)
        if first_replica
        else local_options
    )


def balancing_modes(args: Sequence[str]) -> frozenset[Balancing]:
    """Return the load-balancing modes in the arguments, of which vLLM accepts only one."""
    modes = set[Balancing]()
    for argument in args:
        name = _normalise_option(argument)
        if kind := _BALANCING.get(name):
            modes.add(kind)
        elif kind := _BALANCING.get(name.replace("--no-", "--", 1)):
            modes.discard(kind)
    return frozenset(modes)


def ray_replica_env(
    nodes: Sequence[str], *, spans: bool, uniform: bool, copied_variables: Sequence[str] = ()
) -> Mapping[str, str]:
    """Return the variables that make vLLM place replicas on these addresses.

    Its default (`strict`) puts as many on every node as on the head, and skips smaller nodes;
    `fill` uses the capacity of each node, `span` several nodes per replica
    (`create_dp_placement_groups` in v1/engine/utils.py). vLLM copies its own variables and
    `copied_variables` to the replicas (`get_env_vars_to_copy` in ray/ray_env.py).
    """
    strategy = "span" if spans else "strict" if uniform else "fill"
    return {
        "VLLM_RAY_DP_PACK_STRATEGY": strategy,
        "VLLM_RAY_DP_PLACEMENT_NODE_IPS": ",".join(nodes),
        **(
            {"VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": ",".join(copied_variables)}
            if copied_variables
            else {}
        ),
    }


def memory_share(args: Sequence[str]) -> float:
    """Return the share of a GPU's memory that an engine uses; vLLM's default unless the arguments
    have a valid one.
    """
    shares = [_parse_number(value) for value in option_values(args, "--gpu-memory-utilization")]
    return next((s for s in reversed(shares) if s is not None and s <= 1), _MEMORY_SHARE)


def prefill_context_parallel(args: Sequence[str]) -> int:
    """Return the prefill context parallel size, which multiplies the ranks; 1 unless the arguments
    have a valid one.
    """
    sizes = option_values(args, "--prefill-context-parallel-size", "-pcp")
    return next((int(size) for size in reversed(sizes) if re.fullmatch("[1-9][0-9]{0,3}", size)), 1)


def option_values(args: Sequence[str], *names: str) -> list[str]:
    """Return the values of an option, in either form (`--name value`, `--name=value`)."""
    values = []
    for argument, following in zip(args, [*args, ""][1:], strict=True):
        name, separator, value = argument.partition("=")
        if name.replace("_", "-") in names:
            values.append(value if separator else following)
    return values


def all_values(args: Sequence[str], name: str) -> list[str]:
    """Return all values of an option that takes several (`--name a b`); the last option counts."""
    values = list[str]()
    for number, argument in enumerate(args):
        option, separator, value = argument.partition("=")
        if option.replace("_", "-") == name:
            following = itertools.takewhile(
                lambda text: not text.startswith("-"), args[number + 1 :]
            )
            values = [value] if separator else list(following)
    return values


def without_api_servers(args: Sequence[str]) -> tuple[str, ...]:
    """Remove the number of API servers, which vLLM rejects for a process without an API."""
    arguments, remaining = list[str](), iter(args)
    for argument in remaining:
        if argument.partition("=")[0].replace("_", "-") not in ("--api-server-count", "-asc"):
            arguments.append(argument)
        elif "=" not in argument:
            next(remaining, None)
    return tuple(arguments)


def describe_collisions(args: Sequence[str]) -> list[str]:
    """Return a message for each argument that vlaunch sets itself; values are not shown."""
    messages = []
    for argument in args:
        name = _normalise_option(argument)
        if (key := reserved_key(argument)) and argument.replace("_", "-") not in _BALANCING:
            shown = name if name.startswith("--") else name.rstrip("0123456789")
            messages.append(f"`{shown}`: use {RESERVED[key]}")
    return list(dict.fromkeys(messages))


def reserved_key(argument: str) -> str | None:
    """Return the key of RESERVED that argparse would, or could, match with an argument."""
    name = _normalise_option(argument)
    return next((key for key in RESERVED if _abbreviates(name, key)), None)


def _normalise_option(argument: str) -> str:
    """Return an option's name; vLLM also accepts `--tensor_parallel_size=2`."""
    name = argument.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _abbreviates(name: str, option: str) -> bool:
    """Return True if argparse would, or could, match a name with an option: it accepts
    abbreviations, and `-n2`.
    """
    stem = option.rstrip("*")
    if not name.startswith("-") or name in ("-", "--"):
        return False
    if len(stem) == 2 and re.fullmatch(rf"{stem}\d+", name):
        return True
    return stem.startswith(name) or (option.endswith("*") and name.startswith(stem))


def later_phases(phase: str, lines: Sequence[str]) -> list[str]:
    """Return the phases after `phase` that start in these lines, in order."""
    index, started = [item.id for item in PHASES].index(phase), list[str]()
    for line in lines:
        later = range(len(PHASES) - 1, index, -1)
        index = next((i for i in later if re.search(PHASES[i].pattern, line)), index)
        started += [PHASES[index].id] if index in later else []
    return started


def phase_title(phase: str) -> str:
    """Return the title of a phase."""
    return next(item.title for item in PHASES if item.id == phase)


def shard_progress(lines: Sequence[str]) -> str:
    """Return the progress of loading from its progress bar; empty if there is none."""
    matches = [match for line in lines if (match := _SHARDS.search(line))]
    return f"{matches[-1][2]} of {matches[-1][3]} files" if matches else ""


def parse_capacity(labels: Mapping[str, str], log: str = "") -> Capacity:
    """Parse the labels of `vllm:cache_config_info`, or for older versions of vLLM its blocks or log
    line.
    """
    tokens = _parse_number(labels.get("kv_cache_size_tokens"))
    concurrency = _parse_number(labels.get("kv_cache_max_concurrency"))
    if tokens is None:
        blocks, size = (
            _parse_number(labels.get("num_gpu_blocks")),
            _parse_number(labels.get("block_size")),
        )
        line = _KV_LINE.search(log)
        counted = blocks * size if blocks and size else None
        tokens = _parse_number(line[1].replace(",", "")) if line else counted
    if concurrency is None and (line := _CONCURRENCY.search(log)):
        concurrency = _parse_number(line[1])
    return Capacity(tokens=None if tokens is None else int(tokens), concurrency=concurrency)


def find_exception(log: str) -> cause.LoggedException | None:
    """Return the exception that made a start fail."""
    lines = untrusted.truncate(log, last=True).splitlines()
    return cause.find_exception([untrusted.sanitize(line) for line in lines])


def _parse_number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and 0 <= value < 1e15 else None
