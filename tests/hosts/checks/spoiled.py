"""A healthy cluster of three nodes, and cases with one fault and its expected findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Any

from launcher.core import expectations_file
from launcher.core.check import Finding
from launcher.core.domain import Inventory
from launcher.hosts.check import Evidence, HubAccess
from launcher.hosts.checks.catalogue import run_checks
from launcher.hosts.container_view import ContainerView
from launcher.hosts.pairs import PortProbe
from launcher.inventory.load import loads
from launcher.tools.compile_cache import CompileCache
from launcher.tools.docker import Image
from launcher.tools.host import Address, Gpu, HostFacts, StateDir
from launcher.tools.host.survey import (
    Gid,
    GpuState,
    Lookup,
    Nic,
    NvlinkFabric,
    RdmaDevice,
    RdmaPort,
    Survey,
)

NODES = ("gpu01", "gpu02", "gpu03")
IPS = dict(zip(NODES, ("10.0.0.11", "10.0.0.12", "10.0.0.13"), strict=True))
IMAGE = "vllm/vllm-openai:v0.32.0"
MODEL = "org/model"
FILES = {"config.json": 700, "model.safetensors": 5_000_000_000}
GPU = Gpu(
    index=0,
    name="NVIDIA H100 80GB HBM3",
    memory_total=81559,
    memory_used=0,
    driver="580.95.05",
    uuid="GPU-0",
)
GIDS = (
    Gid(index=1, value="fe80:0000:0000:0000:0000:0000:0000:0001", kind="RoCE v2", netdev="ens1"),
    Gid(index=2, value="0000:0000:0000:0000:0000:ffff:0a01:0001", kind="IB/RoCE v1", netdev="ens1"),
    Gid(index=3, value="0000:0000:0000:0000:0000:ffff:0a01:0001", kind="RoCE v2", netdev="ens1"),
)
PORT = RdmaPort(
    number=1, state="ACTIVE", physical="LinkUp", rate=400, link_layer="Ethernet", gids=GIDS
)
HCA = RdmaDevice(name="mlx5_0", ports=(PORT,), model="MT4129", netdevs=("ens1",))
ETH0 = Nic(name="eth0", up=True, mtu=1500, speed=25000, physical=True)
ROCE = "network: {fabric: roce, hca: [mlx5_0]}"


def inventory(extra: str = ROCE, own: Mapping[str, str] | None = None, count: int = 3) -> Inventory:
    """Load an inventory of the nodes; `own` has further keys of single nodes, in flow style."""
    nodes = ", ".join(
        f"{{host: {name}, ip: {IPS[name]}, gpus: 2{(own or {}).get(name, '')}}}"
        for name in NODES[:count]
    )
    return loads(f"cluster: c\nimage: {IMAGE}\n{extra}\nnodes: [{nodes}]\n", Path("inventory.yaml"))


def survey(**changed: Any) -> Survey:
    """Return a healthy node's survey, with changes."""
    good = Survey(
        port_range=(32768, 60999),
        machine="x86_64",
        kernel="6.8.0-50-generic",
        uid=1000,
        memory=1 << 40,
        shm=1 << 39,
        shm_free=1 << 39,
        skew=0.1,
        synced=True,
        own_names=("10.0.0.1",),
        lookups=(
            Lookup(kind="reverse", subject="10.0.0.12", seconds=0.002),
            Lookup(kind="forward", subject="gpu02", seconds=0.002),
            Lookup(kind="own", subject="gpu01", seconds=0.001),
        ),
        resolver_lines=("nameserver 10.0.0.1", "hosts: files dns"),
        nics=(ETH0, Nic(name="ens1", up=True, mtu=9000, speed=400000)),
        rdma=(HCA,),
        gpus=(GpuState(index=0, ecc_errors=0), GpuState(index=1, ecc_errors=0)),
        nvlink=NvlinkFabric(service="inactive"),
        xid=(),
        modules=("nvidia", "nvidia_peermem"),
        docker_storage="overlay2",
        docker_cgroup="cgroupfs v1",
        remove_ipc=True,
        linger=True,
        next_kernel="6.8.0-51-generic",
        next_kernel_has_driver=True,
    )
    return replace(good, **changed)


