"""Rules between the keys of the whole cluster, each a function that yields what is wrong.

`node_rules` has the nodes', `mount_rules` those about places in the containers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple
from itertools import pairwise
from math import prod

from launcher.core import secret_patterns
from launcher.core.domain import Argv
from launcher.inventory.draft import Draft
from launcher.inventory.engine_args import OWNED, SHORT, python_name
from launcher.inventory.mistakes import Mistake, Where

# Ray's OBJECT_STORE_MINIMUM_MEMORY_BYTES (ray/_private/ray_constants.py).
_SMALLEST_STORE = 75 * 2**20
# app/audit.py, app/lock.py and tools/site.py: beside the clusters' folders
# in `state_dir`.
_OWN_FOLDERS = ("audit", "cache", "locks")
_SHOWN_BY_PS = "a secret should not be an argument, which `ps` shows; use `secrets`"
# Ranks and how experts are shared among them.
_OF_EACH = ("data_parallel", "enable_expert_parallel")
_OWNED_ENV = {
    "VLLM_HOST_IP": "the launcher sets it on each node from `ip`",
    "RAY_ADDRESS": "the launcher sets it from the head's `ip` and `ports.gcs`",
    "RAY_AUTH_MODE": "set `ray.token_auth` instead",
    "AGENT_CA": "`vlaunch up` issues it",
    "AGENT_CERTIFICATE": "`vlaunch up` issues it",
}


def name(draft: Draft) -> Iterator[Mistake]:
    """A cluster's folder on the nodes has its name, and must not be one in which all clusters keep
    something.
    """
    if draft.file.cluster in _OWN_FOLDERS:
        yield Mistake(
            where=("cluster",),
            text="should be another name: nodes have a folder of this name for all clusters",
        )


def image_source(draft: Draft) -> Iterator[Mistake]:
    """An image that nodes give each other has no digest there."""
    if draft.file.image_source == "nodes" and "@" in draft.file.image:
        text = "should be named by a tag: with `image_source: nodes` Docker knows no digest of it"
        yield Mistake(where=("image",), text=text)


def ports(draft: Draft) -> Iterator[Mistake]:
    """Each port is used once, and none lies among those of Ray's workers, which would take it at
    random.
    """
    numbers: dict[str, int] = asdict(draft.file.ports)
    low, high = numbers.pop("worker_min"), numbers.pop("worker_max")
    if low >= high:
        yaml_path: Where = (
            "ports",
            "worker_min" if draft.written("ports", "worker_min") else "worker_max",
        )
        yield Mistake(
            where=yaml_path, text=f"should leave a range of ports for workers, not {low} to {high}"
        )
    names: dict[int, str] = {}
    for name, number in sorted(numbers.items(), key=lambda item: draft.written("ports", item[0])):
        if number in names:
            yield Mistake(
                where=("ports", name),
                text=f"should differ from `{names[number]}`; both are {number}",
            )
        names.setdefault(number, name)
        if low <= number <= high:
            is_explicit = draft.written("ports", name) or not draft.written("ports", "worker_min")
            port_path = ("ports", name if is_explicit else "worker_min")
            yield Mistake(
                where=port_path,
                text=(
                    f"`{name}` ({number}) should lie outside the ports of Ray's workers, {low} to"
                    f" {high}"
                ),
            )


def placement(draft: Draft) -> Iterator[Mistake]:
    """TP times PP is the number of GPUs that one copy of the model takes, DP that of the copies;
    there must be as many GPUs.

    launcher/tools/placement.py judges the rest, which depends on the model and the backend.
    """
    if _gpus_unread(draft):
        return
    serve, total = draft.file.serve, sum(expanded.node.gpus for expanded in draft.placed)
    sizes = {key: size for key, size in (("tp", serve.tp), ("pp", serve.pp)) if size}
    if prod(sizes.values()) <= total:
        sizes["dp"] = serve.dp
    needed = prod(sizes.values())
    if needed > total:
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        text = f"should fit the cluster: {product} takes {needed} GPUs, and the nodes have {total}"
        yield Mistake(where=("serve", _too_large(sizes, total)), text=text)


def _gpus_unread(draft: Draft) -> bool:
    """Tell whether a mistake in `nodes` leaves open how many GPUs there are."""
    nodes = [yaml_path for yaml_path in draft.broken if yaml_path[:1] == ("nodes",)]
    return any(len(yaml_path) < 3 or yaml_path[-1] in ("gpus", "host") for yaml_path in nodes)


def _too_large(sizes: Mapping[str, int], total: int) -> str:
    """Return the size to change: DP where one copy fits, TP where it is too much by itself."""
    if "dp" in sizes:
        return "dp"
    if "tp" in sizes and ("pp" not in sizes or sizes["tp"] > total):
        return "tp"
    return "pp"


def ray(draft: Draft) -> Iterator[Mistake]:
    """Without Ray nothing can be said of it."""
    if draft.file.ray.version != "none":
        return
    if draft.written("serve", "backend") and draft.file.serve.backend == "ray":
        text = f"cannot be ray with `ray: none` (line {draft.line('ray')}), with which it is mp"
        yield Mistake(where=("serve", "backend"), text=text)
    if draft.file.ray.object_store is not None:
        yield Mistake(where=("ray", "object_store"), text="should be left out with `version: none`")


def memory(draft: Draft) -> Iterator[Mistake]:
    """Ray's object store has a least size, and lives in shared memory."""
    store, shm = draft.file.ray.object_store, draft.file.shm
    if store is not None and store < _SMALLEST_STORE:
        yield Mistake(
            where=("ray", "object_store"), text="should be at least 75MiB, which Ray needs to start"
        )
    if store is not None and isinstance(shm, int) and store > shm:
        yield Mistake(
            where=("ray", "object_store"),
            text=f"should fit into `shm` (line {draft.line('shm')}), where Ray keeps it",
        )


