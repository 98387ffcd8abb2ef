"""How the answers of the survey's script become a `Survey`; a part that is missing or odd leaves
its fields at "not known".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from launcher.tools import gpu_survey, rdma, untrusted
from launcher.tools.survey import Lookup, ModelCache, Nic, Survey

Parts = Mapping[str, tuple[str, int]]

_LOOKUP = re.compile(
    # BusyBox' `date` knows no fraction of a second, and prints `%N` as it stands.
    r"(?P<kind>reverse|forward|own) (?P<what>\S{1,255}) (?P<begin>\d{1,12}(?:\.\d+)?)\S*"
    r" (?P<end>\d{1,12}(?:\.\d+)?)\S* (?P<status>\d{1,3}) (?P<found>.*)",
    re.ASCII,
)
_KINDS: dict[str, Literal["reverse", "forward", "own"]] = {
    "reverse": "reverse",
    "forward": "forward",
    "own": "own",
}


def read(parts: Parts, info: Mapping[str, Any]) -> Survey | None:
    """Read the survey's parts of a probe's answer, and what `docker info` said; None when there was
    no survey.
    """
    if "clock" not in parts:
        return None
    system, boot = _pairs(said(parts, "system")), _pairs(said(parts, "boot"))
    shm, xid = _df(good(parts, "shm")), good(parts, "xid")
    cgroup = [str(info[key]) for key in ("CgroupDriver", "CgroupVersion") if info.get(key)]
    return Survey(
        system=system.get("system", ""),
        kernel=system.get("kernel", ""),
        boot_id=system.get("boot_id", ""),
        uid=_int(system.get("uid")),
        cpus=_int(system.get("cpus")),
        numa_nodes=_int(system.get("numa_nodes")),
        memory=_kib(system.get("memory")),
        shm=shm[0],
        shm_free=shm[1],
        skew=_skew(said(parts, "clock")),
        synced=_synced(good(parts, "synced")),
        own_names=_own_names(good(parts, "names")),
        lookups=_lookups(good(parts, "names")),
        asks=_asks(said(parts, "names")),
        default_nic=_default(good(parts, "route")),
        nics=_nics(parts, said(parts, "net")),
        rdma=rdma.read(said(parts, "rdma")),
        # Not only where `nvidia-smi` ended well: with one GPU lost it still tells of the others.
        gpus=gpu_survey.read(said(parts, "gpustate"), good(parts, "topo"), said(parts, "gpunuma")),
        nvlink=gpu_survey.read_fabric(good(parts, "fabric")),
        imex=_told(good(parts, "imex")),
        driver_cuda=gpu_survey.read_cuda(said(parts, "cuda")),
        xid=None if xid is None else tuple(untrusted.cut(xid).splitlines()),
        modules=tuple(sorted(set(said(parts, "modules").split()))),
        docker_storage=str(info.get("Driver") or ""),
        docker_cgroup=" v".join(cgroup),
        docker_root=str(info.get("DockerRootDir") or ""),
        models=tuple(_models(said(parts, "models"))),
        remove_ipc=_remove_ipc(good(parts, "logind")),
        linger=_linger(good(parts, "logind")),
        next_kernel=boot.get("next", ""),
        next_kernel_has_driver={"yes": True, "no": False}.get(boot.get("driver", "")),
        python=system.get("python", "").removeprefix("Python "),
        port_range=_port_range(system.get("port_range", "")),
    )


def _told(text: str | None) -> tuple[str, ...] | None:
    """Return the words of an answer; None where there was none."""
    return None if text is None else tuple(untrusted.cut(text).split())


def answer(parts: Parts, name: str) -> tuple[str, int]:
    """Return what a part printed, and its exit status; one that is missing has failed."""
    return parts.get(name, ("", 1))


def said(parts: Parts, name: str) -> str:
    """Return what a part printed, well or not."""
    return answer(parts, name)[0]


def good(parts: Parts, name: str) -> str | None:
    """Return what a part printed; None when it failed."""
    out, code = answer(parts, name)
    return out if code == 0 else None


def _pairs(text: str) -> dict[str, str]:
    return {
        key: value.strip()
        for key, found, value in (line.partition("=") for line in text.splitlines())
        if found
    }


def _int(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[0-9]{1,18}", text) else None


def _port_range(text: str) -> tuple[int, int] | None:
    low, _, high = text.partition("-")
    first, last = _int(low) or 0, _int(high) or 0
    return (first, last) if 0 < first <= last < 2**16 else None


def _kib(text: str | None) -> int | None:
    number = _int(text)
    return None if number is None else number * 1024


def _df(text: str | None) -> tuple[int | None, int | None]:
    words = (text or "").split("\n")[-1].split()
    return (_kib(words[1]), _kib(words[3])) if len(words) > 3 else (None, None)


def _skew(text: str) -> float | None:
    """The launcher's clock as it was sent, then the node's; BusyBox' `date` has no fraction."""
    match = re.fullmatch(r"(\d{1,12}(?:\.\d+)?) (\d{1,12}(?:\.\d+)?)[^\d]*", text.strip(), re.ASCII)
    return float(match[2]) - float(match[1]) if match else None


