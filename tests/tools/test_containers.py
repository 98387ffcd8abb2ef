"""The container of a node, and its allowed differences."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from launcher.core.domain import Inventory, Secret
from launcher.tools import containers, docker
from launcher.tools.docker import ContainerSpec
from launcher.tools.docker.docker_output import parse_image
from launcher.tools.host import Address, HostFacts
from launcher.tools.site import Site
from tests import plan_case as case
from tests.cluster_status import OPEN, query_status
from tests.conftest import Load
from tests.containers import container
from tests.simulated import World

FACTS = HostFacts(
    home="/home/ops", addresses=(Address(interface="ens5", ip="10.0.0.11", prefix=24, up=True),)
)
TOKENS = {"RAY_AUTH_TOKEN": Secret("tok")}
SECRETS = {"RAY_AUTH_TOKEN": Secret("token-token"), "HF_TOKEN": Secret("hf_secret")}


def spec(
    inventory: Inventory,
    node: str = "gpu01",
    facts: HostFacts | None = FACTS,
    secrets: dict[str, Secret] | None = None,
) -> ContainerSpec:
    secret_values = SECRETS if secrets is None else secrets
    return containers.node_spec(
        Site(inventory, {node: facts} if facts else {}),
        inventory.node(node),
        inventory.image,
        secret_values,
    )


@pytest.mark.parametrize("extra_yaml", ["", "\nray: none"])
def test_nodes_differ_only_in_their_own_fields(extra_yaml: str, load: Load) -> None:
    """Name, role, command, address: all others are equal by construction, with and without Ray."""
    inventory = load(f"network: {{interface: eth0}}{extra_yaml}")
    first, second = spec(inventory), spec(inventory, "gpu02")
    different = {
        field.name
        for field in fields(ContainerSpec)
        if getattr(first, field.name) != getattr(second, field.name)
    }

    assert different == {"name", "node", "role", "command", "env", "labels"}
    assert {name for name in first.env if first.env[name] != second.env[name]} == {"VLLM_HOST_IP"}


@pytest.mark.parametrize("extra_yaml", ["", "accelerator: cpu", "accelerator: amd"])
def test_no_rdma_without_such_a_fabric(extra_yaml: str, load: Load) -> None:
    """Docker would fail on hosts without it."""
    node_container = spec(load(extra_yaml))

    assert "/dev/infiniband" not in node_container.devices
    assert (node_container.cap_add, node_container.ulimits) == ((), {})


@pytest.mark.parametrize("fabric", ["infiniband", "roce"])
def test_an_rdma_fabric_brings_its_devices_and_locked_memory(fabric: str, load: Load) -> None:
    """On any accelerator."""
    node_container = spec(load(f"network: {{fabric: {fabric}}}"))

    assert (node_container.devices, node_container.cap_add, node_container.ulimits["memlock"]) == (
        ("/dev/infiniband",),
        ("IPC_LOCK",),
        "-1",
    )


EXTRA_SETTINGS = """
devices: [/dev/gdrdrv, "/dev/infiniband:rw", "/dev/other:/dev/kfd", a.com/nic=0, a.com/nic=1]
cap_add: [IPC_LOCK, SYS_PTRACE, SYS_PTRACE]
ulimits: {stack: -1, nofile: 1048576}
"""


def test_additions_of_inventory_and_fabric_are_merged(load: Load) -> None:
    """Devices are unique by path, capabilities and limits by name, and the inventory takes
    precedence.
    """
    node_container = spec(load(f"{EXTRA_SETTINGS}network: {{fabric: roce}}"))

    assert node_container.devices == (
        "/dev/infiniband:rw",
        "/dev/gdrdrv",
        "/dev/other:/dev/kfd",
        "a.com/nic=0",
        "a.com/nic=1",
    )
    assert node_container.cap_add == ("IPC_LOCK", "SYS_PTRACE")
    assert node_container.ulimits == {"memlock": "-1", "stack": "-1", "nofile": "1048576"}
    assert node_container.privileged is False


def test_additions_of_the_inventory_need_no_fabric(load: Load) -> None:
    """They do not replace the accelerator's."""
    cpu, amd = (
        spec(load(f"{EXTRA_SETTINGS}accelerator: cpu")),
        spec(load(f"{EXTRA_SETTINGS}accelerator: amd")),
    )

    assert cpu.devices[:2] == ("/dev/gdrdrv", "/dev/infiniband:rw")
    assert amd.devices[:3] == ("/dev/other:/dev/kfd", "/dev/dri", "/dev/gdrdrv")
    assert cpu.cap_add == ("IPC_LOCK", "SYS_PTRACE")


