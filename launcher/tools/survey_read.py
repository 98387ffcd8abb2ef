"""The survey's part of a probe's answer, read as a `Survey`; a part that is missing or odd leaves
its fields at "not known".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast

from launcher.core import untrusted
from launcher.core.domain import natural
from launcher.tools import gpu_survey
from launcher.tools.parts import Parts
from launcher.tools.survey import Gid, Lookup, Nic, RdmaDevice, RdmaPort, Survey

_NUMBER = r"\d{1,12}(?:\.\d+)?"
_LOOKUP = re.compile(
    # BusyBox' `date` knows no fraction of a second, and prints `%N` as it stands.
    rf"(?P<kind>reverse|forward|own) (?P<what>\S{{1,255}}) (?P<begin>{_NUMBER})\S*"
    rf" (?P<end>{_NUMBER})\S* (?P<status>\d{{1,3}}) (?P<found>.*)",
    re.ASCII,
)
_KINDS = ("reverse", "forward", "own")


def read(parts: Parts, info: Mapping[str, Any]) -> Survey | None:
    """Read the survey's parts of a probe's answer, and what `docker info` said; None when there was
    no survey.
    """
    if "clock" not in parts:
        return None
    said, good = parts.said, parts.good
    system, boot = _pairs(said("system")), _pairs(said("boot"))
    shm, shm_free = _df(good("shm") or "")
    cgroup = [str(info[key]) for key in ("CgroupDriver", "CgroupVersion") if info.get(key)]
    names = list(_looked_up(said("names"))) if good("names") is not None else None
    return Survey(
        system=system.get("system", ""),
        kernel=system.get("kernel", ""),
        uid=_int(system.get("uid")),
        cpus=_int(system.get("cpus")),
        numa_nodes=_int(system.get("numa_nodes")),
        memory=_kib(system.get("memory")),
        shm=shm,
        shm_free=shm_free,
        skew=_skew(said("clock")),
        synced=_synced(good("synced") or ""),
        own_names=_own_names(names or ()),
        lookups=None if names is None else _lookups(names),
        asks=_asks(said("names")),
        default_nic=_default(good("route")),
        nics=_nics(parts),
        rdma=read_rdma(said("rdma")),
        # Not only where `nvidia-smi` ended well: with one GPU lost it still tells of the others.
        gpus=gpu_survey.read(said("gpustate"), good("topo") or ""),
        nvlink=parts.read("fabric", gpu_survey.read_fabric),
        imex=parts.read("imex", lambda text: tuple(untrusted.cut(text).split())),
        xid=parts.read("xid", lambda text: tuple(untrusted.cut(text).splitlines())),
        modules=tuple(sorted(set(said("modules").split()))),
        docker_storage=str(info.get("Driver") or ""),
        docker_cgroup=" v".join(cgroup),
        docker_root=str(info.get("DockerRootDir") or ""),
        remove_ipc=parts.read("logind", _remove_ipc),
        linger={"yes": True, "no": False}.get(_last("Linger", good("logind"))),
        next_kernel=boot.get("next", ""),
        next_kernel_has_driver={"yes": True, "no": False}.get(boot.get("driver", "")),
        python=system.get("python", "").removeprefix("Python "),
        port_range=_port_range(system.get("port_range", "")),
    )


def _pairs(text: str) -> dict[str, str]:
    rows = (line.partition("=") for line in text.splitlines())
    return {key: value.strip() for key, found, value in rows if found}


def _int(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text) else None


def _kib(text: str | None) -> int | None:
    number = _int(text)
    return None if number is None else number * 1024


def _port_range(text: str) -> tuple[int, int] | None:
    low, _, high = text.partition("-")
    first, last = _int(low) or 0, _int(high) or 0
    return (first, last) if 0 < first <= last < 2**16 else None


def _df(text: str) -> tuple[int | None, int | None]:
    words = text.rsplit("\n", maxsplit=1)[-1].split()
    return (_kib(words[1]), _kib(words[3])) if len(words) > 3 else (None, None)


def _skew(text: str) -> float | None:
    """The launcher's clock as it was sent, then the node's."""
    match = re.fullmatch(rf"({_NUMBER}) ({_NUMBER})[^\d]*", text.strip(), re.ASCII)
    return float(match[2]) - float(match[1]) if match else None


def _synced(text: str) -> bool | None:
    """`NTPSynchronized=yes` of timedatectl(1), or the `Leap status` line of chronyc(1)."""
    if match := re.search(r"NTPSynchronized=(yes|no)", text):
        return match[1] == "yes"
    if match := re.search(r"Leap status\s*: (.+)", text):
        return match[1].strip() != "Not synchronised"
    return None


def _last(key: str, text: str | None) -> str:
    """Return the last value of a key: of several files, the last one wins."""
    values = re.findall(rf"^{key}=(\w+)", text or "", re.MULTILINE)
    return str(values[-1]) if values else ""


def _remove_ipc(text: str) -> bool:
    """systemd's own default is yes (logind.conf(5))."""
    return _last("RemoveIPC", text).lower() in ("", "yes", "true", "1", "on")


