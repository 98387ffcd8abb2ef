"""What NCCL (or RCCL) wrote about its links, of any origin and age, read as a stream: a log may be larger than the memory.

The forms of the lines are in `nccl_lines`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from launcher.tools import nccl_jobs, nccl_lines

MAX_LINKS = 100_000  # different links that are kept; 64 nodes of 8 GPUs with 32 channels have about 33,000
MAX_WARNINGS = 200
MAX_HOSTS = 4096
_SOON = 50_000  # different lines that are counted before they are understood


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One `Channel … via …` line of an inter-node link.

    `source` and `target` are ranks; `network` is what follows `NET/` (`IB`, `Socket`, `AWS Libfabric`, …) or `MNNVL`; `device`
    is NCCL's index of the network device; `host` is the host that wrote the line (empty where no prefix says it).
    """

    source: int
    target: int
    channel: str
    direction: str
    network: str
    device: int | None = None
    gpudirect: bool = False
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a log says. `local` counts the links inside nodes by kind (`P2P`, `SHM`); `using` are the networks it announced.

    `links` has each link once, `network_links` counts the lines. `devices` has the network devices by NCCL's index where a
    `NET/IB : Using` line names them (`mlx5_0:1/RoCE`), per host; `gdr_disabled` are the HCAs for which GPUDirect RDMA was
    said to be off; `warnings` are WARN and telling INFO lines, each once, and `told_by` the hosts that wrote each;
    `communicators` are the hosts of each `commId`; `groups` are sets of hosts that share a communicator and have links: two of
    them in one log are two jobs. `truncated`: the log ends within a line, or has more links than are kept.
    """

    links: tuple[Link, ...] = ()
    network_links: int = 0
    local: Mapping[str, int] = field(default_factory=dict)
    using: tuple[str, ...] = ()
    devices: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    gdr_disabled: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    versions: tuple[str, ...] = ()
    lines: int = 0
    truncated: bool = False
    told_by: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    communicators: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def mnnvl(self) -> bool:
        """True when a link is multi-node NVLink."""
        return any(link.network == "MNNVL" for link in self.links)


def read(chunks: Iterable[bytes]) -> Reading:
    """Read a log that comes in blocks, cut anywhere; any bytes are read, and what is not a line of NCCL tells nothing.

    What is kept is bounded by the number of different links, not by the log.
    """
    found = _Found()
    counted: dict[bytes, int] = {}
    for lines, ended in nccl_lines.split(chunks):
        found.lines += len(lines)
        for line in lines:
            at = line.find(b"CCL INFO ")
            if at >= 0:
                # From `host:pid:tid [device] NCCL INFO` on: what stands before, such as a time stamp, makes equal lines differ.
                bracket = line.rfind(b" [", 0, at)
                key = line[line.rfind(b" ", 0, bracket) + 1 :] if bracket > 0 else line
            elif b"CCL" in line or b"NET/" in line or b" via " in line or b"nccl==" in line or b"Bootstrap" in line:
                key = line
            else:
                continue
            if not ended:
                found.take(counted)
                found.last(key)
                continue
            counted[key] = counted.get(key, 0) + 1
            if len(counted) >= _SOON:
                found.take(counted)
    found.take(counted)
    return found.reading()


def merge(readings: Iterable[Reading]) -> Reading:
    """Put several logs together, as if they were one; links and warnings that are in more than one of them count once."""
    found = _Found()
    for each in readings:
        found.add(each)
    return found.reading()


_Key = tuple[str, int, int, str, str, str, "int | None", bool]


class _Found:
    """What has been found so far; every collection has a limit, so that no log can fill the memory."""

    def __init__(self) -> None:
        self.lines = 0
        self.network_links = 0
        self.truncated = False
        self.links: dict[_Key, Link] = {}
        self.kinds: set[tuple[str, bool]] = set()
        self.local: dict[str, int] = {}
        self.using: dict[str, None] = {}
        self.versions: dict[str, None] = {}
        self.gdr_disabled: dict[str, None] = {}
        self.devices: dict[str, dict[int, str]] = {}
        self.warnings: dict[str, dict[str, None]] = {}
        self.communicators: dict[str, dict[str, None]] = {}

    def take(self, counted: dict[bytes, int]) -> None:
        """Understand lines that were counted, and forget the counts."""
        for line, times in counted.items():
            text = line.decode("utf-8", "replace")
            if (match := nccl_lines.USUAL.fullmatch(text)) is None:
                if (said := nccl_lines.said(text)) is not None:
                    self._note(said, times)
                continue
            host, channel, source, target, direction, path = match.groups("")
            network, device, gpudirect, local, _ = nccl_lines.via(path)
            if local:
                self.local[local] = self.local.get(local, 0) + times
            elif network:
                self.network_links += times if network != "MNNVL" else 0
                self._link((host, int(source), int(target), channel, direction, network, device, gpudirect))
        counted.clear()

    def last(self, line: bytes) -> None:
        """Understand the line that ends a log without a line break: it may have lost what proves GPUDirect."""
        said = nccl_lines.said(line.decode("utf-8", "replace"))
        if said is None:
            return
        direct = {direct for network, direct in self.kinds if network == said.network}
        if said.cut == "surely" or (said.cut == "maybe" and direct == {True}):
            self.truncated = True
        else:
            self._note(said, 1)

    def _note(self, said: nccl_lines.Said, times: int) -> None:
        host = said.host
        if said.network:
            self.network_links += times if said.network != "MNNVL" else 0
            self._link(
                (host, said.source, said.target, said.channel, said.direction, said.network, said.device, said.gpudirect)
            )
        elif said.local:
            self.local[said.local] = self.local.get(said.local, 0) + times
        _put(self.using, said.using)
        _put(self.versions, said.version)
        _put(self.gdr_disabled, said.gdr_disabled)
        if said.warning:
            self._warn(said.warning, (host,))
        if said.communicator and host and (said.communicator in self.communicators or len(self.communicators) < MAX_LINKS):
            _put(self.communicators.setdefault(said.communicator, {}), host, limit=MAX_HOSTS)
        if said.fabric and (host in self.devices or len(self.devices) < MAX_HOSTS):
            names = self.devices.setdefault(host, {})
            for index, name in said.devices:
                if said.fabric != "Socket":
                    names[index] = name
                else:
                    names.setdefault(index, name)

    def add(self, reading: Reading) -> None:
        """Take over what was found in another log."""
        self.lines += reading.lines
        self.network_links += reading.network_links
        self.truncated |= reading.truncated
        for link in reading.links:
            self._link(
                (link.host, link.source, link.target, link.channel, link.direction, link.network, link.device, link.gpudirect)
            )
        for kind, count in reading.local.items():
            self.local[kind] = self.local.get(kind, 0) + count
        for mine, theirs in (
            (self.using, reading.using), (self.versions, reading.versions), (self.gdr_disabled, reading.gdr_disabled),
        ):  # fmt: skip
            for each in theirs:
                _put(mine, each)
        for text in reading.warnings:
            self._warn(text, reading.told_by.get(text, ()))
        for host, names in reading.devices.items():
            self.devices.setdefault(host, {}).update(names)
        for communicator, hosts in reading.communicators.items():
            self.communicators.setdefault(communicator, {}).update(dict.fromkeys(hosts))

    def reading(self) -> Reading:
        """Return it as a value."""
        links = tuple(self.links.values())
        communicators = {each: tuple(hosts) for each, hosts in self.communicators.items()}
        return Reading(
            links=links, network_links=self.network_links, local=self.local, using=tuple(self.using), devices=self.devices,
            gdr_disabled=tuple(self.gdr_disabled), warnings=tuple(self.warnings), groups=self._groups(),
            versions=tuple(self.versions), lines=self.lines, truncated=self.truncated,
            told_by={text: tuple(hosts) for text, hosts in self.warnings.items()}, communicators=communicators,
        )  # fmt: skip

    def _groups(self) -> tuple[tuple[str, ...], ...]:
        ends = [((key[1], key[2], key[3]), key[4] == "receive", key[0]) for key in self.links]
        return nccl_jobs.groups(ends, self.communicators)

    def _link(self, key: _Key) -> None:
        kind = (key[5], key[7])
        if key in self.links:
            return
        if len(self.links) >= MAX_LINKS:
            self.truncated = True
            # The worst kind decides the verdict, so that one link of each is kept whatever came before.
            if kind in self.kinds or len(self.kinds) >= MAX_WARNINGS:
                return
        self.kinds.add(kind)
        host, source, target, channel, direction, network, device, gpudirect = key
        self.links[key] = Link(
            source=source, target=target, channel=channel, direction=direction, network=network, device=device,
            gpudirect=gpudirect, host=host,
        )  # fmt: skip

    def _warn(self, text: str, hosts: Iterable[str]) -> None:
        if text not in self.warnings and len(self.warnings) >= MAX_WARNINGS:
            return
        told = self.warnings.setdefault(text, {})
        for host in hosts:
            _put(told, host, limit=MAX_HOSTS)


def _put(into: dict[str, None], text: str, *, limit: int = MAX_WARNINGS) -> None:
    if text and len(into) < limit:
        into[text] = None
