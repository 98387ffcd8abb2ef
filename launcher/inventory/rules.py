"""Rules between the keys of the whole cluster; each function yields mistakes.

See `node_rules` for nodes and `mount_rules` for paths in the containers.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple
from ipaddress import ip_address, ip_network
from itertools import pairwise
from math import prod

from launcher.core import secret_patterns
from launcher.core.domain import Argv, TlsSettings
from launcher.inventory import values
from launcher.inventory.draft import InventoryDraft
from launcher.inventory.engine_args import OWNED_ARGUMENTS, SHORT_NAMES, python_name
from launcher.inventory.mistakes import Mistake, YamlPath, did_you_mean

# Ray's OBJECT_STORE_MINIMUM_MEMORY_BYTES (ray/_private/ray_constants.py).
_MIN_OBJECT_STORE = 75 * 2**20
# Folders of app/audit.py, app/lock.py, tools/site/ and shell/state_folder.sh in `state_dir`, next
# to the clusters'.
_RESERVED_NAMES = ("audit", "cache", "locks", "nodes")
_VISIBLE_GPUS = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
_VISIBLE_IN_PS = "a secret should not be an argument, which `ps` shows; use `secrets`"
# Prefixes of arguments for ranks and expert parallelism.
_PER_SERVER_PREFIXES = ("data_parallel", "enable_expert_parallel")
_MANAGED_ENV = {
    "VLLM_HOST_IP": "the launcher sets it on each node from `ip`",
    "RAY_ADDRESS": "the launcher sets it from the head's `ip` and `ports.gcs`",
    "RAY_AUTH_MODE": "set `ray.token_auth` instead",
    "AGENT_CA": "`vlaunch up` issues it",
    "AGENT_CERTIFICATE": "`vlaunch up` issues it",
}


def name(draft: InventoryDraft) -> Iterator[Mistake]:
    """Reject cluster names that are folders shared by all clusters on a node."""
    if draft.file.cluster in _RESERVED_NAMES:
        yield Mistake(
            yaml_path=("cluster",),
            text="should be another name: this one is reserved on the nodes",
        )


def image_source(draft: InventoryDraft) -> Iterator[Mistake]:
    """Reject digests for images copied between nodes: Docker does not know them there."""
    if draft.file.image_source == "nodes" and "@" in draft.file.image:
        text = "should be named by a tag: Docker keeps no digest with `image_source: nodes`"
        yield Mistake(yaml_path=("image",), text=text)


def ports(draft: InventoryDraft) -> Iterator[Mistake]:
    """Require distinct ports outside the range of Ray's workers, which take theirs at random."""
    numbers: dict[str, int] = asdict(draft.file.ports)
    low, high = numbers.pop("worker_min"), numbers.pop("worker_max")
    if low >= high:
        yaml_path: YamlPath = (
            "ports",
            "worker_min" if draft.is_written("ports", "worker_min") else "worker_max",
        )
        yield Mistake(
            yaml_path=yaml_path,
            text=f"should leave a range of ports for workers, not {low} to {high}",
        )
    names: dict[int, str] = {}
    for name, number in sorted(
        numbers.items(), key=lambda item: draft.is_written("ports", item[0])
    ):
        if number in names:
            yield Mistake(
                yaml_path=("ports", name),
                text=f"should differ from `{names[number]}`; both are {number}",
            )
        names.setdefault(number, name)
        if low <= number <= high:
            is_explicit = draft.is_written("ports", name) or not draft.is_written(
                "ports", "worker_min"
            )
            port_path = ("ports", name if is_explicit else "worker_min")
            yield Mistake(
                yaml_path=port_path,
                text=(
                    f"`{name}` ({number}) should be outside the ports of Ray's workers, {low} to"
                    f" {high}"
                ),
            )


def placement(draft: InventoryDraft) -> Iterator[Mistake]:
    """Require GPUs for TP × PP × DP.

    launcher/tools/site/placement.py checks the rest, which depends on the model and the backend.
    """
    if _gpu_count_unknown(draft):
        return
    serve, total = draft.file.serve, sum(expanded.node.gpus for expanded in draft.nodes)
    sizes = {key: size for key, size in (("tp", serve.tp), ("pp", serve.pp)) if size}
    if prod(sizes.values()) <= total:
        sizes["dp"] = serve.dp
    needed = prod(sizes.values())
    if needed > total:
        product = " x ".join(f"{name} {size}" for name, size in sizes.items())
        text = f"should fit the cluster: {product} needs {needed} GPUs, but the nodes have {total}"
        yield Mistake(yaml_path=("serve", _oversized_key(sizes, total)), text=text)