def test_rights_come_from_the_inventory_only(load: Load) -> None:
    """For serving containers, and for those that measure."""
    inventory = load("privileged: true")
    probe = containers.probe_spec(Site(inventory, {"gpu01": FACTS}), inventory.head, ("a",))

    assert "--privileged" in docker.run((), spec(inventory))
    assert "--privileged" in docker.run((), probe, once=True)
    assert "--privileged" not in docker.run((), spec(load()))


LIMITS = {"max-size": "20m", "max-file": "5"}


@pytest.mark.parametrize(
    ("daemon", "extra_yaml", "driver", "options"),
    [
        ("json-file", "", "", LIMITS),
        ("local", "", "", LIMITS),
        ("", "", "", LIMITS),
        ("journald", "", "", {}),
        ("journald", "logging: {driver: local}", "local", LIMITS),
        ("json-file", "logging: {driver: syslog}", "syslog", {}),
        ("json-file", "logging: {options: {max-size: 1g}}", "", {"max-size": "1g"}),
        ("json-file", "logging: {options: {}}", "", {}),
    ],
)
def test_a_containers_log_is_limited(
    daemon: str, extra_yaml: str, driver: str, options: dict[str, str], load: Load
) -> None:
    """Docker rejects the options for other drivers; the inventory takes precedence."""
    node_container = spec(load(extra_yaml), facts=replace(FACTS, log_driver=daemon))

    assert (node_container.log_driver, node_container.log_options) == (driver, options)


def test_an_unknown_log_driver_is_that_of_the_container(load: Load) -> None:
    """A slow daemon must not cause replacements."""
    inventory = load()
    existing = container(log_driver="journald")

    assert spec(inventory, facts=replace(FACTS, containers=(existing,))).log_options == {}


def test_rays_logs_are_limited_too(load: Load) -> None:
    """Unless the inventory sets the variables."""
    name = "RAY_ROTATION_MAX_BYTES"

    assert spec(load()).env[name] == str(64 << 20)
    assert spec(load(f"env: {{{name}: 1000}}")).env[name] == "1000"


def test_gpus_are_a_device_request_of_the_declared_number(load: Load) -> None:
    """NVIDIA by `--gpus N`, AMD by devices, CPU slots without any."""
    nvidia, amd, cpu = spec(load()), spec(load("accelerator: amd")), spec(load("accelerator: cpu"))

    assert (nvidia.gpus, nvidia.devices, nvidia.groups) == ("8", (), ())
    assert (amd.gpus, amd.devices, amd.groups, amd.security) == (
        "",
        ("/dev/kfd", "/dev/dri"),
        ("video",),
        ("seccomp=unconfined",),
    )
    assert (cpu.gpus, cpu.devices, cpu.groups, cpu.security) == ("", (), (), ())


def test_selected_gpus_are_requested_by_id(load: Load) -> None:
    """NVIDIA GPUs as a quoted CSV value; AMD GPUs by render nodes, numbered from 128 without a
    probe.
    """
    nodes = "nodes: [{host: gpu01, ip: 10.0.0.11, gpus: [4, 5]}]"
    nvidia = spec(load(nodes=nodes))
    amd = load("accelerator: amd", nodes=nodes)
    facts = HostFacts(amd_renders=(128, 136, 144, 152, 160, None))

    argv = docker.run(("docker",), nvidia)
    assert argv[argv.index("--gpus") + 1] == '"device=4,5"'
    assert spec(amd).devices == ("/dev/kfd", "/dev/dri/renderD132", "/dev/dri/renderD133")
    assert spec(amd, facts=facts).devices == (
        "/dev/kfd",
        "/dev/dri/renderD160",
        "/dev/dri/renderD133",
    )


