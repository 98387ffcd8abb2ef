"""A choice on a cluster: what vLLM is started with, and how that differs from what the recipe says.

Pure. The split is the cluster's own, unless the recipe's is asked for; what names machines, ports
and network interfaces comes from the inventory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from launcher import secret_patterns
from launcher.errors import RequestError
from launcher.model import Backend, Inventory
from launcher.recipes.split import Sizes
from launcher.recipes.words import Option, last, options
from launcher.tools import vllm

_READY = "VLLM_ENGINE_READY_TIMEOUT_S"
_PLACEHOLDER = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?")
_BALANCING = re.compile(r"--data-parallel-(?:hybrid|external)-lb")
# What vlaunch gives its containers or processes itself (`launcher/containers.py`,
# `plan/wanted.py`, `state/engine_log.py`), and what it follows from.
_OURS = (
    (
        re.compile(r"(?:GLOO|NCCL|TP|NVSHMEM_BOOTSTRAP_UID)_SOCK(?:ET)?_IFNAME"),
        "`network: {interface: …}` of the inventory",
    ),
    (
        re.compile("NCCL_IB_HCA|NVSHMEM_HCA_LIST|UCX_NET_DEVICES"),
        "`network: {hca: […]}` of the inventory",
    ),
    (re.compile("NCCL_DEBUG(?:_SUBSYS|_FILE)?"), "what `serve` reads of the links"),
    (re.compile("VLLM_HOST_IP"), "`ip:` of each node"),
    (re.compile("HF_HOME"), "`hf_home:` of the inventory"),
    (
        re.compile("(?:CUDA|HIP|ROCR)_VISIBLE_DEVICES|CUDA_DEVICE_ORDER"),
        "`gpus:` of each node",
    ),
    (
        re.compile(
            "VLLM_CACHE_ROOT|TORCHINDUCTOR_CACHE_DIR|TRITON_CACHE_DIR|FLASHINFER_WORKSPACE_BASE"
            "|DG_JIT_CACHE_DIR|TILELANG_CACHE_DIR|CUDA_CACHE_PATH"
        ),
        "`cache_dir:` of the inventory",
    ),
    (
        re.compile(
            "VLLM_RAY_DP_.*|AUTOSCALER_UPDATE_INTERVAL_S|RAY_(?:ADDRESS|AUTH_.*|ROTATION_.*"
            "|USAGE_STATS_ENABLED|gcs_rpc_server_reconnect_timeout_s|health_check_.*|memory_.*"
            "|process_group_.*|worker_niceness)"
        ),
        "how it runs Ray",
    ),
)
# Read before a program of Python's begins, or by Ray itself, which starts its workers before vLLM
# hands its variables on (v1/executor/ray_executor_v2.py, 0.32).
_EARLY = re.compile("(?:LD_|PYTHON|MALLOC_|OMP_|KMP_|GOMP_|RAY_).*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the command line says beside the recipe: vLLM's arguments, those of the inventory first,
    the split, and whether the recipe's own was asked for.
    """

    args: tuple[str, ...] = ()
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    strategy: bool = False
    backend: Backend = "ray"

    @property
    def split(self) -> bool:
        """True when it says anything of the split."""
        return any(each is not None for each in (self.tp, self.pp, self.dp))


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What vLLM is started with; sizes that are None are the cluster's own choice. `timeout` is how
    long the recipe lets a start take, in seconds (0: it says nothing).
    """

    model: str
    args: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    timeout: float = 0.0
    notes: tuple[str, ...] = ()


Wrong = tuple[str, str]  # what it is, and what to do


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a recipe of any format says.

    `args` has each argument with the part of the recipe that it is from. `split` is what it would
    spread the model over, by the name `split_name`, and `takes` the flag that takes that. `image`
    and `version` are what it is for, and the oldest vLLM; empty where it does not say. `wrong` is
    what speaks against it on these nodes. `why` is said before all else, and `notes` after it.
    """

    name: str
    model: str
    args: tuple[tuple[Option, str], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    split: Sizes = field(default_factory=Sizes)
    split_name: str = ""
    takes: str = ""
    image: str = ""
    version: str = ""
    wrong: tuple[Wrong, ...] = ()
    why: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def serving(content: Content, inventory: Inventory, wish: Wish, version: str | None) -> Serving:
    """Return how a recipe is served on the nodes of `inventory`, with vLLM of this version (None:
    not known).

    Raises RequestError with everything that speaks against it.
    """
    own = content.split
    tp, pp, dp = (own.tp, own.pp, own.dp) if wish.strategy else (None, None, None)
    if wish.split:
        tp, pp, dp = wish.tp, wish.pp, wish.dp
    replicas = dp or (1 if wish.split else inventory.serve.dp)
    args, told = _arguments(content, wish.args, replicas)
    env, left = _environment(content.env, inventory)
    args, env, unfilled = _filled(args, env, inventory)
    wrong = [
        *content.wrong,
        *_too_old(content, inventory, version),
        *unfilled,
        *_secret(args, env),
        *_late(env, inventory, wish.backend),
    ]
    if wrong:
        raise RequestError(
            f"{content.name} cannot be served here as its recipe says",
            evidence=[said for said, _ in wrong],
            hint="\n".join(dict.fromkeys(hint for _, hint in wrong if hint)),
        )
    timeout = env.pop(_READY, "")
    here = {name: text for name, text in env.items() if not _same(inventory, name, text)}
    return Serving(
        model=content.model,
        args=(*args, *wish.args),
        env=here,
        tp=tp,
        pp=pp,
        dp=dp,
        timeout=float(timeout) if re.fullmatch(r"\d{1,6}(\.\d+)?", timeout) else 0.0,
        notes=(
            *content.why,
            _of_split(content, wish),
            *told,
            *left,
            *_of_image(content, inventory, version),
            *content.notes,
        ),
    )


def _arguments(content: Content, more: Sequence[str], replicas: int) -> tuple[list[str], list[str]]:
    """Return the recipe's arguments that vLLM is given, and what is said of the others."""
    theirs = {_plain(option.name): option for option in options(more) if option.words[0][:1] == "-"}
    kept: list[Option] = []
    said = []
    for option, part in content.args:
        if _BALANCING.fullmatch(option.name):
            if replicas > 1:
                kept.append(option)
            else:
                said.append(f"`{option.text}` ({part}) is left out: there is one replica")
        elif ours := vllm.collisions(option.words[:1]):
            said.append(f"`{option.text}` ({part}) is left out; {ours[0]}")
        elif (instead := theirs.get(_plain(option.name))) is not None:
            if instead.words != option.words:
                said.append(f"`{instead.text}`, as asked, in place of `{option.text}` ({part})")
        else:
            kept.append(option)
    return [word for option in last(kept) for word in option.words], said


def _plain(name: str) -> str:
    """Return the name that `--no-NAME` turns off."""
    return f"--{name[5:]}" if name.startswith("--no-") else name


def _environment(
    asked: Mapping[str, str], inventory: Inventory
) -> tuple[dict[str, str], list[str]]:
    env: dict[str, str] = {}
    left: dict[str, list[str]] = {}
    said = []
    for name, text in asked.items():
        source = next((source for pattern, source in _OURS if pattern.fullmatch(name)), "")
        there = {node.env[name] for node in inventory.nodes if name in node.env}
        if source:
            left.setdefault(source, []).append(f"{name}={text}")
        elif there and there != {text}:
            said.append(f"{name}={sorted(there)[0]}, as in the inventory, not the recipe's {text}")
        else:
            env[name] = text
    gone = [f"{', '.join(names)}: vlaunch sets it by {source}" for source, names in left.items()]
    return env, [*gone, *said]


def _same(inventory: Inventory, name: str, text: str) -> bool:
    """True when every node's container has the variable already."""
    return all(node.env.get(name) == text for node in inventory.nodes)


def _filled(
    args: list[str], env: dict[str, str], inventory: Inventory
) -> tuple[list[str], dict[str, str], list[Wrong]]:
    """Put what the inventory knows where the recipe has a placeholder."""
    interfaces = {node.interface for node in inventory.nodes}
    known = {
        "HEAD_IP": inventory.head.ip,
        "IFACE_NAME": (next(iter(interfaces)) or "") if len(interfaces) == 1 else "",
        "IB_IF": ",".join(inventory.head.hca),
    }
    wrong: list[Wrong] = []

    def fill(text: str, where: str) -> str:
        unknown = [name for name in _PLACEHOLDER.findall(text) if not known.get(name)]
        for name in dict.fromkeys(unknown):
            said = f"{where} has the placeholder ${name}, which the inventory does not fill"
            wrong.append((said, _by_hand(where, name, inventory)))
        return _PLACEHOLDER.sub(lambda found: known.get(found[1]) or found[0], text)

    args = [fill(word, f"`{word}`") for word in args]
    env = {name: fill(text, name) for name, text in env.items()}
    return args, env, wrong


def _by_hand(where: str, name: str, inventory: Inventory) -> str:
    """Return what to write where a placeholder has no value, or not the same on all nodes."""
    if name != "IFACE_NAME" or where.startswith("`"):
        return "give it yourself: an argument after `--`, a variable under `env:` in the inventory"
    if not all(node.interface for node in inventory.nodes):
        return "name the nodes' interface in the inventory: `network: {interface: NAME}`"
    each = ", ".join(f"{node.name} `{where}: {node.interface}`" for node in inventory.nodes)
    return f"each node has its own: under `env:` of {each}; then run `vlaunch up`"


def _too_old(content: Content, inventory: Inventory, version: str | None) -> Iterator[Wrong]:
    wanted = content.version
    if version is None or not number(wanted) or number(version) >= number(wanted):
        return
    newer = content.image if content.image not in ("", inventory.image) else "a newer one"
    yield (
        f"it needs vLLM {wanted}, and {inventory.image} has {version}",
        f"name {newer} as `image:` in the inventory, then run `vlaunch up`",
    )


def number(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with, for comparing; none of a word."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    return tuple(map(int, found[1].split("."))) if found else ()


def _secret(args: Sequence[str], env: Mapping[str, str]) -> Iterator[Wrong]:
    hint = "name where it comes from under `secrets:` in the inventory"
    for name, text in env.items():
        if secret_patterns.VALUE.search(text) or secret_patterns.NAME.search(name):
            yield f"its variable {name} looks like a secret, which does not travel so", hint
    for at, word in enumerate(args, start=1):
        if secret_patterns.VALUE.search(word):
            yield f"its argument {at} looks like a secret, which `ps` would show on the nodes", hint


def _late(env: Mapping[str, str], inventory: Inventory, backend: Backend) -> Iterator[Wrong]:
    """Yield what Ray's workers would hear of too late."""
    late = {
        name: text
        for name, text in env.items()
        if _EARLY.fullmatch(name) and not _same(inventory, name, text)
    }
    if backend != "ray" or not late:
        return
    lines = "\n".join(["env:", *(f'  {name}: "{text}"' for name, text in late.items())])
    yield (
        f"Ray starts its workers before {' and '.join(late)} can be handed to them; in the"
        f" inventory:\n{lines}",
        "add these lines to the inventory and run `vlaunch up`, or use `--backend mp`",
    )


def _of_split(content: Content, wish: Wish) -> str:
    name, words = content.split_name, content.split.words
    if wish.split:
        return f"the split is as asked; the recipe's ({name}) is {words}"
    if wish.strategy:
        return f"the split is the recipe's {name}: {words}"
    return (
        f"the recipe's split ({name}) is {words}; vlaunch takes its own ({content.takes}"
        " takes the recipe's)"
    )


def _of_image(content: Content, inventory: Inventory, version: str | None) -> Iterator[str]:
    wanted, own = content.version, content.image
    if own and own != inventory.image and not own.endswith(":latest"):
        yield (
            f"the recipe is for the image {own}, and the cluster has {inventory.image}; if that"
            f" does not serve it, write `image: {own}` into the inventory and run `vlaunch up`"
        )
    for text in (word for option, _ in content.args for word in option.words[1:]):
        if text.endswith(".jinja") and not text.startswith("/"):
            yield f"{text} is a file of the image, from its working directory on"
    if wanted and not number(wanted):
        yield f"the recipe wants vLLM `{wanted}`, which is no version that could be compared"
    elif wanted and version is None:
        yield f"it needs vLLM {wanted} or newer; what {inventory.image} has is not known"
