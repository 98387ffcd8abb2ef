"""Container of a node; only its name, role, address and network variables differ between nodes."""

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import replace

from launcher.core.domain import Argv, ExistingMount, Inventory, Mount, Node, Secret
from launcher.tools import agent_queries, docker, ray
from launcher.tools.shipped import derived
from launcher.tools.site import Site

PAYLOAD = "/opt/vlaunch"
SECRETS = "/run/vlaunch/secrets"
SERVERS = "/var/lib/vlaunch"  # specs and statuses of servers: agent/state.py
COMPILED = "/var/cache/vlaunch"
_NO_IMAGE = "made-for-the-image"
# Cache directories of the compilers: vllm/envs.py and vllm/compilation (0.32), triton, torch,
# flashinfer/jit/env.py, DeepGEMM's README, tilelang/env.py, and CUDA's C++ Programming Guide for
# the driver. They are the same in all containers, because Ray copies the driver's environment to
# workers.
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
# The defaults of the driver `local`; `json-file` has no limit by default
# (https://docs.docker.com/engine/logging/drivers/local/).
_LOG_LIMITS = {"max-size": "20m", "max-file": "5"}


def role(node: Node) -> docker.Role:
    """Return the role of a node's container."""
    return "head" if node.head else "worker"


def secrets_base(site: Site, node: Node) -> str:
    """Return the parent directory of `secrets/` on a node; assumes a default for nodes that have
    not been probed.
    """
    inventory, facts = site.inventory, site.facts_of(node)
    if inventory.secrets_in == "disk":
        return site.state_dir(node)
    memory = (facts.memory_dir if facts else "") or f"/run/vlaunch-{node.ssh.user or 'root'}"
    return f"{memory}/{inventory.cluster}"


def node_spec(
    site: Site,
    node: Node,
    image: str,
    secrets: Mapping[str, Secret],
    *,
    fingerprinted: str | None = None,
) -> docker.ContainerSpec:
    """Return the container of a node: the agent, which starts Ray unless the inventory disables it.

    `fingerprinted` replaces the secrets' fingerprint when only their names are known.
    """
    inventory = site.inventory
    ray_command: Argv = ()
    if not inventory.ray.off:
        ray_command = (
            ray.start_head(node, inventory) if node.head else ray.start_worker(node, inventory)
        )
    argv = agent_queries.run_agent(
        ray_command,
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
    secrets_hash = fingerprinted or (fingerprint(secrets) if secrets else "")
    return replace(
        spec, labels={"vlaunch.secrets": secrets_hash} if secrets_hash else {}
    ).labelled()


def probe_spec(site: Site, node: Node, argv: Argv) -> docker.ContainerSpec:
    """Return a throw-away container with a node's image, environment, devices and rights, but
    without secrets.
    """
    spec = _spec(site, node, "probe", site.inventory.image, argv, {})
    spec = replace(spec, name=f"{spec.name}-probe", restart="no").labelled()
    # Docker would create missing directories, owned by root.
    excluded = (SECRETS, SERVERS, COMPILED)
    return replace(
        spec, mounts=tuple(mount for mount in spec.mounts if mount.target not in excluded)
    )


def compile_cache_dir(site: Site, node: Node, image: str) -> str:
    """Return the compile cache of an image on a node.

    The cache belongs to the inventory's base image: adding Ray to it does not affect compiled code.
    If a node lacks the base image, another node's is used: `up` ensures that they are equal.
    """
    derived_image = site.image(node, image)
    bases = (
        site.image(identity, site.inventory.image) for identity in (node, *site.observed_nodes)
    )
    names = (
        *(identity.identity for identity in bases if identity),
        derived_image.labels.get(derived.BASE, "") if derived_image else "",
    )
    prefix = next(
        (identity[:12] for identity in names if re.match("[0-9a-f]{12}", identity)), _NO_IMAGE
    )
    return f"{site.cache_dir(node)}/{prefix}"


def _spec(
    site: Site, node: Node, role: docker.Role, image: str, argv: Argv, env: Mapping[str, str]
) -> docker.ContainerSpec:
    """Return the common part of a node's containers, without labels."""
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
        # One device per path in the container; the inventory takes precedence.
        devices=tuple({_container_path(device): device for device in devices}.values()),
        cap_add=tuple(dict.fromkeys((*(("IPC_LOCK",) if rdma else ()), *inventory.cap_add))),
        groups=("video",) if amd else (),
        # ROCm's images need an unconfined seccomp profile for memory mapping (vLLM docs, AMD
        # installation).
        security=("seccomp=unconfined",) if amd else (),
        ulimits={**(_RDMA_ULIMITS if rdma else {}), **inventory.ulimits},
        privileged=inventory.privileged,
        log_driver=inventory.logging.driver or "",
        log_options=log_options(site, node),
    )


def _amd_devices(site: Site, node: Node) -> tuple[str, ...]:
    """Return the driver's device and the render nodes of the selected GPUs, or of all
    (https://rocm.docs.amd.com/projects/install-on-linux/en/latest/how-to/docker.html).

    Without a probe, render nodes are assumed to be numbered from 128, as by the kernel.
    """
    if not node.gpu_ids:
        return ("/dev/kfd", "/dev/dri")
    facts = site.facts_of(node)
    render_minors = dict(enumerate((facts.amd_renders if facts else None) or ()))
    minors = (render_minors.get(int(gpu_id)) or 128 + int(gpu_id) for gpu_id in node.gpu_ids)
    return ("/dev/kfd", *(f"/dev/dri/renderD{minor}" for minor in minors))


