"""Hosts in words: one line for what most of them are, and one for each that differs, with what
differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from launcher.discovery.shape import Probed
from launcher.model import Accelerator, fold
from launcher.tools import untrusted
from launcher.tools.host import DEADLINE


def describe(hosts: Sequence[Probed], order: Sequence[str], kind: Accelerator) -> tuple[str, ...]:
    """Return `gpu[01-03]: …` for what is most common and `gpu04: differs: …` for the rest, hosts in
    order.
    """
    told: dict[tuple[str, ...], list[str]] = {}
    for host, name in zip(hosts, order, strict=True):
        told.setdefault(tuple(part(host, kind) for part in _PARTS), []).append(name)
    usual = max(told, key=lambda parts: len(told[parts]))
    lines = [f"{fold(told[usual])}: {', '.join(part for part in usual if part)}"]
    for parts, names in told.items():
        if parts != usual:
            other = [
                part or f"not {usually}"
                for part, usually in zip(parts, usual, strict=True)
                if part != usually
            ]
            lines.append(f"{fold(names)}: differs: {', '.join(other)}")
    return tuple(lines)


def health(hosts: Sequence[Probed], order: Sequence[str]) -> list[str]:
    """Return what `vlaunch check` will find on hosts, as far as it shows already."""
    wrong: dict[str, list[str]] = {}
    for host, name in zip(hosts, order, strict=True):
        if host.facts.docker_version is None:
            wrong.setdefault(_silence(host), []).append(name)
        if host.facts.lost_gpus:
            text = f"the driver has lost a GPU ({host.facts.lost_gpus[0]}): reboot"
            wrong.setdefault(text, []).append(name)
    return [f"{fold(names)}: {text}" for text, names in wrong.items()]


def _silence(host: Probed) -> str:
    facts, command = host.facts, " ".join(host.docker)
    if facts.podman:
        return f"`{command}` is Podman here, not Docker"
    if "docker" in facts.late:
        return f"`{command} version` did not answer within {DEADLINE} s"
    words = (facts.said.get("docker", "").strip() or "it is not there").splitlines()[-1]
    return f"Docker does not answer: {untrusted.shown(words)}"


def on_some(names: Sequence[str], order: Sequence[str]) -> str:
    """Return ` (on gpu[01-03])` behind what only some hosts have; empty for what all have."""
    return "" if len(names) == len(order) else f" (on {fold(list(names))})"


def size_of(count: int) -> str:
    """Write bytes as people do: `81 GiB`, `1.5 TiB`."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return (
        f"{value:.0f} {units[0]}" if value >= 10 or units[0] == "B" else f"{value:.1f} {units[0]}"
    )


def _gpus(host: Probed, kind: Accelerator) -> str:
    if kind == "amd":
        return f"{host.amd_gpus} × AMD GPU"
    if kind == "cpu":
        return ""
    kinds: dict[tuple[str, int], int] = {}
    for gpu in host.facts.gpus or ():
        kinds[gpu.name, gpu.memory_total] = kinds.get((gpu.name, gpu.memory_total), 0) + 1
    return " + ".join(
        f"{count} × {name}, {size_of(memory * 2**20) if memory else 'memory shared with the host'}"
        for (name, memory), count in kinds.items()
    )


def _driver(host: Probed, kind: Accelerator) -> str:
    drivers = sorted({gpu.driver for gpu in host.facts.gpus or ()})
    return f"driver {' and '.join(drivers)}" if drivers and kind == "nvidia" else ""


def _cpus(host: Probed, kind: Accelerator) -> str:
    if not host.survey.cpus:
        return ""
    numa = host.survey.numa_nodes or 0
    return f"{host.survey.cpus} CPUs" + (f" in {numa} NUMA nodes" if numa > 1 else "")


def _memory(host: Probed, kind: Accelerator) -> str:
    # Rounded: what firmware keeps for itself differs by a little from board to board.
    return f"{size_of(host.survey.memory)} memory" if host.survey.memory else ""


def _rdma(host: Probed, kind: Accelerator) -> str:
    ports = [port for device in host.survey.rdma for port in device.ports]
    active = sum(port.state == "ACTIVE" for port in ports)
    models = sorted({device.model for device in host.survey.rdma if device.model})
    named = f" ({', '.join(models)})" if models else ""
    return f"{active} of {len(ports)} RDMA ports ACTIVE{named}" if ports else ""


def _system(host: Probed, kind: Accelerator) -> str:
    kernel = host.survey.kernel and f"kernel {host.survey.kernel}"
    return ", ".join(filter(None, (host.survey.system, kernel)))


def _docker(host: Probed, kind: Accelerator) -> str:
    return f"Docker {host.facts.docker_version}" if host.facts.docker_version else "no Docker"


_PARTS: tuple[Callable[[Probed, Accelerator], str], ...] = (
    _gpus,
    _driver,
    _cpus,
    _memory,
    _rdma,
    _docker,
    _system,
)