def _gpu_count_unknown(draft: InventoryDraft) -> bool:
    nodes = [yaml_path for yaml_path in draft.invalid_paths if yaml_path[:1] == ("nodes",)]
    return any(len(yaml_path) < 3 or yaml_path[-1] in ("gpus", "host") for yaml_path in nodes)


def _oversized_key(sizes: Mapping[str, int], total: int) -> str:
    """Return the size to change: DP if one replica fits, TP if it alone is too large, else PP."""
    if "dp" in sizes:
        return "dp"
    if "tp" in sizes and ("pp" not in sizes or sizes["tp"] > total):
        return "tp"
    return "pp"


def ray(draft: InventoryDraft) -> Iterator[Mistake]:
    """Reject Ray settings with `ray: none`."""
    if draft.file.ray.version != "none":
        return
    if draft.is_written("serve", "backend") and draft.file.serve.backend == "ray":
        text = f"cannot be ray with `ray: none` (line {draft.line_of('ray')}), which implies mp"
        yield Mistake(yaml_path=("serve", "backend"), text=text)
    if draft.file.ray.object_store is not None:
        yield Mistake(
            yaml_path=("ray", "object_store"), text="should be left out with `version: none`"
        )


def memory(draft: InventoryDraft) -> Iterator[Mistake]:
    """Check Ray's object store against its minimum and against shared memory."""
    store, shm = draft.file.ray.object_store, draft.file.shm
    if store is not None and store < _MIN_OBJECT_STORE:
        yield Mistake(
            yaml_path=("ray", "object_store"),
            text="should be at least 75MiB, the minimum for Ray",
        )
    if store is not None and isinstance(shm, int) and store > shm:
        yield Mistake(
            yaml_path=("ray", "object_store"),
            text=f"should fit into `shm` (line {draft.line_of('shm')}), which contains it",
        )


def network(draft: InventoryDraft) -> Iterator[Mistake]:
    """Allow RDMA requirements only with an RDMA fabric and GPUs."""
    yield from _check_devices(draft)
    required = draft.file.network.require
    if required not in ("rdma", "gdrdma"):
        return
    yaml_path = ("network", "require")
    if draft.file.accelerator == "cpu":
        yield Mistake(yaml_path=yaml_path, text=f"cannot be {required} with `accelerator: cpu`")
    elif _is_ethernet(draft):
        text = f"cannot be {required} with `fabric: ethernet`, which has no RDMA"
        yield Mistake(yaml_path=yaml_path, text=text)


def _check_devices(draft: InventoryDraft) -> Iterator[Mistake]:
    for yaml_path, hca in _hcas(draft):
        if hca and draft.file.accelerator == "cpu":
            text = "should be left out with `accelerator: cpu`, whose backend (Gloo) uses no RDMA"
            yield Mistake(yaml_path=yaml_path, text=text)
        elif hca and _is_ethernet(draft):
            text = "should come with `fabric: infiniband` or `fabric: roce` under `network`"
            yield Mistake(yaml_path=yaml_path, text=text)
        if len(set(hca)) < len(hca):
            yield Mistake(yaml_path=yaml_path, text="should name each device once")


def _is_ethernet(draft: InventoryDraft) -> bool:
    return draft.file.network.fabric == "ethernet" and draft.is_valid("network", "fabric")


