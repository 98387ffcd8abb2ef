"""What we say to vLLM (0.32), and how we read its log and its capacity.

Log lines carry prefixes of Ray and of vLLM's processes, so patterns are searched for, never matched
from the start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from launcher.agent import cause
from launcher.core import untrusted
from launcher.core.domain import Argv, ServerSpec, options

# Who hands requests to replicas: the API of all, each node's own, or each replica's own.
Balancing = Literal["internal", "hybrid", "external"]


class Phase(NamedTuple):
    """A part of the start, recognised by the line that begins it. `title` is in the present
    tense.
    """

    id: str
    title: str
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """How much the server holds at once: tokens in the KV cache, and requests of full length."""

    tokens: int | None = None
    concurrency: float | None = None


EXPERT_PARALLEL = "--enable-expert-parallel"
# In the order in which they come. Lines of several ranks interleave, so a phase only ever moves
# forward.
PHASES = (
    Phase("start", "starting vLLM", r"(?!)"),
    Phase(
        "config", "reading the model's configuration", r"non-default args:|Resolved architecture:"
    ),
    Phase("engine", "starting the engine", r"Initializing a V1 LLM engine"),
    Phase(
        "placement",
        "placing ranks on GPUs",
        r"(?:Creating a new|Waiting for creating a) placement group|Creating placement groups for"
        r" data parallel",
    ),
    Phase(
        "workers",
        "connecting the ranks",
        r"world_size=\d+ rank=\d+|Bootstrap : Using|vLLM is using nccl",
    ),
    Phase("load", "loading weights", r"Starting to load model|Loading \S+ checkpoint shards"),
    Phase(
        "warm-up",
        "compiling and warming up",
        r"Warming up model for the compilation|Dynamo bytecode transform|[Cc]ompiling a graph for"
        r"|torch\.compile takes",
    ),
    Phase("kv-cache", "allocating the KV cache", r"KV cache size: [\d,]+ tokens|# GPU blocks: \d+"),
    Phase("graphs", "capturing graphs", r"Capturing CUDA graphs?|Capturing cudagraphs"),
    Phase("api", "starting the API", r"Starting vLLM (?:API )?server|Available routes are"),
    Phase("answer", "getting the first answer", r"Application startup complete"),
)

_MEMORY_SHARE = 0.92  # `gpu_memory_utilization` in vllm/config/cache.py
_GLOO_TIMEOUT = 1800.0  # seconds; torch's default (torch/csrc/distributed/c10d/Backend.hpp)
_SHARDS = re.compile(r"Loading \S+ checkpoint shards:\s+(\d+)% Completed \| (\d+)/(\d+)")
_KV_LINE = re.compile(r"KV cache size: ([\d,]+) tokens")
_CONCURRENCY = re.compile(r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x")
# Options that vlaunch sets itself, with what to use instead. A name that ends in `*` is a prefix.
RESERVED = {
    "--model": "`--model` before the `--`",
    "--tensor-parallel-size": "`--tp` of vlaunch",
    "-tp": "`--tp` of vlaunch",
    "--pipeline-parallel-size": "`--pp` of vlaunch",
    "-pp": "`--pp` of vlaunch",
    "--distributed-executor-backend": "`--backend` of vlaunch",
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
    "--headless": "`--backend mp`, which sets it where it belongs",
    "--data-parallel*": (
        "`--data-parallel-size` of vlaunch, which sets what belongs to it on each node"
    ),
    "-dp*": "`--data-parallel-size` of vlaunch, which sets what belongs to it on each node",
    "--uds": "`--bind` and `--port` of vlaunch; the server is asked over TCP",
    "--ssl-*": "a TLS proxy in front of the endpoint; the server is asked over plain HTTP",
}


# What is vLLM's word and not ours of all that begins with `--data-parallel`.
_BALANCING: Mapping[str, Balancing] = {
    "--data-parallel-hybrid-lb": "hybrid",
    "-dph": "hybrid",
    "--data-parallel-external-lb": "external",
    "-dpe": "external",
}


def serve(server: ServerSpec, multi_node: Argv = ()) -> Argv:
    """Serve a model (`vllm serve`).

    Our own options come last: of an option given twice, vLLM takes the last.
    """
    tp, pp, dp = (size or 1 for size in (server.tp, server.pp, server.dp))
    own = options(tensor_parallel_size=tp, pipeline_parallel_size=pp)
    if server.backend == "ray" or tp * pp > 1:
        own += options(distributed_executor_backend=server.backend)
    if dp > 1:
        own += options(data_parallel_size=dp, data_parallel_backend=server.backend)
    words = without_api(server.args) if "--headless" in multi_node else server.args
    where = options(host=server.host, port=server.port)
    return ("vllm", "serve", server.model, *words, *own, *multi_node, *where)


def rank_of(nnodes: int, rank: int, master: str, port: int) -> Argv:
    """Return the options that make a process one node of several, without Ray; only the first has
    an API.
    """
    if nnodes == 1:
        return ()
    own = options(nnodes=nnodes, node_rank=rank, master_addr=master, master_port=port)
    return (*own, "--headless") if rank else own


def gloo_timeout(args: Sequence[str], nodes: int, seconds: float) -> Argv:
    """Return the option that lets ranks on several nodes wait for one another as long as a start
    may take; empty where Gloo's own 1800 s, or what the arguments say, is enough.

    A node that loads its weights later than the others would else end the start
    (`cpu_distributed_timeout_seconds` in vllm/config/parallel.py, since vLLM 0.22).
    """
    option = "--cpu-distributed-timeout-seconds"
    enough = nodes == 1 or seconds <= _GLOO_TIMEOUT or values(args, option)
    return () if enough else (option, f"{seconds:.0f}")


def replicas_of(
    local: int, start: int, head: str, port: int, balancing: Balancing = "internal"
) -> Argv:
    """Return the options of a node that runs `local` replicas from number `start` on.

    With `internal` balancing only the first node has an API, behind which vLLM hands requests to
    all replicas (v1/engine/core_client.py, `DPLBAsyncMPClient`); else each node has one. An
    `external` replica is told its number, and nothing of a start (engine/arg_utils.py).
    """
    where = options(data_parallel_address=head, data_parallel_rpc_port=port)
    if balancing == "external":
        return (*options(data_parallel_rank=start), *where)
    own = (*options(data_parallel_size_local=local), *where)
    headless = ("--headless",) if balancing == "internal" else ()
    return (*own, *options(data_parallel_start_rank=start), *headless) if start else own


def balancing(args: Sequence[str]) -> frozenset[Balancing]:
    """Return the kinds of load balancing that are asked for, of which vLLM takes one; empty where
    the arguments say nothing.
    """
    found = set[Balancing]()
    for word in args:
        name = _normal(word)
        if kind := _BALANCING.get(name):
            found.add(kind)
        elif kind := _BALANCING.get(name.replace("--no-", "--", 1)):
            found.discard(kind)
    return frozenset(found)


def ray_replica_env(
    nodes: Sequence[str], *, spans: bool, alike: bool, handed_on: Sequence[str] = ()
) -> Mapping[str, str]:
    """Return the variables that make vLLM place replicas where we expect them: on these addresses.

    Its default (`strict`) puts as many on every node as on the head, and passes over nodes that
    hold fewer; `fill` takes what each can hold, `span` several nodes for each
    (`create_dp_placement_groups` in v1/engine/utils.py). Of the other variables, those of its own
    and those that are `handed_on` reach the replicas (`get_env_vars_to_copy` in ray/ray_env.py).
    """
    strategy = "span" if spans else "strict" if alike else "fill"
    return {
        "VLLM_RAY_DP_PACK_STRATEGY": strategy,
        "VLLM_RAY_DP_PLACEMENT_NODE_IPS": ",".join(nodes),
        **({"VLLM_RAY_EXTRA_ENV_VARS_TO_COPY": ",".join(handed_on)} if handed_on else {}),
    }


def memory_share(args: Sequence[str]) -> float:
    """Return which part of a GPU's memory an engine claims: vLLM's own default where the arguments
    say nothing readable.
    """
    shares = [_number(value) for value in values(args, "--gpu-memory-utilization")]
    return next((s for s in reversed(shares) if s is not None and s <= 1), _MEMORY_SHARE)


def prefill_context_parallel(args: Sequence[str]) -> int:
    """Return the prefill context parallel size, by which an engine has more ranks; 1 where the
    arguments say nothing readable, which vLLM refuses.
    """
    sizes = values(args, "--prefill-context-parallel-size", "-pcp")
    return next((int(size) for size in reversed(sizes) if re.fullmatch("[1-9][0-9]{0,3}", size)), 1)


def values(args: Sequence[str], *names: str) -> list[str]:
    """Return what an option is given, in either form."""
    found = []
    for word, after in zip(args, [*args, ""][1:], strict=True):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in names:
            found.append(value if equals else after)
    return found


def without_api(args: Sequence[str]) -> tuple[str, ...]:
    """Leave out the number of API servers, which vLLM refuses from a process without one."""
    kept, words = list[str](), iter(args)
    for word in words:
        if word.partition("=")[0].replace("_", "-") not in ("--api-server-count", "-asc"):
            kept.append(word)
        elif "=" not in word:
            next(words, None)
    return tuple(kept)


def collisions(args: Sequence[str]) -> list[str]:
    """Say, for each argument that vlaunch sets itself, what to use instead; values are never
    repeated.
    """
    said = []
    for word in args:
        name = _normal(word)
        if (key := reserved(word)) and word.replace("_", "-") not in _BALANCING:
            shown = name if name.startswith("--") else name.rstrip("0123456789")
            said.append(f"`{shown}`: use {RESERVED[key]}")
    return list(dict.fromkeys(said))


def reserved(word: str) -> str | None:
    """Return the key of RESERVED that argparse would, or could, take a word for."""
    name = _normal(word)
    return next((key for key in RESERVED if _means(name, key)), None)


def _normal(word: str) -> str:
    """Return an option's name: vLLM takes `--tensor_parallel_size=2` as well."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if name.startswith("--") else name


