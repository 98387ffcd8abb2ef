"""What was found in a log of NCCL so far, and how it becomes a reading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from launcher.payload.network_links import via
from launcher.tools.nccl import lines
from launcher.tools.nccl.shape import Link, Reading

# different links that are kept; 64 nodes of 8 GPUs with 32 channels have about 33,000
MAX_LINKS = 100_000
MAX_WARNINGS = 200
MAX_HOSTS = 4096

_Key = tuple[str, int, int, str, str, str, "int | None", bool]


class LogContents:
    """What has been found so far; every collection has a limit, so that no log can fill the
    memory.
    """

    def __init__(self) -> None:
        self.lines = 0
        self.network_links = 0
        self.truncated = False
        self.overflow = False
        self.collnet = 0
        self.nodes = 0
        self.announced = 0
        self.links: dict[_Key, Link] = {}
        self.kinds: set[tuple[str, bool]] = set()
        self.local: dict[str, int] = {}
        self.using: dict[str, None] = {}
        self.versions: dict[str, None] = {}
        self.gdr_disabled: dict[str, None] = {}
        self.devices: dict[str, dict[int, str]] = {}
        self.warnings: dict[str, dict[str, None]] = {}
        self.alarms: dict[str, None] = {}
        self.providers: dict[str, dict[str, None]] = {}
        self.ranks: dict[str, dict[int, str]] = {}
        self.sizes: dict[str, int] = {}

    def take(self, counted: dict[bytes, int]) -> None:
        """Understand lines that were counted, and forget the counts."""
        for line, times in counted.items():
            text = line.decode("utf-8", "replace")
            if (match := lines.USUAL.fullmatch(text)) is None:
                if (said := lines.said(text)) is not None:
                    self._note(said, times)
                continue
            host, channel, source, target, direction, path = match.groups("")
            network, device, gpudirect, local, _ = via(path)
            if local:
                self.local[local] = self.local.get(local, 0) + times
            elif network:
                self._count(
                    (
                        host,
                        int(source),
                        int(target),
                        channel,
                        direction,
                        network,
                        device,
                        gpudirect,
                    ),
                    times,
                )
        counted.clear()

    def last(self, line: bytes) -> None:
        """Understand the line that ends a log without a line break: it may have lost what proves
        GPUDirect.
        """
        said = lines.said(line.decode("utf-8", "replace"))
        if said is None:
            return
        direct = {direct for network, direct in self.kinds if network == said.network}
        if said.cut == "surely" or (said.cut == "maybe" and direct == {True}):
            self.truncated = True
        else:
            self._note(said, 1)

    def _note(self, said: lines.Said, times: int) -> None:
        host = said.host
        if said.network:
            self._count(_key(said), times)
        elif said.local:
            self.local[said.local] = self.local.get(said.local, 0) + times
        _put(self.using, said.using)
        _put(self.versions, said.version)
        _put(self.gdr_disabled, said.gdr_disabled)
        if said.warning:
            self._warn(said.warning, (host,), alarm=said.alarm)
        if said.provider and _has_room(self.providers, host, MAX_HOSTS):
            _put(self.providers.setdefault(host, {}), said.provider)
        self.collnet += times if said.collnet else 0
        self.nodes = max(self.nodes, said.nodes)
        if said.communicator:
            self._member(said)
        if said.fabric:
            self._name_devices(said)

    def _count(self, link: _Key, times: int) -> None:
        """Note a link between nodes that was told so often; NVLink (MNNVL) is no network's."""
        network = link[5]
        self.network_links += times if network != "MNNVL" else 0
        self._link(link)

    def _member(self, said: lines.Said) -> None:
        """Note that a host has a rank of a communicator."""
        host, communicator = said.host, said.communicator
        if host:
            self._rank(communicator, said.ranks, {said.rank: host})

    def _name_devices(self, said: lines.Said) -> None:
        """Note what a host's devices are called; names of interfaces do not replace others."""
        if not _has_room(self.devices, said.host, MAX_HOSTS):
            return
        names = self.devices.setdefault(said.host, {})
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
        self.overflow |= reading.overflow
        self.collnet += reading.collnet
        self.nodes = max(self.nodes, reading.nodes)
        for link in reading.links:
            self._link(_key(link))
        for kind, count in reading.local.items():
            self.local[kind] = self.local.get(kind, 0) + count
        for mine, theirs in (
            (self.using, reading.using),
            (self.versions, reading.versions),
            (self.gdr_disabled, reading.gdr_disabled),
        ):
            for each in theirs:
                _put(mine, each)
        for text in reading.warnings:
            self._warn(text, reading.told_by.get(text, ()), alarm=text in reading.alarms)
        for host, names in reading.devices.items():
            self.devices.setdefault(host, {}).update(names)
        for host, providers in reading.providers.items():
            self.providers.setdefault(host, {}).update(dict.fromkeys(providers))
        for communicator, ranks in reading.ranks.items():
            self._rank(communicator, reading.sizes.get(communicator, 0), ranks)

    def reading(self) -> Reading:
        """Return it as a value."""
        links = tuple(self.links.values())
        return Reading(
            links=links,
            network_links=self.network_links,
            local=self.local,
            using=tuple(self.using),
            devices=self.devices,
            gdr_disabled=tuple(self.gdr_disabled),
            warnings=tuple(self.warnings),
            versions=tuple(self.versions),
            lines=self.lines,
            truncated=self.truncated,
            told_by={text: tuple(hosts) for text, hosts in self.warnings.items()},
            overflow=self.overflow,
            alarms=tuple(self.alarms),
            collnet=self.collnet,
            nodes=self.nodes,
            providers={host: tuple(names) for host, names in self.providers.items()},
            ranks=self.ranks,
            sizes=self.sizes,
        )

    def _link(self, key: _Key) -> None:
        kind = (key[5], key[7])
        if key in self.links:
            return
        if len(self.links) >= MAX_LINKS:
            self.overflow = True
            # The worst kind decides the verdict, so that one link of each is kept whatever came
            # before.
            if kind in self.kinds or len(self.kinds) >= MAX_WARNINGS:
                return
        self.kinds.add(kind)
        host, source, target, channel, direction, network, device, gpudirect = key
        self.links[key] = Link(
            source=source,
            target=target,
            channel=channel,
            direction=direction,
            network=network,
            device=device,
            gpudirect=gpudirect,
            host=host,
        )

    def _rank(self, communicator: str, size: int, ranks: Mapping[int, str]) -> None:
        """Note who is which rank, by its first word: equal lines are counted together.

        As many ranks are kept as links.
        """
        self.sizes[communicator] = max(self.sizes.get(communicator, 0), size)
        known = self.ranks.setdefault(communicator, {})
        for rank, host in ranks.items():
            if rank not in known and self.announced >= MAX_LINKS:
                return
            self.announced += rank not in known
            known.setdefault(rank, host)

    def _warn(self, text: str, hosts: Iterable[str], *, alarm: bool) -> None:
        if text not in self.warnings and len(self.warnings) >= MAX_WARNINGS:
            return
        if alarm:
            _put(self.alarms, text)
        told = self.warnings.setdefault(text, {})
        for host in hosts:
            _put(told, host, limit=MAX_HOSTS)


def _key(link: Link | lines.Said) -> _Key:
    return (
        link.host,
        link.source,
        link.target,
        link.channel,
        link.direction,
        link.network,
        link.device,
        link.gpudirect,
    )


def _has_room(into: Mapping[str, object], key: str, limit: int) -> bool:
    """True when something can be kept under a key: it is there, or fewer others are."""
    return key in into or len(into) < limit


def _put(into: dict[str, None], text: str, *, limit: int = MAX_WARNINGS) -> None:
    if text and len(into) < limit:
        into[text] = None
