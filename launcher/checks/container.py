"""What the containers that will serve see: RDMA devices and rights, libraries, and the versions of
Ray and Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launcher.checks.consistency import alike
from launcher.checks.host import no_rdma
from launcher.checks.shape import Check, Evidence, Finding, Host, Judge, failed, passed, skipped
from launcher.tools import untrusted
from launcher.tools.inside import Inside


def _looked(evidence: Evidence) -> tuple[dict[str, Inside], list[Finding]]:
    """Return what is known of each node's container, and a SKIP with its reason for the others."""
    found, gaps = dict[str, Inside](), list[Finding]()
    for host in evidence.reached:
        inside = evidence.inside.get(host.name)
        if inside is None:
            why = evidence.inside_missing.get(host.name) or _why_not(host)
            gaps.append(skipped(host, why))
        elif inside.error:
            error = untrusted.shown(inside.error.strip().splitlines()[-1])
            gaps.append(skipped(host, f"a container could not be looked into: {error}"))
        else:
            found[host.name] = inside
    return found, gaps


def _why_not(host: Host) -> str:
    if host.facts.images.get(host.inventory.image) is None:
        return "the image is not on this node yet: run `vlaunch up`"
    return "no container was looked into"


def _inside(judge: Callable[[str, Inside], Finding]) -> Judge:
    def all_nodes(evidence: Evidence) -> Sequence[Finding]:
        found, gaps = _looked(evidence)
        return [*gaps, *(judge(name, inside) for name, inside in found.items())]

    return all_nodes


def _devices(name: str, inside: Inside) -> Finding:
    if inside.infiniband:
        return passed(name, f"/dev/infiniband has {len(inside.infiniband)} devices")
    return failed(
        name,
        "the container has no /dev/infiniband",
        fix=f"load the drivers on {name} (`sudo modprobe mlx5_ib ib_uverbs`), then {_ANEW}",
    )


def _memlock(name: str, inside: Inside) -> Finding:
    if inside.memlock_unlimited:
        return passed(name, "memory may be locked without limit")
    if inside.memlock is None:
        return skipped(name, "the container's limit on locked memory is not known")
    return failed(
        name,
        f"the container may lock {inside.memlock // 1024} KiB of memory only",
        fix=(
            f"on {name}: `sudo systemctl edit docker`, add `[Service]` with"
            f" `LimitMEMLOCK=infinity`, `sudo systemctl restart docker`, then {_ANEW}"
        ),
    )


def _ipc_lock(name: str, inside: Inside) -> Finding:
    if not inside.capabilities:
        return skipped(name, "the container's capabilities are not known")
    if "IPC_LOCK" in {each.upper().removeprefix("CAP_") for each in inside.capabilities}:
        return passed(name, "the container has IPC_LOCK")
    return failed(
        name,
        "the container lacks the capability IPC_LOCK",
        fix=f"{_ANEW}, which starts it with `--cap-add IPC_LOCK`",
    )


def _libibverbs(name: str, inside: Inside) -> Finding:
    if inside.libibverbs:
        return passed(name, inside.libibverbs)
    return failed(
        name,
        "the image has no libibverbs.so.1",
        fix=(
            "use an image that has it: `RUN apt-get install -y libibverbs1 ibverbs-providers` in a"
            " Dockerfile from this one"
        ),
    )


_ANEW = "run `vlaunch down` and `vlaunch up`"


def _ray(evidence: Evidence) -> Sequence[Finding]:
    found, gaps = _looked(evidence)
    versions = {name: inside.ray for name, inside in found.items() if inside.ray}
    gaps += [
        skipped(name, f"the image has no Ray; `vlaunch up` adds {evidence.inventory.ray.version}")
        for name in found
        if name not in versions
    ]

    def differs(name: str, version: str, common: str, others: str) -> Finding:
        return _other(name, f"Ray {version}, while {others} has {common}")

    return [*gaps, *alike(versions, differs, shown=lambda version: f"Ray {version}")]


def _python(evidence: Evidence) -> Sequence[Finding]:
    found, gaps = _looked(evidence)
    versions = {name: inside.python for name, inside in found.items() if inside.python}
    gaps += [
        skipped(name, "the container did not tell its Python")
        for name in found
        if name not in versions
    ]

    def differs(name: str, version: str, common: str, others: str) -> Finding:
        return _other(name, f"Python {version}, while {others} has {common}")

    return [*gaps, *alike(versions, differs, shown=lambda version: f"Python {version}")]


def _other(name: str, text: str) -> Finding:
    return failed(
        name,
        text,
        fix=f"remove the image on {name} with `docker rmi --force` and run `vlaunch up` again",
    )


VERSIONS = (
    Check(
        id="ray-version",
        what="the containers have one version of Ray",
        why="Ray lets no node join whose version differs",
        judge=_ray,
        group="image",
        needs=("docker",),
    ),
    Check(
        id="python-version",
        what="the containers have one version of Python",
        why="Ray lets no node join whose Python differs, for pickled functions would not be read",
        judge=_python,
        group="image",
        needs=("docker",),
    ),
)
CHECKS = (
    Check(
        id="rdma-container",
        what="the containers have the RDMA devices",
        why="without /dev/infiniband in the container NCCL uses TCP and does not say so",
        judge=_inside(_devices),
        group="rdma",
        skip_reason=no_rdma,
        needs=("docker", "rdma-devices"),
    ),
    Check(
        id="memlock",
        what="the containers may lock memory without limit",
        why="RDMA registers memory by locking it: `ibv_reg_mr … Cannot allocate memory` otherwise",
        judge=_inside(_memlock),
        group="rdma",
        skip_reason=no_rdma,
        needs=("docker",),
    ),
    Check(
        id="ipc-lock",
        what="the containers have the capability IPC_LOCK",
        why="NCCL ends with an unhandled system error at its start without it, and gives no reason",
        judge=_inside(_ipc_lock),
        group="rdma",
        skip_reason=no_rdma,
        needs=("docker",),
    ),
    Check(
        id="libibverbs",
        what="the image has libibverbs",
        why="NCCL loads it at run time, and uses TCP where it is not there",
        judge=_inside(_libibverbs),
        group="rdma",
        skip_reason=no_rdma,
        needs=("docker",),
    ),
    *VERSIONS,
)