def network(draft: Draft) -> Iterator[Mistake]:
    """RDMA needs a fabric that has it, and GPUs; devices are named for the fabric they belong
    to.
    """
    yield from _devices(draft)
    required = draft.file.network.require
    if required not in ("rdma", "gdrdma"):
        return
    yaml_path = ("network", "require")
    if draft.file.accelerator == "cpu":
        yield Mistake(where=yaml_path, text=f"cannot be {required} with `accelerator: cpu`")
    elif _is_ethernet(draft):
        text = f"cannot be {required} with `fabric: ethernet`, which has no RDMA"
        yield Mistake(where=yaml_path, text=text)


def _devices(draft: Draft) -> Iterator[Mistake]:
    for yaml_path, hca in _hcas(draft):
        if hca and draft.file.accelerator == "cpu":
            text = "should be left out with `accelerator: cpu`, whose backend (Gloo) uses no RDMA"
            yield Mistake(where=yaml_path, text=text)
        elif hca and _is_ethernet(draft):
            text = "should come with `fabric: infiniband` or `fabric: roce` under `network`"
            yield Mistake(where=yaml_path, text=text)
        if len(set(hca)) < len(hca):
            yield Mistake(where=yaml_path, text="should name each device once")


def _is_ethernet(draft: Draft) -> bool:
    return draft.file.network.fabric == "ethernet" and draft.sound("network", "fabric")


def environment(draft: Draft) -> Iterator[Mistake]:
    """Nothing that looks like a secret is written in the file, and nothing is set that the launcher
    must set itself.
    """
    file = draft.file
    environments: list[tuple[Where, Mapping[str, str]]] = [(("env",), file.env)]
    environments += [(("nodes", index, "env"), entry.env) for index, entry in enumerate(file.nodes)]
    for yaml_path, env in environments:
        for name, value in env.items():
            if name in file.secrets:
                line = draft.line("secrets", name)
                yield Mistake(
                    where=(*yaml_path, name),
                    text=f"should be removed; it is a secret (line {line})",
                )
            elif name in _OWNED_ENV:
                yield Mistake(
                    where=(*yaml_path, name), text=f"should be removed; {_OWNED_ENV[name]}"
                )
            elif _looks_secret(name, value):
                advice = (
                    f"a secret should not be written here; use `secrets: {{{name}: {{env:"
                    f" {name}}}}}`"
                )
                yield Mistake(where=(*yaml_path, name), text=advice)
    for index, argument in enumerate(file.serve.args):
        if argument.split("=")[0] == "--api-key":
            advice = (
                "a key should not be an argument, which `ps` shows; use `secrets: {VLLM_API_KEY:"
                " {env: VLLM_API_KEY}}`"
            )
            yield Mistake(where=("serve", "args", index), text=advice)
        elif secret_patterns.VALUE.search(argument):
            yield Mistake(
                where=("serve", "args", index),
                text=_SHOWN_BY_PS,
            )