def _synced(text: str | None) -> bool | None:
    """`NTPSynchronized=yes` of timedatectl(1), or the `Leap status` line of chronyc(1)."""
    if match := re.search(r"NTPSynchronized=(yes|no)", text or ""):
        return match[1] == "yes"
    if match := re.search(r"Leap status\s*: (.+)", text or ""):
        return match[1].strip() != "Not synchronised"
    return None


def _json(text: str | None) -> list[dict[str, Any]]:
    try:
        rows = untrusted.loads(text or "[]")
    except ValueError:
        return []
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _default(text: str | None) -> str:
    """The route with the lowest metric wins; one without a metric has 0."""
    rows = [row for row in _json(text) if isinstance(row.get("dev"), str)]
    rows.sort(key=lambda row: row["metric"] if isinstance(row.get("metric"), int) else 0)
    return rows[0]["dev"] if rows else ""


def _nics(parts: Parts, text: str) -> tuple[Nic, ...] | None:
    """The kernel's list of links, with what sysfs adds; `flags` say whether a link is up,
    `operstate` is often UNKNOWN.
    """
    links = _json(said(parts, "link"))
    if not links:
        return None
    sysfs = dict(rdma.entries(text))
    rows = _json(said(parts, "addr"))
    addresses = {str(row.get("ifname")): _addresses(row) for row in rows}
    nics = (_nic(row, sysfs, addresses) for row in links)
    return tuple(nic for nic in nics if nic is not None)


def _addresses(row: Mapping[str, Any]) -> tuple[str, ...]:
    rows = [each for each in row.get("addr_info") or () if isinstance(each, dict)]
    return tuple(f"{each['local']}/{each.get('prefixlen')}" for each in rows if "local" in each)


def _nic(
    row: Mapping[str, Any], sysfs: Mapping[str, str], addresses: Mapping[str, tuple[str, ...]]
) -> Nic | None:
    """Return the network card of one link; None where a field is not what it should be."""
    name, mtu, flags = row.get("ifname"), row.get("mtu"), row.get("flags")
    if not isinstance(name, str) or type(mtu) is not int or not isinstance(flags, list):
        return None
    if not re.fullmatch(r"[^\s/]{1,64}", name) or not 0 <= mtu < 2**31:
        return None
    return Nic(
        name=name,
        # A port whose cable is out keeps UP and loses LOWER_UP (ip-link(8)).
        up="UP" in flags and "NO-CARRIER" not in flags,
        mtu=mtu,
        speed=_int(sysfs.get(f"{name}/speed")) or None,
        physical=f"{name}/device/pci" in sysfs,
        driver=sysfs.get(f"{name}/device/driver", "").rpartition("/")[2],
        pci=rdma.pci(sysfs.get(f"{name}/device/pci", "")),
        numa=_int(sysfs.get(f"{name}/device/numa_node")),
        addresses=addresses.get(name, ()),
    )


def _models(text: str) -> Iterator[ModelCache]:
    for line in text.splitlines():
        if match := re.fullmatch(r"(\d{1,15})\tmodels--(.+)", line, re.ASCII):
            yield ModelCache(name=match[2].replace("--", "/"), size=int(match[1]) * 1024)


def _remove_ipc(text: str | None) -> bool | None:
    """The last file that says something wins; systemd's own default is yes (logind.conf(5))."""
    if text is None:
        return None
    said = re.findall(r"^RemoveIPC=(\w+)", text, re.MULTILINE)
    return not said or said[-1].lower() in ("yes", "true", "1", "on")


def _linger(text: str | None) -> bool | None:
    match = re.search(r"^Linger=(yes|no)", text or "", re.MULTILINE)
    return None if match is None else match[1] == "yes"


def _looked_up(text: str | None) -> Iterator[re.Match[str]]:
    """Find the lines of names that were looked up."""
    for line in (text or "").splitlines():
        if match := _LOOKUP.fullmatch(f"{line} "):
            yield match


def _lookups(text: str | None) -> tuple[Lookup, ...] | None:
    """Return the names that were looked up, in the order of what was sought; None where nobody
    could.
    """
    if text is None:
        return None
    found = (
        Lookup(
            kind=_KINDS[match["kind"]],
            what=match["what"],
            seconds=max(0.0, float(match["end"]) - float(match["begin"])),
            # timeout(1) ends with 124, and with 137 when it had to kill
            answered=match["status"] not in ("124", "137"),
        )
        for match in _looked_up(text)
    )
    return tuple(sorted(found, key=lambda each: (tuple(_KINDS).index(each.kind), each.what)))


def _own_names(text: str | None) -> tuple[str, ...] | None:
    """Return the addresses of the node's own name; None where they could not be looked up.

    getent(1) ends with 2 when it knows nobody of that name: then there is none, which is an answer
    too.
    """
    for each in _looked_up(text):
        addresses = tuple(each["found"].split())
        if each["kind"] == "own" and (
            each["status"] == "2" or (each["status"] == "0" and addresses)
        ):
            return addresses
    return None


def _asks(text: str) -> tuple[str, ...]:
    rows = (" ".join(line.split()) for line in text.splitlines())
    return tuple(row[:200] for row in rows if row.startswith(("nameserver ", "hosts: ")))
