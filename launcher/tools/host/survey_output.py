"""Parser for the survey in a probe's output; missing or invalid parts leave fields unknown."""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

from launcher.core import untrusted
from launcher.core.domain import natural_key
from launcher.tools.host import gpu_survey
from launcher.tools.host.parts import Parts
from launcher.tools.host.survey import Gid, Lookup, Nic, RdmaDevice, RdmaPort, Survey

_NUMBER = r"\d{1,12}(?:\.\d+)?"
_LOOKUP = re.compile(
    # BusyBox's `date` has no fractions of seconds, and prints `%N` literally.
    rf"(?P<kind>reverse|forward|own) (?P<what>\S{{1,255}}) (?P<begin>{_NUMBER})\S*"
    rf" (?P<end>{_NUMBER})\S* (?P<status>\d{{1,3}}) (?P<found>.*)",
    re.ASCII,
)
_KINDS = ("reverse", "forward", "own")


def parse_survey(parts: Parts, info: Mapping[str, Any]) -> Survey | None:
    """Parse the survey's parts, and the output of `docker info`; None without a survey."""
    if "clock" not in parts:
        return None
    output, output_if_ok = parts.output, parts.output_if_ok
    system, boot = _parse_pairs(output("system")), _parse_pairs(output("boot"))
    shm, shm_free = _parse_df(output_if_ok("shm") or "")
    cgroup = [str(info[key]) for key in ("CgroupDriver", "CgroupVersion") if info.get(key)]
    names = list(_match_lookups(output("names"))) if output_if_ok("names") is not None else None
    return Survey(
        system=system.get("system", ""),
        machine=system.get("machine", ""),
        kernel=system.get("kernel", ""),
        uid=_parse_int(system.get("uid")),
        cpus=_parse_int(system.get("cpus")),
        numa_nodes=_parse_int(system.get("numa_nodes")),
        memory=_parse_kib(system.get("memory")),
        driver_memory=_parse_kib(system.get("driver_memory")),
        shm=shm,
        shm_free=shm_free,
        skew=_parse_skew(output("clock")),
        synced=_parse_synced(output_if_ok("synced") or ""),
        own_names=_parse_own_names(names or ()),
        lookups=None if names is None else _parse_lookups(names),
        resolver_lines=_parse_resolver_lines(output("names")),
        default_nic=_default_interface(output_if_ok("route")),
        nics=_parse_nics(parts),
        rdma=parse_rdma(output("rdma")),
        # Even if `nvidia-smi` failed: with one GPU lost it still lists the others.
        gpus=gpu_survey.parse_gpu_states(output("gpustate"), output_if_ok("topo") or ""),
        nvlink=parts.parse("fabric", gpu_survey.parse_fabric),
        imex=parts.parse("imex", lambda text: tuple(untrusted.truncate(text).split())),
        xid=parts.parse("xid", lambda text: tuple(untrusted.truncate(text).splitlines())),
        modules=tuple(sorted(set(output("modules").split()))),
        docker_storage=str(info.get("Driver") or ""),
        docker_cgroup=" v".join(cgroup),
        docker_root=str(info.get("DockerRootDir") or ""),
        remove_ipc=parts.parse("logind", _parse_remove_ipc),
        linger={"yes": True, "no": False}.get(_last_value("Linger", output_if_ok("logind"))),
        next_kernel=boot.get("next", ""),
        next_kernel_has_driver={"yes": True, "no": False}.get(boot.get("driver", "")),
        python=system.get("python", "").removeprefix("Python "),
        port_range=_parse_port_range(system.get("port_range", "")),
    )


def _parse_pairs(text: str) -> dict[str, str]:
    rows = (line.partition("=") for line in text.splitlines())
    return {key: value.strip() for key, separator, value in rows if separator}


def _parse_int(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text) else None


def _parse_kib(text: str | None) -> int | None:
    number = _parse_int(text)
    return None if number is None else number * 1024