def secrets(draft: Draft) -> Iterator[Mistake]:
    """Each secret has one source."""
    for name, source in draft.file.secrets.items():
        unread = any(yaml_path[:2] == ("secrets", name) for yaml_path in draft.broken)
        sources = [value for value in astuple(source) if value is not None]
        if len(sources) != 1 and not unread:
            yield Mistake(
                where=("secrets", name),
                text="should have exactly one of `env`, `file`, `command` and `prompt`",
            )
        if secret_patterns.VALUE.search(source.prompt or ""):
            text = "should be the question; the value is typed when it is asked for"
            yield Mistake(where=("secrets", name, "prompt"), text=text)
        if name in _OWNED_ENV:
            yield Mistake(where=("secrets", name), text=f"should be removed; {_OWNED_ENV[name]}")


def logging(draft: Draft) -> Iterator[Mistake]:
    """`docker inspect` shows the options of a log driver to everybody who may use Docker."""
    for name, value in (draft.file.logging.options or {}).items():
        secret = name.endswith(("token", "secret", "password"))
        if secret or secret_patterns.VALUE.search(value):
            text = (
                "a secret should not be written here; give it to Docker itself, in `log-opts` of"
                " /etc/docker/daemon.json"
            )
            yield Mistake(where=("logging", "options", name), text=text)


def arguments(draft: Draft) -> Iterator[Mistake]:
    """Arguments are words: nothing splits them later."""
    for index, argument in enumerate(draft.file.serve.args):
        option, space, _ = argument.partition(" ")
        if space and option.startswith("-") and "=" not in option:
            yield Mistake(
                where=("serve", "args", index),
                text=f"should be two items: `{option}` and the value after it",
            )


def engine_arguments(draft: Draft) -> Iterator[Mistake]:
    """Engine arguments are written once, none is one that each server or job sets, and none holds
    a secret.
    """
    spellings: dict[str, str] = {}
    for spelling, value in draft.file.engine_args.items():
        name = python_name(spelling)
        yaml_path: Where = ("engine_args", spelling)
        if name in spellings:
            yield Mistake(where=yaml_path, text=f"is `{spellings[name]}` in another spelling")
        elif SHORT.get(name, name) in OWNED or name.startswith(_OF_EACH):
            yield Mistake(
                where=yaml_path, text="should be left out: each server and each job sets it"
            )
        elif secret_patterns.VALUE.search(str(value)):
            yield Mistake(where=yaml_path, text=_SHOWN_BY_PS)
        spellings.setdefault(name, spelling)


def docker(draft: Draft) -> Iterator[Mistake]:
    """There is no terminal for sudo to ask a password on."""
    commands: list[tuple[Where, Argv]] = [(("docker",), draft.file.docker)]
    commands += [
        (("nodes", index, "docker"), entry.docker)
        for index, entry in enumerate(draft.file.nodes)
        if entry.docker
    ]
    for yaml_path, argv in commands:
        if argv[0].startswith("-"):
            yield Mistake(
                where=yaml_path,
                text=f"should start with a command, not with the option `{argv[0]}`",
            )
        elif argv[0].rpartition("/")[2] == "sudo" and not {"-n", "--non-interactive"} & set(argv):
            yield Mistake(
                where=yaml_path,
                text=(
                    "should use `sudo -n`: sudo without -n would wait for a password that nobody"
                    " can type"
                ),
            )
        if any(first == second == "docker" for first, second in pairwise(argv)):
            yield Mistake(where=yaml_path, text="should name docker once")


ALL = (
    name,
    image_source,
    ports,
    placement,
    ray,
    memory,
    logging,
    network,
    environment,
    secrets,
    arguments,
    engine_arguments,
    docker,
)


def _hcas(draft: Draft) -> Iterator[tuple[Where, tuple[str, ...]]]:
    yield ("network", "hca"), draft.file.network.hca or ()
    for index, entry in enumerate(draft.file.nodes):
        yield ("nodes", index, "network", "hca"), entry.network.hca or ()


def _looks_secret(name: str, value: str) -> bool:
    if secret_patterns.VALUE.fullmatch(value):
        return True
    # Switches such as HF_HUB_DISABLE_IMPLICIT_TOKEN=1 are no secrets.
    return secret_patterns.NAME.search(name) is not None and len(value) >= 6