def _container_path(device: str) -> str:
    """Return the path of `HOST[:CONTAINER][:rwm]` in the container; CDI names are unchanged."""
    host, _, rest = device.partition(":")
    target = rest.partition(":")[0]
    if not host.startswith("/"):
        return device
    return target if target.startswith("/") else host


def log_options(site: Site, node: Node) -> Mapping[str, str]:
    """Return the options that limit a container's log, for drivers that support them.

    Docker rejects containers with options unknown to the driver (`ValidateLogOpts` in moby).
    """
    logging, facts, container = site.inventory.logging, site.facts_of(node), site.container(node)
    if logging.options is not None:
        return logging.options
    default_driver = (facts.log_driver if facts else "") or (
        container.log_driver if container else ""
    )
    return (
        _LOG_LIMITS
        if (logging.driver or default_driver or "json-file") in ("json-file", "local")
        else {}
    )


def _mounts(site: Site, node: Node, image: str) -> tuple[Mount, ...]:
    directory = site.state_dir(node)
    return (
        Mount(source=f"{directory}/payload", target=PAYLOAD, read_only=True),
        # Memory is empty after a reboot: if Docker created the directory, all secrets would seem
        # to be missing.
        (ExistingMount if site.inventory.secrets_in == "memory" else Mount)(
            source=f"{secrets_base(site, node)}/secrets", target=SECRETS, read_only=True
        ),
        Mount(source=f"{directory}/server", target=SERVERS),
        Mount(source=compile_cache_dir(site, node, image), target=COMPILED),
        Mount(source=node.hf_home, target=node.hf_home),
        *site.inventory.mounts,
    )


def _node_env(site: Site, node: Node) -> dict[str, str]:
    """Return the variables that differ between nodes: Ray copies the driver's environment to
    workers, except for variables that they already have.
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
        # CUDA numbers GPUs by speed; Docker, NVML, and so Ray and vLLM, by PCI address.
        env["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        # Like NCCL, NVSHMEM accepts `=` before interfaces, but not before devices; if its variables
        # are unset, torch copies NCCL's, including the `=` before devices. Without
        # NVSHMEM_ENABLE_NIC_PE_MAPPING, each GPU uses the nearest of these devices.
        env |= {"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": f"={interface}"} if interface else {}
        env |= {"NVSHMEM_HCA_LIST": ",".join(node.hca)} if node.hca else {}
    if interface and accelerator != "cpu" and (node.hca or site.inventory.fabric == "ethernet"):
        # Before 1.21, UCX requires the port of a device.
        devices = (name if ":" in name else f"{name}:1" for name in node.hca)
        env["UCX_NET_DEVICES"] = ",".join((*devices, interface))
    return env


def _ray_env(inventory: Inventory) -> dict[str, str]:
    # RAY_ADDRESS: without it vLLM silently starts a Ray cluster of its own.
    # RAY_AUTH_MODE: since 2.59 Ray enables it on the head, but not on workers, if a token exists.
    # Autoscaler interval: by default `ray status` is up to five seconds old.
    # Worker niceness: the default of 15 gives vLLM less CPU time than anything else on the node.
    # Health checks: a closed port means a dead node after 5 s (default: 15), silence after the
    # default of a minute, since nodes with busy CPUs or disks can be silent for long.
    # Reconnection: workers exit 15 s (default: 60) after losing the head, restart, and rejoin.
    # Memory monitor: it kills ranks while they load, above all where GPUs share the host's memory
    # (vllm issue 15102).
    # Rotation: by default Ray's logs grow to 3 GB, and those of workers without limit
    # (ray/_private/workers/default_worker.py).
    # Process groups: an engine exits with its Ray worker and frees its GPUs (default from 2.57).
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
    """Return a short keyed hash of all secrets, to detect changes without revealing values.

    The key is the cluster's random token, which prevents guessing weak secrets; without a token
    there is no hash yet.
    """
    key = secrets[ray.TOKEN].reveal() if ray.TOKEN in secrets else ""
    if not key:
        return "made-by-the-run"
    text = "\0".join(f"{name}={secrets[name].reveal()}" for name in sorted(secrets))
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()[:12]


def find_drift(site: Site, node: Node) -> tuple[str, ...]:
    """Describe how a node's container differs from the inventory.

    `status` does not fetch secrets and uses the container's own fingerprint, so changed values go
    unnoticed.
    """
    container = site.container(node)
    return tuple(_differences(site, node, container)) if container is not None else ()


def _differences(site: Site, node: Node, container: docker.Container) -> list[str]:
    inventory = site.inventory
    base, image = site.image(node, inventory.image), site.image(node, container.image)
    base_identity = image.labels.get("vlaunch.base") if image else None
    secrets = dict.fromkeys([*inventory.secrets, ray.TOKEN], Secret(""))
    spec = node_spec(
        site,
        node,
        container.image if base_identity else inventory.image,
        secrets,
        fingerprinted=container.labels.get("vlaunch.secrets"),
    )
    differences = []
    if base_identity and (base is None or base_identity != base.identity):
        differences.append(f"{container.image} was not built from the current {inventory.image}")
    if container.spec != spec.hash:
        differences += docker.describe_differences(
            container, spec, image.env if image else _image_env(container, spec)
        )
    return differences


def _image_env(container: docker.Container, spec: docker.ContainerSpec) -> Mapping[str, str]:
    """Return the presumed variables of an unknown image: all that the spec does not set."""
    return {name: value for name, value in container.env.items() if name not in spec.env}