def _parse_port_range(text: str) -> tuple[int, int] | None:
    low, _, high = text.partition("-")
    first, last = _parse_int(low) or 0, _parse_int(high) or 0
    return (first, last) if 0 < first <= last < 2**16 else None


def _parse_df(text: str) -> tuple[int | None, int | None]:
    fields = text.rsplit("\n", maxsplit=1)[-1].split()
    return (_parse_kib(fields[1]), _parse_kib(fields[3])) if len(fields) > 3 else (None, None)


def _parse_skew(text: str) -> float | None:
    """Parse the launcher's clock as sent, and the node's."""
    match = re.fullmatch(rf"({_NUMBER}) ({_NUMBER})[^\d]*", text.strip(), re.ASCII)
    return float(match[2]) - float(match[1]) if match else None


def _parse_synced(text: str) -> bool | None:
    """Parse `NTPSynchronized=yes` of timedatectl(1), or the `Leap status` line of chronyc(1)."""
    if match := re.search(r"NTPSynchronized=(yes|no)", text):
        return match[1] == "yes"
    if match := re.search(r"Leap status\s*: (.+)", text):
        return match[1].strip() != "Not synchronised"
    return None


def _last_value(key: str, text: str | None) -> str:
    """Return the last value of a key, which takes precedence."""
    values = re.findall(rf"^{key}=(\w+)", text or "", re.MULTILINE)
    return str(values[-1]) if values else ""


def _parse_remove_ipc(text: str) -> bool:
    """Parse `RemoveIPC`, which is yes by default (logind.conf(5))."""
    return _last_value("RemoveIPC", text).lower() in ("", "yes", "true", "1", "on")


def _match_lookups(text: str) -> Iterator[re.Match[str]]:
    """Yield the lines of name lookups."""
    for line in text.splitlines():
        if match := _LOOKUP.fullmatch(f"{line} "):
            yield match


def _parse_lookups(matches: list[re.Match[str]]) -> tuple[Lookup, ...]:
    """Convert matches to lookups, in a fixed order."""
    lookups = (
        Lookup(
            kind=cast("Literal['reverse', 'forward', 'own']", match["kind"]),
            subject=match["what"],
            seconds=max(0.0, float(match["end"]) - float(match["begin"])),
            # timeout(1) exits with 124, or with 137 after SIGKILL
            answered=match["status"] not in ("124", "137"),
        )
        for match in matches
    )
    return tuple(sorted(lookups, key=lambda lookup: (_KINDS.index(lookup.kind), lookup.subject)))


def _parse_own_names(matches: list[re.Match[str]] | tuple[()]) -> tuple[str, ...] | None:
    """Return the addresses of the node's own name; None if the lookup failed.

    getent(1) exits with 2 for an unknown name, which is a valid result without addresses.
    """
    for match in matches:
        addresses = tuple(match["found"].split())
        if match["kind"] == "own" and match["status"] == ("0" if addresses else "2"):
            return addresses
    return None


def _parse_resolver_lines(text: str) -> tuple[str, ...]:
    rows = (" ".join(line.split()) for line in text.splitlines())
    return tuple(row[:200] for row in rows if row.startswith(("nameserver ", "hosts: ")))


def _default_interface(text: str | None) -> str:
    """Return the interface of the default route with the lowest metric, which is 0 if missing."""
    rows = [row for row in _parse_json(text) if isinstance(row.get("dev"), str)]
    rows.sort(key=lambda row: row["metric"] if isinstance(row.get("metric"), int) else 0)
    return rows[0]["dev"] if rows else ""


def _parse_json(text: str | None) -> list[dict[str, Any]]:
    try:
        rows = untrusted.loads(text or "[]")
    except ValueError:
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _parse_nics(parts: Parts) -> tuple[Nic, ...] | None:
    """Parse the kernel's list of links, with details from sysfs."""
    links = _parse_json(parts.output("link"))
    if not links:
        return None
    sysfs = _sysfs_values(parts.output("net"))
    addresses: dict[str, tuple[str, ...]] = {}
    for row in _parse_json(parts.output("addr")):
        infos = [info for info in row.get("addr_info") or () if isinstance(info, dict)]
        addresses[str(row.get("ifname"))] = tuple(
            f"{info['local']}/{info.get('prefixlen')}" for info in infos if "local" in info
        )
    nics = (_make_nic(link, sysfs, addresses) for link in links)
    return tuple(nic for nic in nics if nic is not None)