def facts(name: str, **changed: Any) -> HostFacts:
    """Return the facts of a healthy node, with changes."""
    image = Image(
        id="sha256:0123456789abcdef",
        identity="same",
        digests=(),
        architecture="amd64",
        labels={},
        env={"CUDA_VERSION": "13.0.3"},
    )
    good = HostFacts(
        user="ops",
        hostname=name,
        listening=frozenset({("0.0.0.0", 22)}),
        disk_free=1 << 40,
        docker_disk_free=1 << 40,
        addresses=(
            Address(interface="lo", ip="127.0.0.1", prefix=8, up=True),
            Address(interface="eth0", ip=IPS[name], prefix=24, up=True),
            Address(interface="ens1", ip=f"10.1.0.{NODES.index(name) + 1}", prefix=24, up=True),
        ),
        infiniband=("uverbs0",),
        gpus=(GPU, replace(GPU, index=1, uuid="GPU-1")),
        gpu_processes=(),
        docker_version="28.3.0",
        runtimes=("nvidia", "runc"),
        state=StateDir(writable=True, read_only=False, free=1 << 40),
        images={IMAGE: image},
        compile_cache=CompileCache(kind="xfs"),
        survey=survey(),
    )
    return replace(good, **changed)


def inside(**changed: Any) -> ContainerView:
    """Return a healthy container's view, with changes."""
    good = ContainerView(
        memlock_unlimited=True,
        ipc_lock=True,
        infiniband=("uverbs0",),
        libibverbs="/usr/lib/libibverbs.so.1",
        python="3.12.3",
        ray="2.60.0",
        vllm="0.32.0",
    )
    return replace(good, **changed)


def port_probe(source: str, target: str, **changed: Any) -> PortProbe:
    """Return a healthy node's port probe, with changes."""
    good = PortProbe(
        source=source,
        target=target,
        ports={6379: "open", 43210: "open"},
        bulk=True,
        largest=1500,
        mtu=1500,
    )
    return replace(good, **changed)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One fault. `red` has the status of every affected node, `also` further failing checks. `text`
    and `fix` are parts of the findings. `facts`, `survey`, `inside` and `files` change single nodes
    (`*`: all), `port_probes` single directions, `evidence` all of it.
    """

    id: str
    red: Mapping[str, str]
    text: str
    fix: str
    extra: str = ROCE
    own: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    survey: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    inside: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: Mapping[str, Mapping[str, int] | None] = field(default_factory=dict)
    port_probes: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)
    evidence: Mapping[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()

    def build_evidence(self) -> Evidence:
        """Return the evidence with the fault."""
        existing = {
            name: facts(
                name, **{"survey": survey(**_of(self.survey, name)), **_of(self.facts, name)}
            )
            for name in NODES
        }
        whole: dict[str, Any] = {
            "inventory": inventory(self.extra, self.own),
            "facts": existing,
            "inside": {name: inside(**_of(self.inside, name)) for name in NODES},
            "port_probes": tuple(
                port_probe(*pair, **self.port_probes.get(pair, {}))
                for pair in permutations(NODES, 2)
            ),
            "files": {name: self.files.get(name, FILES) for name in NODES},
            "model": MODEL,
            "hub": HubAccess(status="ok"),
            "expectations": expectations_file.load_expectations(),
            **self.evidence,
        }
        return Evidence(**whole)


def _of(changes: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Any]:
    return {**changes.get("*", {}), **changes.get(name, {})}


def findings(case: Case, id_: str | None = None) -> tuple[Finding, ...]:
    """Run one check, the case's own by default."""
    (result,) = run_checks(case.build_evidence(), ids=[id_ or case.id])
    return result.findings


def turns_red(case: Case) -> None:
    """Assert that only this check fails, on the expected nodes, with text and fix."""
    results = {result.check.id: result for result in run_checks(case.build_evidence())}
    red = [finding for finding in results[case.id].findings if finding.status in ("fail", "warn")]

    assert {finding.node: finding.status for finding in red} == case.red, results[case.id].findings
    for finding in red:
        assert case.text in finding.text, finding.text
        assert case.fix in finding.fix, finding.fix
        assert not finding.text.endswith(".")
        assert not finding.fix.endswith(".")
    others = [
        id_
        for id_, result in results.items()
        if result.status in ("fail", "warn") and id_ != case.id
    ]
    assert sorted(others) == sorted(case.also)


def stays_unknown(case: Case, reason: str) -> None:
    """Assert that a check is skipped with its reason, and no check fails."""
    texts = {finding.status: finding.text for finding in findings(case)}

    assert "fail" not in texts
    assert reason in texts["skip"]


def named(case: object) -> str:
    """Return a readable test ID for a case; none for other parameters."""
    return f"{case.id}: {case.text}"[:70] if isinstance(case, Case) else ""


HEALTHY = Case(id="ssh", red={}, text="", fix="")