def test_nodes_have_their_own_network_variables(load: Load) -> None:
    """`=` makes NCCL match the exact name; Gloo always does."""
    inventory = load(
        "network: {fabric: infiniband, interface: eth0, hca: [mlx5_0, mlx5_1]}",
        "nodes: [{host: gpu01, ip: 10.0.0.11, gpus: 8}, "
        "{host: gpu02, ip: 10.0.0.12, gpus: 8, network: {interface: ens5, hca: [mlx5_7]}}]",
    )
    first, second = spec(inventory).env, spec(inventory, "gpu02").env

    assert (first["VLLM_HOST_IP"], first["NCCL_SOCKET_IFNAME"], first["GLOO_SOCKET_IFNAME"]) == (
        "10.0.0.11",
        "=eth0",
        "eth0",
    )
    assert first["NCCL_IB_HCA"] == "=mlx5_0,mlx5_1"
    assert (second["VLLM_HOST_IP"], second["NCCL_SOCKET_IFNAME"], second["TP_SOCKET_IFNAME"]) == (
        "10.0.0.12",
        "=ens5",
        "ens5",
    )
    assert second["NCCL_IB_HCA"] == "=mlx5_7"


def test_a_missing_interface_is_the_one_with_the_address(
    load: Load,
) -> None:
    """Without a probe, none is set."""
    assert spec(load()).env["NCCL_SOCKET_IFNAME"] == "=ens5"
    assert "NCCL_SOCKET_IFNAME" not in spec(load(), facts=None).env


def test_the_environment_of_a_node_wins_over_the_clusters_and_over_ours(load: Load) -> None:
    """An explicit NCCL_SOCKET_IFNAME is intended."""
    inventory = load(
        "env: {A: cluster, B: cluster}",
        "nodes: [{host: gpu01, ip: 10.0.0.11, gpus: 8, env: {A: own, NCCL_SOCKET_IFNAME: 'eth9'}}, "
        "{host: gpu02, ip: 10.0.0.12, gpus: 8}]",
    )

    assert (
        spec(inventory).env["A"],
        spec(inventory).env["B"],
        spec(inventory).env["NCCL_SOCKET_IFNAME"],
    ) == (
        "own",
        "cluster",
        "eth9",
    )
    assert spec(inventory, "gpu02").env["A"] == "cluster"


def test_the_environment_of_a_node_overrides_rays(load: Load) -> None:
    """If the inventory may set the variable."""
    inventory = load("env: {RAY_USAGE_STATS_ENABLED: '1'}")

    assert spec(inventory).env["RAY_USAGE_STATS_ENABLED"] == "1"


def test_ray_always_gets_its_address_and_token_mode(load: Load) -> None:
    """Without RAY_ADDRESS vLLM would start its own Ray; without RAY_AUTH_MODE head and workers
    might differ.
    """
    on, off = spec(load()).env, spec(load("ray: {token_auth: false}")).env

    assert on["RAY_ADDRESS"] == off["RAY_ADDRESS"] == "10.0.0.11:6379"
    assert (on["RAY_AUTH_MODE"], on["RAY_AUTH_TOKEN_PATH"]) == (
        "token",
        "/run/vlaunch/secrets/RAY_AUTH_TOKEN",
    )
    assert (off["RAY_AUTH_MODE"], "RAY_AUTH_TOKEN_PATH" in off) == ("disabled", False)


def test_secrets_are_paths_in_the_environment_and_never_values(load: Load) -> None:
    """Nor in labels or the command."""
    node_container = spec(load("secrets: {HF_TOKEN: {env: HF_TOKEN}}"))

    assert node_container.env["HF_TOKEN_PATH"] == "/run/vlaunch/secrets/HF_TOKEN"
    assert not any(secret.reveal() in repr(node_container) for secret in SECRETS.values())
    assert {mount.target: mount.read_only for mount in node_container.mounts}[
        "/run/vlaunch/secrets"
    ] is True