def _means(name: str, ours: str) -> bool:
    """True when argparse would, or could, take a word for one of our options: it completes
    beginnings, and reads `-n2`.
    """
    stem = ours.rstrip("*")
    if not name.startswith("-") or name in ("-", "--"):
        return False
    if len(stem) == 2 and re.fullmatch(rf"{stem}\d+", name):
        return True
    return stem.startswith(name) or (ours.endswith("*") and name.startswith(stem))


def phase_after(phase: str, lines: Sequence[str]) -> list[str]:
    """Return the phases that a piece of log begins, later ones only, in order."""
    at, begun = [known.id for known in PHASES].index(phase), list[str]()
    for line in lines:
        later = range(len(PHASES) - 1, at, -1)
        at = next((i for i in later if re.search(PHASES[i].pattern, line)), at)
        begun += [PHASES[at].id] if at in later else []
    return begun


def title(phase: str) -> str:
    """Return a phase in words."""
    return next(each.title for each in PHASES if each.id == phase)


def shards(lines: Sequence[str]) -> str:
    """Return how far loading is, from its progress bar; empty when no line says."""
    found = [match for line in lines if (match := _SHARDS.search(line))]
    return f"{found[-1][2]} of {found[-1][3]} files" if found else ""


def capacity(labels: Mapping[str, str], log: str = "") -> Capacity:
    """Read the labels of `vllm:cache_config_info`; where an older vLLM lacks them, its blocks or
    its log line.
    """
    tokens = _number(labels.get("kv_cache_size_tokens"))
    concurrency = _number(labels.get("kv_cache_max_concurrency"))
    if tokens is None:
        blocks, size = _number(labels.get("num_gpu_blocks")), _number(labels.get("block_size"))
        line = _KV_LINE.search(log)
        counted = blocks * size if blocks and size else None
        tokens = _number(line[1].replace(",", "")) if line else counted
    if concurrency is None and (line := _CONCURRENCY.search(log)):
        concurrency = _number(line[1])
    return Capacity(tokens=None if tokens is None else int(tokens), concurrency=concurrency)


def raised(log: str) -> cause.Raised | None:
    """Return the exception that a failed start is about."""
    lines = untrusted.cut(log, last=True).splitlines()
    return cause.find([untrusted.plain(line) for line in lines])


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text is not None else None
    except ValueError:
        return None
    return value if value is not None and 0 <= value < 1e15 else None