def _sysfs_values(text: str) -> dict[str, str]:
    """Parse lines `path:value` from sysfs."""
    rows = (line.partition(":") for line in text.splitlines())
    return {path: value.strip() for path, separator, value in rows if separator and "/" in path}


def _make_nic(
    link: Mapping[str, Any], sysfs: Mapping[str, str], addresses: Mapping[str, tuple[str, ...]]
) -> Nic | None:
    """Convert a link to a network card; None if a field is invalid."""
    name, mtu, flags = link.get("ifname"), link.get("mtu"), link.get("flags")
    if not isinstance(name, str) or type(mtu) is not int or not isinstance(flags, list):
        return None
    if not re.fullmatch(r"[^\s/]{1,64}", name) or not 0 <= mtu < 2**31:
        return None
    return Nic(
        name=name,
        # An unplugged port keeps UP, but has NO-CARRIER (ip-link(8)); `operstate` is often UNKNOWN.
        up="UP" in flags and "NO-CARRIER" not in flags,
        mtu=mtu,
        speed=_parse_int(sysfs.get(f"{name}/speed")) or None,
        physical=f"{name}/device/driver" in sysfs,
        driver=sysfs.get(f"{name}/device/driver", "").rpartition("/")[2],
        addresses=addresses.get(name, ()),
    )


def parse_rdma(text: str) -> tuple[RdmaDevice, ...]:
    """Parse RDMA devices from /sys/class/infiniband, in the order of their names
    (Documentation/ABI/stable/sysfs-class-infiniband).
    """
    values = _sysfs_values(text)
    names = {path.partition("/")[0] for path in values}
    return tuple(_make_device(name, values) for name in sorted(names, key=natural_key))


def _make_device(name: str, values: Mapping[str, str]) -> RdmaDevice:
    numbers = {
        int(match[1])
        for path in values
        if (match := re.match(rf"{re.escape(name)}/ports/(\d{{1,3}})/", path, re.ASCII))
    }
    return RdmaDevice(
        name=name,
        ports=tuple(
            _make_port(number, f"{name}/ports/{number}", values) for number in sorted(numbers)
        ),
        model=values.get(f"{name}/hca_type") or values.get(f"{name}/board_id", ""),
        # -1 without NUMA
        numa=_parse_int(values.get(f"{name}/device/numa_node")),
        netdevs=tuple(
            path.rpartition("/")[2] for path in values if path.startswith(f"{name}/device/net/")
        ),
    )


def _make_port(number: int, path: str, values: Mapping[str, str]) -> RdmaPort:
    # `state` is "4: ACTIVE", `phys_state` "5: LinkUp", `rate` "400 Gb/sec (4X NDR)".
    rate = re.match(r"(\d+(?:\.\d+)?) Gb/sec", values.get(f"{path}/rate", ""), re.ASCII)
    gids = [
        Gid(
            index=int(match[1]),
            value=value,
            kind=values.get(f"{path}/gid_attrs/types/{match[1]}", ""),
            netdev=values.get(f"{path}/gid_attrs/ndevs/{match[1]}", ""),
        )
        for file, value in values.items()
        if (match := re.fullmatch(rf"{re.escape(path)}/gids/(\d{{1,4}})", file, re.ASCII))
    ]
    return RdmaPort(
        number=number,
        state=values.get(f"{path}/state", "").rpartition(": ")[2],
        physical=values.get(f"{path}/phys_state", "").rpartition(": ")[2],
        rate=float(rate[1]) if rate else 0.0,
        link_layer=values.get(f"{path}/link_layer", ""),
        gids=tuple(sorted(gids, key=lambda gid: gid.index)),
    )