def test_the_cache_and_the_inventorys_mounts_are_mounted(load: Load) -> None:
    """The cache is writable, node programs are not."""
    node_container = spec(
        load("hf_home: /models/hf\nmounts: [{source: /a, target: /b, read_only: true}]")
    )

    assert [(mount.source, mount.target, mount.read_only) for mount in node_container.mounts] == [
        ("/home/ops/.vlaunch/c/payload", "/opt/vlaunch", True),
        ("/home/ops/.vlaunch/c/secrets", "/run/vlaunch/secrets", True),
        ("/home/ops/.vlaunch/c/server", "/var/lib/vlaunch", False),
        ("/home/ops/.vlaunch/cache/c/made-for-the-image", "/var/cache/vlaunch", False),
        ("/models/hf", "/models/hf", False),
        ("/a", "/b", True),
    ]
    assert node_container.env["HF_HOME"] == "/models/hf"


def _image(identity: str, **labels: str) -> docker.Image:
    return docker.Image(
        id="sha256:1", identity=identity, digests=(), architecture="amd64", labels=labels
    )


def test_images_have_separate_compile_caches(load: Load) -> None:
    """By the inventory's image, independent of its derived one."""
    inventory = load("cache_dir: /nvme")
    base, derived = "a" * 64, _image("c" * 64, **{"vlaunch.base": "a" * 64})

    def folder(images: dict[str, docker.Image | None], image: str) -> str:
        site = Site(inventory, {"gpu01": replace(FACTS, images=images)})
        return containers.compile_cache_dir(site, inventory.head, image)

    same = folder({inventory.image: _image(base)}, inventory.image)
    assert same == "/nvme/c/aaaaaaaaaaaa"
    assert folder({inventory.image: _image(base), "made:1": derived}, "made:1") == same
    assert folder({"made:1": derived}, "made:1") == same
    assert folder({inventory.image: _image("b" * 64)}, inventory.image) == "/nvme/c/bbbbbbbbbbbb"
    assert folder({}, inventory.image) == "/nvme/c/made-for-the-image"


def test_all_compilers_use_the_cache(load: Load) -> None:
    """At the same path in all containers, unless the inventory overrides it."""
    env = spec(load("env: {TRITON_CACHE_DIR: /mine}")).env
    places = {name: value for name, value in env.items() if "/var/cache/vlaunch/" in value}

    assert places["VLLM_CACHE_ROOT"] == "/var/cache/vlaunch/vllm"
    assert len(places) == len(set(places.values())) == 6
    assert env["TRITON_CACHE_DIR"] == "/mine"


def test_the_first_process_is_the_agent(load: Load) -> None:
    """It connects to the head, and starts Ray if enabled; the head's is the leader."""
    inventory = load("ports: {group: 7000}")
    head, worker = spec(inventory).command, spec(inventory, "gpu02").command
    ours = ("/opt/vlaunch/entry.sh", "agent", "--node")
    at = ("--head", "10.0.0.11", "--port", "7000")

    assert head[: head.index("--")] == (
        *(*ours, "gpu01", *at),
        *("--lead", "--metrics-port", "29580", "--private-shm"),
    )
    assert worker[: worker.index("--")] == (*ours, "gpu02", *at, "--private-shm")
    assert head[head.index("--") + 1 :][:3] == ("ray", "start", "--head")
    assert worker[worker.index("--") + 1 :][:3] == ("ray", "start", "--block")
    assert spec(inventory).restart == "always"


def test_a_cluster_without_ray(load: Load) -> None:
    """It has only the agents and their secret."""
    inventory = load("ray: none\nshm: host")
    node_container = spec(inventory)

    assert node_container.command[-7:] == (
        *("--head", "10.0.0.11", "--port", str(inventory.ports.group)),
        *("--lead", "--metrics-port", "29580"),
    )
    assert not [name for name in node_container.env if "RAY" in name]
    assert {mount.target for mount in node_container.mounts} >= {
        "/run/vlaunch/secrets",
        "/var/lib/vlaunch",
    }


def test_rays_memory_monitor_is_off_by_default(load: Load) -> None:
    """It kills ranks while they load."""
    name = "RAY_memory_monitor_refresh_ms"

    assert spec(load()).env[name] == "0"
    assert spec(load(f"env: {{{name}: '250'}}")).env[name] == "250"