def environment(draft: InventoryDraft) -> Iterator[Mistake]:
    """Reject secrets in environments and arguments, and variables that vlaunch sets itself."""
    file = draft.file
    environments: list[tuple[YamlPath, Mapping[str, str]]] = [(("env",), file.env)]
    environments += [(("nodes", index, "env"), entry.env) for index, entry in enumerate(file.nodes)]
    for yaml_path, env in environments:
        for name, value in env.items():
            if name in file.secrets:
                line = draft.line_of("secrets", name)
                yield Mistake(
                    yaml_path=(*yaml_path, name),
                    text=f"should be removed; it is a secret (line {line})",
                )
            elif name in _MANAGED_ENV:
                yield Mistake(
                    yaml_path=(*yaml_path, name), text=f"should be removed; {_MANAGED_ENV[name]}"
                )
            elif _is_secret_like(name, value):
                advice = (
                    f"a secret should not be written here; use `secrets: {{{name}: {{env:"
                    f" {name}}}}}`"
                )
                yield Mistake(yaml_path=(*yaml_path, name), text=advice)
            elif name in _VISIBLE_GPUS and "MIG-" in value:
                yield Mistake(yaml_path=(*yaml_path, name), text=values.NO_MIG)
        yield from _unreachable_by_proxy(draft, yaml_path, env)
    for index, argument in enumerate(file.serve.args):
        if argument.split("=")[0] == "--api-key":
            advice = (
                "a key should not be an argument, which `ps` shows; use `secrets: {VLLM_API_KEY:"
                " {env: VLLM_API_KEY}}`"
            )
            yield Mistake(yaml_path=("serve", "args", index), text=advice)
        elif secret_patterns.VALUE.search(argument):
            yield Mistake(
                yaml_path=("serve", "args", index),
                text=_VISIBLE_IN_PS,
            )


def _unreachable_by_proxy(
    draft: InventoryDraft, yaml_path: YamlPath, env: Mapping[str, str]
) -> Iterator[Mistake]:
    """Require exceptions from a proxy for the nodes, which query one another by HTTP."""
    proxies = [name for name in env if name.lower() in ("http_proxy", "all_proxy")]
    cluster_env = {name.lower(): value for name, value in {**draft.file.env, **env}.items()}
    exceptions = [item.strip() for item in cluster_env.get("no_proxy", "").split(",")]
    addresses = ["localhost", "127.0.0.1", *(expanded.node.ip for expanded in draft.nodes)]
    if proxies and not all("*" in exceptions or _is_exempt(ip, exceptions) for ip in addresses):
        text = (
            "would send the nodes' own requests to the proxy; add to this section"
            f" `NO_PROXY: {','.join(addresses)}`"
        )
        yield Mistake(yaml_path=(*yaml_path, proxies[0]), text=text)


def _is_exempt(host: str, exceptions: Sequence[str]) -> bool:
    if host in exceptions:
        return True
    with contextlib.suppress(ValueError):
        address = ip_address(host)
        for item in exceptions:
            with contextlib.suppress(ValueError):
                if address in ip_network(item, strict=False):
                    return True
    return False


def secrets(draft: InventoryDraft) -> Iterator[Mistake]:
    """Require exactly one source for each secret."""
    for name, source in draft.file.secrets.items():
        unread = any(yaml_path[:2] == ("secrets", name) for yaml_path in draft.invalid_paths)
        sources = [value for value in astuple(source) if value is not None]
        if len(sources) != 1 and not unread:
            yield Mistake(
                yaml_path=("secrets", name),
                text="should have exactly one of `env`, `file`, `command` and `prompt`",
            )
        if secret_patterns.VALUE.search(source.prompt or ""):
            text = "should be the prompt text; the value is entered at the prompt"
            yield Mistake(yaml_path=("secrets", name, "prompt"), text=text)
        if name in _MANAGED_ENV:
            yield Mistake(
                yaml_path=("secrets", name), text=f"should be removed; {_MANAGED_ENV[name]}"
            )


def logging(draft: InventoryDraft) -> Iterator[Mistake]:
    """Reject secrets in log options: `docker inspect` shows them to every Docker user."""
    for name, value in (draft.file.logging.options or {}).items():
        secret = name.endswith(("token", "secret", "password"))
        if secret or secret_patterns.VALUE.search(value):
            text = (
                "a secret should not be written here; give it to Docker itself, in `log-opts` of"
                " /etc/docker/daemon.json"
            )
            yield Mistake(yaml_path=("logging", "options", name), text=text)


