"""The one container every node gets: what differs per node is its name, its role, its address and
its network variables.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import replace

from launcher.core.domain import Argv, ExistingMount, Inventory, Mount, Node, Secret
from launcher.tools import agent_queries, derived, docker, ray
from launcher.tools.site import Site

PAYLOAD = "/opt/vlaunch"
SECRETS = "/run/vlaunch/secrets"
SERVERS = "/var/lib/vlaunch"  # what is served, and how it goes: agent/state.py
COMPILED = "/var/cache/vlaunch"
_NO_IMAGE = "made-for-the-image"
# Where each looks for what it compiled before: vllm/envs.py and vllm/compilation (0.32), triton's
# and torch's own, flashinfer/jit/env.py, DeepGEMM's README, tilelang/env.py, and CUDA's C++
# Programming Guide for what the driver compiles. The same in all containers, for Ray hands the
# driver's environment to workers.
_COMPILED_ENV = {
    "VLLM_CACHE_ROOT": f"{COMPILED}/vllm",
    "TORCHINDUCTOR_CACHE_DIR": f"{COMPILED}/inductor",
    "TRITON_CACHE_DIR": f"{COMPILED}/triton",
    "FLASHINFER_WORKSPACE_BASE": f"{COMPILED}/flashinfer",
    "DG_JIT_CACHE_DIR": f"{COMPILED}/deep_gemm",
    "TILELANG_CACHE_DIR": f"{COMPILED}/tilelang",
    "CUDA_CACHE_PATH": f"{COMPILED}/cuda",
}
_RDMA_ULIMITS = {"memlock": "-1", "stack": "67108864"}
# What the driver `local` does by itself; `json-file` writes without end
# (https://docs.docker.com/engine/logging/drivers/local/).
_LOG_LIMITS = {"max-size": "20m", "max-file": "5"}


def role(node: Node) -> docker.Role:
    """Return the role of a node's container."""
    return "head" if node.head else "worker"


def secrets_base(site: Site, node: Node) -> str:
    """Return the directory on a node that holds `secrets/`; a place in memory is assumed when
    nobody was asked.
    """
    inventory, facts = site.inventory, site.facts_of(node)
    if inventory.secrets_in == "disk":
        return site.state_dir(node)
    memory = (facts.memory if facts else "") or f"/run/vlaunch-{node.ssh.user or 'root'}"
    return f"{memory}/{inventory.cluster}"


def node_spec(
    site: Site,
    node: Node,
    image: str,
    secrets: Mapping[str, Secret],
    *,
    fingerprinted: str | None = None,
) -> docker.ContainerSpec:
    """Return the container of one node, head or worker: the agent, which starts Ray where the
    inventory wants Ray.

    `fingerprinted` stands in for the secrets' fingerprint where only their names are known.
    """
    inventory = site.inventory
    start: Argv = ()
    if not inventory.ray.off:
        start = ray.start_head(node, inventory) if node.head else ray.start_worker(node, inventory)
    argv = agent_queries.agent(
        start,
        node=node.name,
        head=inventory.head.ip,
        port=inventory.ports.group,
        metrics=inventory.ports.metrics,
        lead=node.head,
        private_shm=inventory.shm != "host",
    )
    env = {"HF_TOKEN_PATH": f"{SECRETS}/HF_TOKEN"} if "HF_TOKEN" in secrets else {}
    env |= {} if inventory.ray.off else _ray_env(inventory)
    spec = _spec(site, node, role(node), image, argv, env)
    mark = fingerprinted or (fingerprint(secrets) if secrets else "")
    return replace(spec, labels={"vlaunch.secrets": mark} if mark else {}).labelled()


def probe_spec(site: Site, node: Node, argv: Argv) -> docker.ContainerSpec:
    """Return a throw-away container with the image, environment, devices and rights of a node's; it
    carries no secret.
    """
    spec = _spec(site, node, "probe", site.inventory.image, argv, {})
    spec = replace(spec, name=f"{spec.name}-probe", restart="no").labelled()
    # A directory that is not there yet would be made by Docker, as root's.
    left_out = (SECRETS, SERVERS, COMPILED)
    return replace(spec, mounts=tuple(each for each in spec.mounts if each.target not in left_out))


def compiled_by(site: Site, node: Node, image: str) -> str:
    """Return the folder on a node for what engines in a container of an image compile there.

    It is the inventory's image that counts, of which others are made: Ray on top of it changes
    nothing that is compiled. Where a node lacks it, another's stands for it: `up` makes sure that
    they are the same.
    """
    made = site.image(node, image)
    bases = (site.image(each, site.inventory.image) for each in (node, *site.seen))
    names = (
        *(each.identity for each in bases if each),
        made.labels.get(derived.BASE, "") if made else "",
    )
    known = next((each[:12] for each in names if re.match("[0-9a-f]{12}", each)), _NO_IMAGE)
    return f"{site.cache_dir(node)}/{known}"