def test_the_fingerprint_changes_with_every_secret_and_with_its_name() -> None:
    """A container with an old value must be recreated."""
    base = containers.fingerprint(SECRETS)
    others = [
        {**SECRETS, "HF_TOKEN": Secret("hf_other")},
        {**SECRETS, "RAY_AUTH_TOKEN": Secret("other")},
        {**SECRETS, "EXTRA": Secret("")},
        {"RAY_AUTH_TOKEN": SECRETS["RAY_AUTH_TOKEN"]},
        {"RAY_AUTH_TOKEN": SECRETS["RAY_AUTH_TOKEN"], "TOKEN_HF": SECRETS["HF_TOKEN"]},
    ]

    assert len({base, *(containers.fingerprint(values) for values in others)}) == len(others) + 1
    assert containers.fingerprint(dict(reversed(SECRETS.items()))) == base


def test_the_fingerprint_cannot_be_guessed_without_the_token() -> None:
    """Two clusters with the same weak secret have different fingerprints: the key is the cluster's
    own random token.
    """
    weak = {"API_KEY": Secret("1234")}

    assert containers.fingerprint(
        {**weak, "RAY_AUTH_TOKEN": Secret("a" * 64)}
    ) != containers.fingerprint({**weak, "RAY_AUTH_TOKEN": Secret("b" * 64)})


def test_a_spec_carries_its_own_hash(load: Load) -> None:
    """The label is the only state."""
    node_container = spec(load())

    assert (
        node_container.labels["vlaunch.spec"]
        == node_container.hash
        == replace(node_container, labels=dict(node_container.labels)).hash
    )


def test_a_probe_has_the_rights_of_a_node_and_no_secret(load: Load) -> None:
    """Checks run with the servers' rights; a temporary container leaves no traces."""
    inventory = load(f"{EXTRA_SETTINGS}network: {{fabric: roce}}")
    node = inventory.head
    own = spec(inventory)
    probe = containers.probe_spec(Site(inventory, {node.name: FACTS}), node, ("a",))

    assert (probe.devices, probe.cap_add, probe.ulimits) == (own.devices, own.cap_add, own.ulimits)
    assert (probe.gpus, probe.shm, probe.image) == (own.gpus, own.shm, own.image)
    assert set(probe.env.items()) < set(own.env.items())
    assert {mount.target for mount in own.mounts} - {mount.target for mount in probe.mounts} == {
        "/run/vlaunch/secrets",
        "/var/cache/vlaunch",
        "/var/lib/vlaunch",
    }
    argv = docker.run(node.docker, probe, once=True)
    assert argv[3:6] == ("once", "vlaunch-c-gpu01-probe", "--interactive")
    assert not {"--detach", "--restart"} & set(argv)


