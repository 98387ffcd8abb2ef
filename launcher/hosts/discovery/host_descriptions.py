"""Descriptions of hosts: one line for the most common configuration, and one per deviation."""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from launcher.core import untrusted
from launcher.core.domain import Accelerator, fold
from launcher.hosts.discovery.shape import ScannedHost
from launcher.tools.host import DEADLINE

T = TypeVar("T", bound=Hashable)


def group_names(entries: Iterable[tuple[T, str]]) -> dict[T, list[str]]:
    """Group host names by key."""
    groups: dict[T, list[str]] = {}
    for key, name in entries:
        groups.setdefault(key, []).append(name)
    return groups


def annotate_hosts(
    entries: Iterable[tuple[str, str]], hosts: Sequence[ScannedHost]
) -> tuple[str, ...]:
    """Return each text once, with its hosts unless it applies to all."""
    return tuple(text + host_suffix(names, hosts) for text, names in group_names(entries).items())


def host_suffix(names: Sequence[str], hosts: Sequence[ScannedHost]) -> str:
    """Return ` (on gpu[01-03])`, or an empty string for all hosts."""
    return "" if len(names) == len(hosts) else f" (on {fold(list(names))})"


def format_bytes(count: int) -> str:
    """Format bytes: `81 GiB`, `1.5 TiB`."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    is_whole = value >= 10 or units[0] == "B"
    return f"{value:.0f} {units[0]}" if is_whole else f"{value:.1f} {units[0]}"


def describe_hosts(hosts: Sequence[ScannedHost], kind: Accelerator) -> tuple[str, ...]:
    """Return `gpu[01-03]: …` for most hosts and `gpu04: differs: …` for each other one."""
    groups = group_names((_host_parts(host, kind), host.name) for host in hosts)
    common = max(groups, key=lambda parts: len(groups[parts]))
    lines = [f"{fold(groups[common])}: {', '.join(part for part in common if part)}"]
    for parts, names in groups.items():
        differing = [
            part or f"not {common_value}"
            for part, common_value in zip(parts, common, strict=True)
            if part != common_value
        ]
        if differing:
            lines.append(f"{fold(names)}: differs: {', '.join(differing)}")
    return tuple(lines)


def health_warnings(hosts: Sequence[ScannedHost]) -> list[str]:
    """Return the problems on hosts that `vlaunch check` will report."""
    unresponsive = [
        (_docker_problem(host), host.name) for host in hosts if host.facts.docker_version is None
    ]
    lost_gpus = [
        (f"the driver has lost a GPU ({host.facts.lost_gpus[0]}): reboot", host.name)
        for host in hosts
        if host.facts.lost_gpus
    ]
    return [
        f"{fold(names)}: {text}" for text, names in group_names([*unresponsive, *lost_gpus]).items()
    ]


def _docker_problem(host: ScannedHost) -> str:
    facts, command = host.facts, " ".join(host.docker)
    if facts.podman:
        return f"`{command}` is Podman, not Docker"
    if "docker" in facts.timed_out_parts:
        return f"`{command} version` did not answer within {DEADLINE} s"
    last_line = (facts.part_errors.get("docker", "").strip() or "no message").splitlines()[-1]
    return f"Docker does not answer: {untrusted.excerpt(last_line)}"


def _host_parts(host: ScannedHost, kind: Accelerator) -> tuple[str, ...]:
    facts, survey = host.facts, host.survey
    drivers = sorted({gpu.driver for gpu in facts.gpus or ()})
    ports = [port for device in survey.rdma for port in device.ports]
    active = sum(port.state == "ACTIVE" for port in ports)
    models = ", ".join(sorted({device.model for device in survey.rdma if device.model}))
    numa = survey.numa_nodes or 0
    kernel = survey.kernel and f"kernel {survey.kernel}"
    return (
        _describe_gpus(host, kind),
        f"driver {' and '.join(drivers)}" if drivers and kind == "nvidia" else "",
        f"{survey.cpus} CPUs" + f" in {numa} NUMA nodes" * (numa > 1) if survey.cpus else "",
        # Rounded: the memory reserved by firmware differs between boards.
        f"{format_bytes(survey.memory)} memory" if survey.memory else "",
        f"{active} of {len(ports)} RDMA ports ACTIVE" + f" ({models})" * bool(models)
        if ports
        else "",
        f"Docker {facts.docker_version}" if facts.docker_version else "no Docker",
        ", ".join(filter(None, (survey.system, kernel))),
    )


def _describe_gpus(host: ScannedHost, kind: Accelerator) -> str:
    if kind == "amd":
        return f"{host.amd_gpus} × AMD GPU"
    if kind == "cpu":
        return ""
    kinds = Counter((gpu.name, gpu.memory_total) for gpu in host.facts.gpus or ())
    return " + ".join(
        f"{count} × {name}, "
        + (format_bytes(memory * 2**20) if memory else "memory shared with the host")
        for (name, memory), count in kinds.items()
    )