def _looked_up(text: str) -> Iterator[re.Match[str]]:
    """Find the lines of names that were looked up."""
    for line in text.splitlines():
        if match := _LOOKUP.fullmatch(f"{line} "):
            yield match


def _lookups(names: list[re.Match[str]]) -> tuple[Lookup, ...]:
    """Return the names that were looked up, in the order of what was sought."""
    found = (
        Lookup(
            kind=cast("Literal['reverse', 'forward', 'own']", match["kind"]),
            what=match["what"],
            seconds=max(0.0, float(match["end"]) - float(match["begin"])),
            # timeout(1) ends with 124, and with 137 when it had to kill
            answered=match["status"] not in ("124", "137"),
        )
        for match in names
    )
    return tuple(sorted(found, key=lambda lookup: (_KINDS.index(lookup.kind), lookup.what)))


def _own_names(names: list[re.Match[str]] | tuple[()]) -> tuple[str, ...] | None:
    """Return the addresses of the node's own name; None where they could not be looked up.

    getent(1) ends with 2 when it knows nobody of that name: then there is none, which is an answer
    too.
    """
    for match in names:
        addresses = tuple(match["found"].split())
        if match["kind"] == "own" and match["status"] == ("0" if addresses else "2"):
            return addresses
    return None


def _asks(text: str) -> tuple[str, ...]:
    rows = (" ".join(line.split()) for line in text.splitlines())
    return tuple(row[:200] for row in rows if row.startswith(("nameserver ", "hosts: ")))


def _default(text: str | None) -> str:
    """The route with the lowest metric wins; one without a metric has 0."""
    rows = [row for row in _json(text) if isinstance(row.get("dev"), str)]
    rows.sort(key=lambda row: row["metric"] if isinstance(row.get("metric"), int) else 0)
    return rows[0]["dev"] if rows else ""


def _json(text: str | None) -> list[dict[str, Any]]:
    try:
        rows = untrusted.loads(text or "[]")
    except ValueError:
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _nics(parts: Parts) -> tuple[Nic, ...] | None:
    """The kernel's list of links, with what sysfs adds."""
    links = _json(parts.said("link"))
    if not links:
        return None
    sysfs = _entries(parts.said("net"))
    addresses: dict[str, tuple[str, ...]] = {}
    for row in _json(parts.said("addr")):
        infos = [info for info in row.get("addr_info") or () if isinstance(info, dict)]
        addresses[str(row.get("ifname"))] = tuple(
            f"{info['local']}/{info.get('prefixlen')}" for info in infos if "local" in info
        )
    nics = (_nic(link, sysfs, addresses) for link in links)
    return tuple(nic for nic in nics if nic is not None)


def _entries(text: str) -> dict[str, str]:
    """Return the values of sysfs' files by their paths, which are printed as `path:value`."""
    rows = (line.partition(":") for line in text.splitlines())
    return {path: value.strip() for path, found, value in rows if found and "/" in path}


def _nic(
    link: Mapping[str, Any], sysfs: Mapping[str, str], addresses: Mapping[str, tuple[str, ...]]
) -> Nic | None:
    """Return the network card of one link; None where a field is not what it should be."""
    name, mtu, flags = link.get("ifname"), link.get("mtu"), link.get("flags")
    if not isinstance(name, str) or type(mtu) is not int or not isinstance(flags, list):
        return None
    if not re.fullmatch(r"[^\s/]{1,64}", name) or not 0 <= mtu < 2**31:
        return None
    return Nic(
        name=name,
        # A port whose cable is out keeps UP and loses LOWER_UP (ip-link(8)); `operstate` is often
        # UNKNOWN.
        up="UP" in flags and "NO-CARRIER" not in flags,
        mtu=mtu,
        speed=_int(sysfs.get(f"{name}/speed")) or None,
        physical=f"{name}/device/driver" in sysfs,
        driver=sysfs.get(f"{name}/device/driver", "").rpartition("/")[2],
        addresses=addresses.get(name, ()),
    )


def read_rdma(text: str) -> tuple[RdmaDevice, ...]:
    """Read RDMA devices as the kernel shows them below /sys/class/infiniband
    (Documentation/ABI/stable/sysfs-class-infiniband), in the order of their names.
    """
    values = _entries(text)
    names = {path.partition("/")[0] for path in values}
    return tuple(_device(name, values) for name in sorted(names, key=natural))


def _device(name: str, values: Mapping[str, str]) -> RdmaDevice:
    numbers = {
        int(match[1])
        for path in values
        if (match := re.match(rf"{re.escape(name)}/ports/(\d{{1,3}})/", path, re.ASCII))
    }
    return RdmaDevice(
        name=name,
        ports=tuple(_port(number, f"{name}/ports/{number}", values) for number in sorted(numbers)),
        model=values.get(f"{name}/hca_type") or values.get(f"{name}/board_id", ""),
        # -1: the machine has no NUMA
        numa=_int(values.get(f"{name}/device/numa_node")),
        netdevs=tuple(
            path.rpartition("/")[2] for path in values if path.startswith(f"{name}/device/net/")
        ),
    )


def _port(number: int, path: str, values: Mapping[str, str]) -> RdmaPort:
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