ON_INFINIBAND = "network: {fabric: infiniband, interface: eth0, hca: [mlx5_0, 'mlx5_1:2']}"
LIBRARIES = ("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "NVSHMEM_HCA_LIST", "UCX_NET_DEVICES")


@pytest.mark.parametrize(
    ("extra_yaml", "expected"),
    [
        (ON_INFINIBAND, ("=eth0", "mlx5_0,mlx5_1:2", "mlx5_0:1,mlx5_1:2,eth0")),
        (f"accelerator: amd\n{ON_INFINIBAND}", (None, None, "mlx5_0:1,mlx5_1:2,eth0")),
        ("network: {interface: eth0}", ("=eth0", None, "eth0")),
        ("network: {fabric: roce, interface: eth0}", ("=eth0", None, None)),
        ("accelerator: cpu\nnetwork: {interface: eth0}", (None, None, None)),
        (
            f"env: {{NVSHMEM_HCA_LIST: 'mlx5_7:1', UCX_NET_DEVICES: all}}\n{ON_INFINIBAND}",
            ("=eth0", "mlx5_7:1", "all"),
        ),
    ],
    ids=["infiniband", "amd", "ethernet", "roce, any device", "cpu", "own"],
)
def test_nvshmem_and_ucx_get_the_network_choice_of_nccl(
    extra_yaml: str, expected: tuple[str | None, ...], load: Load
) -> None:
    """In their own formats. UCX is not limited to the interface if NCCL chooses the devices, and
    the inventory takes precedence.
    """
    env = spec(load(extra_yaml)).env

    assert tuple(env.get(name) for name in LIBRARIES) == expected


def test_gpus_are_numbered_by_pci_address(load: Load) -> None:
    """As in Docker and NVML; without a known interface, no library gets one."""
    env = spec(load(), facts=None).env

    assert env["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert not set(LIBRARIES) & set(env)
    assert "CUDA_DEVICE_ORDER" not in spec(load("accelerator: amd")).env


def test_ray_kills_processes_of_its_workers(load: Load) -> None:
    """Even older versions of Ray."""
    assert spec(load()).env["RAY_process_group_cleanup_enabled"] == "1"


def test_drift_is_described(world: World, load: Load) -> None:
    """The inventory's environment differs from the container's."""
    changed = load("env: {A: '1'}")
    status = query_status(world, inventory=changed)

    assert status.nodes[0].drift == ("env A: unset → 1",)
    assert not status.whole


@pytest.mark.parametrize("extra_yaml", ["", OPEN, "ray: none"])
def test_drift_needs_no_values_of_secrets(load: Load, extra_yaml: str) -> None:
    """`status` fetches none: the container's fingerprint replaces them."""
    inventory = load(f"{extra_yaml}\nsecrets: {{HF_TOKEN: {{env: HF_TOKEN}}}}")
    world = World(inventory)
    case.bring_up(inventory, world, {**TOKENS, "HF_TOKEN": Secret("hf")})

    assert [node.drift for node in query_status(world).nodes] == [(), ()]


@pytest.mark.parametrize(
    ("before", "after", "drift"),
    [
        ("", "env: {A: '1'}", "env A: unset → 1"),
        ("env: {A: '1'}", "env: {A: '2'}", "env A: 1 → 2"),
        ("env: {A: '1'}", "", "env A: 1 → unset"),
        (
            "",
            "mounts: ['/models:/models:ro']",
            "devices, capabilities, mounts, limits or logging",
        ),
        (
            "",
            "secrets: {HF_TOKEN: {env: X}}",
            "env HF_TOKEN_PATH: unset → /run/vlaunch/secrets/HF_TOKEN",
        ),
    ],
)
def test_differences_are_described_for_all_nodes(
    load: Load, before: str, after: str, drift: str
) -> None:
    """The inventory was changed after `up`."""
    world = World(load(before))
    case.bring_up(
        world.inventory, world, {**TOKENS, **dict.fromkeys(world.inventory.secrets, Secret("x"))}
    )
    status = query_status(world, inventory=load(after))

    assert [node.drift for node in status.nodes] == [(drift,)] * 2
    assert not status.whole


def test_another_image_is_described_without_its_variables(load: Load) -> None:
    """The variables of an image that is no longer in the inventory are unknown, and not
    differences.
    """
    world = World(load("env: {A: '1'}"))
    case.bring_up(world.inventory, world, TOKENS)
    changed = dataclasses.replace(load("env: {A: '2'}"), image="other:1")

    assert query_status(world, inventory=changed).nodes[0].drift == (
        "image vllm/vllm-openai:v0.32.0 → other:1",
        "env A: 1 → 2",
    )


def test_a_derived_image_is_no_drift(load: Load, tmp_path: Path) -> None:
    """It is identified by its base image."""
    world = World(load())
    context = tmp_path / "context.tar"
    base = world.machines["gpu01"].images[world.inventory.image]
    case.bring_up(world.inventory, world, TOKENS, context)
    derived_tag = next(
        name for name in world.machines["gpu01"].images if name.startswith("vlaunch/")
    )
    image = parse_image(json.dumps([base]))
    assert image is not None
    for machine in world.machines.values():
        machine.images[derived_tag]["Config"]["Labels"]["vlaunch.base"] = image.identity

    assert [node.drift for node in query_status(world).nodes] == [(), ()]
    for machine in world.machines.values():
        machine.images[derived_tag]["Config"]["Labels"]["vlaunch.base"] = "another"
    assert [node.drift for node in query_status(world).nodes] == [
        (f"{derived_tag} was not built from the current {world.inventory.image}",)
    ] * 2