def _spec(
    site: Site, node: Node, role: docker.Role, image: str, argv: Argv, env: Mapping[str, str]
) -> docker.ContainerSpec:
    """Return what the containers of a node have in common, not yet labelled."""
    inventory = site.inventory
    nvidia, amd = inventory.accelerator == "nvidia", inventory.accelerator == "amd"
    rdma = inventory.fabric != "ethernet"
    devices = (
        *(_amd_devices(site, node) if amd else ()),
        *(("/dev/infiniband",) if rdma else ()),
        *inventory.devices,
    )
    return docker.ContainerSpec(
        name=site.container_name(node),
        image=image,
        command=(f"{PAYLOAD}/entry.sh", *argv),
        cluster=inventory.cluster,
        role=role,
        node=node.name,
        env={**_COMPILED_ENV, **_node_env(site, node), **env, **node.env},
        mounts=_mounts(site, node, image),
        shm=inventory.shm,
        gpus=docker.gpu_request(node) if nvidia else "",
        # Each place in the container once: what the inventory says of it wins.
        devices=tuple({_place(each): each for each in devices}.values()),
        cap_add=tuple(dict.fromkeys((*(("IPC_LOCK",) if rdma else ()), *inventory.cap_add))),
        groups=("video",) if amd else (),
        # ROCm's images need an unconfined seccomp profile for memory mapping (vLLM docs, AMD
        # installation).
        security=("seccomp=unconfined",) if amd else (),
        ulimits={**(_RDMA_ULIMITS if rdma else {}), **inventory.ulimits},
        privileged=inventory.privileged,
        log_driver=inventory.logging.driver or "",
        log_options=_log_options(site, node),
    )


def _amd_devices(site: Site, node: Node) -> tuple[str, ...]:
    """Return the driver's device, and the render nodes of the GPUs that a node names, or all of
    them (https://rocm.docs.amd.com/projects/install-on-linux/en/latest/how-to/docker.html).

    Where nobody was asked, they are assumed to be numbered from 128 on, as the kernel does.
    """
    if not node.gpu_ids:
        return ("/dev/kfd", "/dev/dri")
    facts = site.facts_of(node)
    known = dict(enumerate((facts.amd_renders if facts else None) or ()))
    minors = (known.get(int(each)) or 128 + int(each) for each in node.gpu_ids)
    return ("/dev/kfd", *(f"/dev/dri/renderD{minor}" for minor in minors))


def _place(device: str) -> str:
    """Return where `HOST[:CONTAINER][:rwm]` puts a device; a CDI name stands for itself."""
    host, _, rest = device.partition(":")
    place = rest.partition(":")[0]
    if not host.startswith("/"):
        return device
    return place if place.startswith("/") else host


def _log_options(site: Site, node: Node) -> Mapping[str, str]:
    """Return what keeps a container's log small: no other driver knows these options, and Docker
    refuses a container with an option that its driver does not know (`ValidateLogOpts` in moby).
    """
    wanted, facts, there = site.inventory.logging, site.facts_of(node), site.container(node)
    if wanted.options is not None:
        return wanted.options
    own = (facts.log_driver if facts else "") or (there.log_driver if there else "")
    return _LOG_LIMITS if (wanted.driver or own or "json-file") in ("json-file", "local") else {}


def _mounts(site: Site, node: Node, image: str) -> tuple[Mount, ...]:
    directory = site.state_dir(node)
    return (
        Mount(source=f"{directory}/payload", target=PAYLOAD, read_only=True),
        # After a reboot there is nothing in memory, and a directory made by Docker would look like
        # no secrets.
        (ExistingMount if site.inventory.secrets_in == "memory" else Mount)(
            source=f"{secrets_base(site, node)}/secrets", target=SECRETS, read_only=True
        ),
        Mount(source=f"{directory}/server", target=SERVERS),
        Mount(source=compiled_by(site, node, image), target=COMPILED),
        Mount(source=node.hf_home, target=node.hf_home),
        *site.inventory.mounts,
    )