def front(draft: InventoryDraft) -> Iterator[Mistake]:
    """Check the front's nodes, certificate files and ports."""
    if (front := draft.file.front) is None:
        return
    if front.node and front.nodes:
        yield Mistake(yaml_path=("front", "node"), text="should be left out with `nodes`")
    names = [item.node.name for item in draft.nodes]
    written: list[tuple[YamlPath, str | None]] = [(("front", "node"), front.node)]
    written += [(("front", "nodes", index), name) for index, name in enumerate(front.nodes)]
    for yaml_path, name in written:
        if name is not None and name not in names:
            text = f"should be the name of a node, not `{name}`{did_you_mean(name, names)}"
            yield Mistake(yaml_path=yaml_path, text=text)
    yield from _check_tls(draft, front.tls)
    taken = {number: f"ports.{name}" for name, number in asdict(draft.file.ports).items()}
    for key, port in (("port", front.port), ("metrics", front.metrics)):
        if port in taken:
            text = f"should differ from `{taken[port]}`; both are {port}"
            yield Mistake(yaml_path=("front", key), text=text)
        taken[port] = f"front.{key}"


def _check_tls(draft: InventoryDraft, tls: TlsSettings) -> Iterator[Mistake]:
    if (tls.cert is None) != (tls.key is None):
        if draft.is_valid("front", "tls", "cert") and draft.is_valid("front", "tls", "key"):
            yield Mistake(
                yaml_path=("front", "tls"), text="should have both files: `cert` and `key`"
            )
    elif tls.cert and tls.kind == "off":
        text = "cannot be off with `cert` and `key`"
        yield Mistake(yaml_path=("front", "tls", "kind"), text=text)


def arguments(draft: InventoryDraft) -> Iterator[Mistake]:
    """Reject an option and its value in one item: arguments are never split."""
    for index, argument in enumerate(draft.file.serve.args):
        option, space, _ = argument.partition(" ")
        if space and option.startswith("-") and "=" not in option:
            yield Mistake(
                yaml_path=("serve", "args", index),
                text=f"should be two items: `{option}` and its value",
            )


def engine_arguments(draft: InventoryDraft) -> Iterator[Mistake]:
    """Reject duplicate engine arguments, those that servers and jobs set, and secrets."""
    spellings: dict[str, str] = {}
    for spelling, value in draft.file.engine_args.items():
        name = python_name(spelling)
        yaml_path: YamlPath = ("engine_args", spelling)
        if name in spellings:
            yield Mistake(yaml_path=yaml_path, text=f"is `{spellings[name]}` in another spelling")
        elif SHORT_NAMES.get(name, name) in OWNED_ARGUMENTS or name.startswith(
            _PER_SERVER_PREFIXES
        ):
            yield Mistake(
                yaml_path=yaml_path, text="should be left out: each server and each job sets it"
            )
        elif secret_patterns.VALUE.search(str(value)):
            yield Mistake(yaml_path=yaml_path, text=_VISIBLE_IN_PS)
        spellings.setdefault(name, spelling)


def docker(draft: InventoryDraft) -> Iterator[Mistake]:
    """Require non-interactive sudo: it has no terminal for a password."""
    commands: list[tuple[YamlPath, Argv]] = [(("docker",), draft.file.docker)]
    commands += [
        (("nodes", index, "docker"), entry.docker)
        for index, entry in enumerate(draft.file.nodes)
        if entry.docker
    ]
    for yaml_path, argv in commands:
        if argv[0].startswith("-"):
            yield Mistake(
                yaml_path=yaml_path,
                text=f"should start with a command, not with the option `{argv[0]}`",
            )
        elif argv[0].rpartition("/")[2] == "sudo" and not {"-n", "--non-interactive"} & set(argv):
            yield Mistake(
                yaml_path=yaml_path,
                text="should use `sudo -n`: without -n, sudo would wait for a password",
            )
        if any(first == second == "docker" for first, second in pairwise(argv)):
            yield Mistake(yaml_path=yaml_path, text="should name docker once")


ALL = (
    name,
    image_source,
    ports,
    placement,
    ray,
    memory,
    logging,
    front,
    network,
    environment,
    secrets,
    arguments,
    engine_arguments,
    docker,
)


def _hcas(draft: InventoryDraft) -> Iterator[tuple[YamlPath, tuple[str, ...]]]:
    yield ("network", "hca"), draft.file.network.hca or ()
    for index, entry in enumerate(draft.file.nodes):
        yield ("nodes", index, "network", "hca"), entry.network.hca or ()


def _is_secret_like(name: str, value: str) -> bool:
    if secret_patterns.VALUE.fullmatch(value):
        return True
    # Switches such as HF_HUB_DISABLE_IMPLICIT_TOKEN=1 are not secrets.
    return secret_patterns.NAME.search(name) is not None and len(value) >= 6