def _node_env(site: Site, node: Node) -> dict[str, str]:
    """Return what must be right on each node by itself: Ray hands the driver's environment to
    workers that lack a variable.
    """
    facts, accelerator = site.facts_of(node), site.inventory.accelerator
    interface = node.interface or (facts.interface_of(node.ip) if facts else None)
    env = {"VLLM_HOST_IP": node.ip, "HF_HOME": node.hf_home}
    if interface:
        # `=` makes NCCL match the whole name; Gloo always does.
        env |= {
            "NCCL_SOCKET_IFNAME": f"={interface}",
            "GLOO_SOCKET_IFNAME": interface,
            "TP_SOCKET_IFNAME": interface,
        }
    if node.hca:
        env["NCCL_IB_HCA"] = "=" + ",".join(node.hca)
    if accelerator == "nvidia":
        # CUDA's own order is by speed; Docker, NVML and so Ray and vLLM number GPUs by PCI address.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        # NVSHMEM reads `=` as NCCL does for the interface, but takes names of devices as they are;
        # where its variables are unset, torch copies NCCL's, the `=` before devices included.
        # Without NVSHMEM_ENABLE_NIC_PE_MAPPING, each GPU keeps the nearest of these devices.
        env |= {"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": f"={interface}"} if interface else {}
        env |= {"NVSHMEM_HCA_LIST": ",".join(node.hca)} if node.hca else {}
    if interface and accelerator != "cpu" and (node.hca or site.inventory.fabric == "ethernet"):
        # Before 1.21, UCX knows no device without a port.
        devices = (name if ":" in name else f"{name}:1" for name in node.hca)
        env["UCX_NET_DEVICES"] = ",".join((*devices, interface))
    return env


def _ray_env(inventory: Inventory) -> dict[str, str]:
    # RAY_ADDRESS always: without it vLLM starts a Ray of its own, silently. RAY_AUTH_MODE always:
    # since 2.59 Ray turns it on by itself on the head, and not on workers, when it finds a token
    # file. The interval: `ray status` is renewed every five seconds otherwise, and shows
    # yesterday's cluster meanwhile. The niceness: Ray gives its workers, and so vLLM, 15 unless
    # told otherwise, behind everything else on the node. Ray's looks at its nodes: a closed port is
    # a dead node after 5 s (15 by default). Silence is one after a minute, as by default: a node
    # whose CPUs or disks are busy is silent for longer than one would think. The reconnection:
    # workers end 15 s after they have lost the head (60), restart, and join the one that is back.
    # The memory monitor: it kills ranks while they load, above all where GPUs share the host's
    # memory (vllm issue 15102). The rotation: a log of Ray's own grows to 3 GB by default, one of
    # its workers without end (ray/_private/workers/default_worker.py). The process groups: an
    # engine ends with the Ray worker that started it, and frees its GPUs (the default from 2.57).
    env = {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_ROTATION_BACKUP_COUNT": "1",
        "RAY_ROTATION_MAX_BYTES": str(64 << 20),
        "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
        "RAY_health_check_failure_threshold": "5",
        "RAY_health_check_period_ms": "1000",
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_process_group_cleanup_enabled": "1",
        "RAY_worker_niceness": "0",
        "RAY_ADDRESS": f"{inventory.head.ip}:{inventory.ports.gcs}",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    if not inventory.ray.token_auth:
        return {**env, "RAY_AUTH_MODE": "disabled"}
    return {**env, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{SECRETS}/{ray.TOKEN}"}


def fingerprint(secrets: Mapping[str, Secret]) -> str:
    """Return a short keyed hash of all secrets: it changes when one does, and tells nothing about
    them.

    The key is the cluster's own random token, so that a guessable secret cannot be found by trying
    values. Before the token is made, nothing can be said.
    """
    key = secrets[ray.TOKEN].reveal() if ray.TOKEN in secrets else ""
    if not key:
        return "made-by-the-run"
    text = "\0".join(f"{name}={secrets[name].reveal()}" for name in sorted(secrets))
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()[:12]


def find_drift(site: Site, node: Node) -> tuple[str, ...]:
    """Say how a node's container differs from the inventory.

    `status` fetches no secrets, so that a new value of one goes unseen: the container's own
    fingerprint stands in for it.
    """
    there = site.container(node)
    return tuple(_differences(site, node, there)) if there is not None else ()


def _differences(site: Site, node: Node, there: docker.Container) -> list[str]:
    inventory = site.inventory
    base, image = site.image(node, inventory.image), site.image(node, there.image)
    made_from = image.labels.get("vlaunch.base") if image else None
    secrets = dict.fromkeys([*inventory.secrets, ray.TOKEN], Secret(""))
    spec = node_spec(
        site,
        node,
        there.image if made_from else inventory.image,
        secrets,
        fingerprinted=there.labels.get("vlaunch.secrets"),
    )
    said = []
    if made_from and (base is None or made_from != base.identity):
        said.append(f"{there.image} was not made from the present {inventory.image}")
    if there.spec != spec.hash:
        said += docker.differences(there, spec, image.env if image else _own_env(there, spec))
    return said


def _own_env(there: docker.Container, spec: docker.ContainerSpec) -> Mapping[str, str]:
    """Return which variables an image brings that was not looked at: those that nobody sets are its
    own.
    """
    return {name: value for name, value in there.env.items() if name not in spec.env}
