"""Parser for logs of NCCL (2.4 to 2.30) and RCCL from any source: escaped in JSON or not, with any
line ends, read as a stream because a log may exceed the memory.

Sources: NVIDIA/nccl src/transport/{net,p2p,shm,coll_net,net_socket}.cc and net_ib, init.cc,
bootstrap.cc, debug.cc, graph/topo.cc at its tags; ROCm/rccl has the same files, and appends `comm
POINTER nRanks N`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple

from launcher import upstream
from launcher.core.untrusted import sanitize
from launcher.network.probe.network_links import parse_path

# Limit of different links; 64 nodes of 8 GPUs with 32 channels have about 33,000.
MAX_LINKS = 100_000
MAX_TEXTS = 200
MAX_HOSTS = 4096
_MAX_TEXT = 300  # characters of a warning

# `Ring` until 2.6; the brackets hold a bus id (hexadecimal), a device number, or are missing (2.4).
_CHANNEL = re.compile(upstream.text("nccl.channel"))
_USING = re.compile(
    f"(?:{upstream.any_of('nccl.using-network', 'nccl.using-plugin')})"
    r" ([^\r\n]{1,64}?)(?: to comm\b.*| comm 0x.*)?\s*$"
)
_DEVICES = re.compile(upstream.text("nccl.using-devices"))
_DEVICE = re.compile(r"\[(\d{1,6})\]([^\s;]{1,80})")
_COMMUNICATOR = re.compile(upstream.text("nccl.communicator"))
_NODES = re.compile(upstream.text("nccl.communicator-nodes"))
# aws-ofi-nccl: `Selected Provider is efa (found 4 nics)`, later `Selected provider is efa, fabric
# is efa (found 4 nics)`.
_PROVIDER = re.compile(upstream.text("nccl.libfabric-provider"))
VERSION = re.compile(upstream.text("nccl.version"))
# Sentences that explain something although NCCL does not call them a warning.
_RELEVANT = re.compile(
    upstream.any_of(
        *("nccl.no-device", "nccl.device-not-opened", "nccl.no-listening-interface"),
        *("nccl.no-interface", "nccl.gpudirect-disabled", "nccl.verbs-not-opened"),
        *("nccl.plugin-none", "nccl.plugin-not-found", "nccl.plugin-load-returned"),
        *("nccl.plugin-set", "nccl.plugin-failed", "nccl.plugin-symbol"),
        *("nccl.connection-failed", "nccl.variable-network", "nccl.verbs-failed"),
        *("nccl.gid", "nccl.system-error", "nccl.dmabuf", "nccl.peermem"),
    )
    # Of the dynamic linker, and of the C library.
    + r"|lib[nr]ccl-net\S*: undefined symbol|NET/Plugin ?: ?\S+: cannot open|Cannot allocate memory"
)
_PREFIX = re.compile(r"([A-Za-z0-9_.<][\w.<>-]*|):\d{1,10}:\d{1,10}$")
_REPEATED = re.compile(upstream.text("ray.lines-repeated"))
MAX_LINE = 64 << 10  # bytes of a line
_ESCAPES = (
    (b"\\n", b"\n"),
    (b"\\r", b"\n"),
    (b"\\t", b" "),
    (b"\\u003e", b">"),
    (b"\\u003E", b">"),
    (b"\\u003c", b"<"),
    (b"\\u001b", b"\x1b"),
    (b"\\/", b"/"),
    (b'"', b"\n"),
)
_BATCH = 50_000  # different lines that are counted before they are parsed
_MARKERS = (b"CCL", b"NET/", b" via ", b"nccl==", b"Bootstrap")


class NcclLink(NamedTuple):
    """One `Channel … via …` line of a network, or of NVLink between nodes.

    `source` and `target` are ranks; `network` is what follows `NET/` (`IB`, `Socket`, `AWS
    Libfabric`, …) or `MNNVL`; `device` is NCCL's index of the network device; `host` is the host
    that wrote the line (empty where no prefix names it).
    """

    source: int
    target: int
    channel: str
    direction: str
    network: str
    device: int | None = None
    gpudirect: bool = False
    host: str = ""

    @property
    def writer(self) -> int:
        """The rank that wrote the line."""
        return self.target if self.direction == "receive" else self.source


@dataclass(slots=True, kw_only=True)
class Reading:
    """Facts of a log. Every collection has a limit, so that no log can fill the memory.

    `links` has each link once, `network_links` counts the lines, `local` those inside nodes by kind
    (`P2P`, `SHM`). `using` are the networks that NCCL announced. `devices` has the network devices
    by host and NCCL's index where a `NET/IB : Using` line names them (`mlx5_0:1/RoCE`); `providers`
    are libfabric's, by host. `warnings` has the hosts that wrote each WARN or telling INFO line,
    `alarms` are those that NCCL itself calls WARN. `ranks` is the host of each rank that announced
    itself in a communicator (`commId`), `sizes` how many ranks that has, `nodes` the most nodes of
    a communicator. `truncated`: the log ends within a line; `overflow`: it has more links than are
    kept.
    """

    links: dict[NcclLink, None] = field(default_factory=dict)
    network_links: int = 0
    local: dict[str, int] = field(default_factory=dict)
    using: dict[str, None] = field(default_factory=dict)
    versions: dict[str, None] = field(default_factory=dict)
    devices: dict[str, dict[int, str]] = field(default_factory=dict)
    providers: dict[str, dict[str, None]] = field(default_factory=dict)
    warnings: dict[str, dict[str, None]] = field(default_factory=dict)
    alarms: dict[str, None] = field(default_factory=dict)
    ranks: dict[str, dict[int, str]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    nodes: int = 0
    lines: int = 0
    truncated: bool = False
    overflow: bool = False
    _kinds: set[tuple[str, bool]] = field(default_factory=set, repr=False)
    _announced: int = field(default=0, repr=False)

    @property
    def mnnvl(self) -> bool:
        """True if a link is multi-node NVLink."""
        return any(link.network == "MNNVL" for link in self.links)

    def add_line(self, line: bytes, times: int) -> None:
        """Parse a line that occurs `times` times; it may have colours and any prefix."""
        text = line.decode("utf-8", "replace")
        text = text if text.isprintable() else sanitize(text)
        text = _REPEATED.sub("", text) if "[repeated" in text else text.strip()
        head, info, body = text.partition("CCL INFO ")
        if not info:
            head, alarm, body = text.partition("CCL WARN ")
            if alarm:
                self._add_warning(body[:_MAX_TEXT], [_parse_host(head)], alarm=True)
                self._add_version(body)
                return
            head, body = "", text
        if " via " in body and (match := _CHANNEL.search(body)):
            self._add_channel(_parse_host(head), match, times)
        else:
            self._add_sentence(_parse_host(head), body)

    def add_reading(self, other: Reading) -> None:
        """Add another log, as if both were one; links and warnings in both count once."""
        self.lines += other.lines
        self.network_links += other.network_links
        self.truncated |= other.truncated
        self.overflow |= other.overflow
        self.nodes = max(self.nodes, other.nodes)
        for link in other.links:
            self._add_link(link)
        for kind, count in other.local.items():
            self.local[kind] = self.local.get(kind, 0) + count
        for mine, theirs in ((self.using, other.using), (self.versions, other.versions)):
            for name in theirs:
                _add_text(mine, name)
        for text, hosts in other.warnings.items():
            self._add_warning(text, hosts, alarm=text in other.alarms)
        for host, names in other.devices.items():
            self.devices.setdefault(host, {}).update(names)
        for host, providers in other.providers.items():
            self.providers.setdefault(host, {}).update(providers)
        for communicator, ranks in other.ranks.items():
            self._add_members(communicator, other.sizes.get(communicator, 0), ranks)

    def _add_channel(self, host: str, match: re.Match[str], times: int) -> None:
        channel, source, target, direction, path = match.groups("")
        network, device, gpudirect, local = parse_path(path)
        if local:
            self.local[local] = self.local.get(local, 0) + times
        elif network:
            self.network_links += times if network != "MNNVL" else 0
            ranks = int(source), int(target)
            self._add_link(NcclLink(*ranks, channel, direction, network, device, gpudirect, host))

    def _add_link(self, link: NcclLink) -> None:
        kind = link.network, link.gpudirect
        if link in self.links:
            return
        if len(self.links) >= MAX_LINKS:
            self.overflow = True
            # The worst kind decides the verdict, so one link of each kind stays.
            if kind in self._kinds or len(self._kinds) >= MAX_TEXTS:
                return
        self._kinds.add(kind)
        self.links[link] = None

    def _add_sentence(self, host: str, text: str) -> None:
        """Parse a line that is not about one link; the first matching form counts."""
        if match := _COMMUNICATOR.search(text):
            communicator = match[3].lower()
            if host and int(communicator, 16):
                self._add_members(communicator, int(match[2]), {int(match[1]): host})
        elif match := _NODES.search(text):
            self.nodes = max(self.nodes, int(match[1]))
        elif match := _PROVIDER.search(text):
            _add_text(_host_entry(self.providers, host), match[1].lower())
        elif match := _DEVICES.search(text):
            self._name_devices(host, match)
        elif match := _USING.search(text):
            _add_text(self.using, match[1])
        else:
            self._add_warning(text[:_MAX_TEXT] if _RELEVANT.search(text) else "", [host])
            self._add_version(text)

    def _add_members(self, communicator: str, size: int, ranks: Mapping[int, str]) -> None:
        """Record the hosts of ranks, at most as many as links. The first host of a rank counts,
        since equal lines are counted together.
        """
        self.sizes[communicator] = max(self.sizes.get(communicator, 0), size)
        host_of_rank = self.ranks.setdefault(communicator, {})
        for rank, host in ranks.items():
            if rank not in host_of_rank and self._announced >= MAX_LINKS:
                return
            self._announced += rank not in host_of_rank
            host_of_rank.setdefault(rank, host)

    def _name_devices(self, host: str, match: re.Match[str]) -> None:
        """Record a host's device names; names of interfaces do not replace others."""
        names = _host_entry(self.devices, host)
        for index, name in _DEVICE.findall(match[2]):
            if match[1] == "Socket":
                names.setdefault(int(index), name)
            else:
                names[int(index)] = name

    def _add_version(self, text: str) -> None:
        if match := VERSION.search(text):
            _add_text(self.versions, match[1].rstrip("."))

    def _add_warning(self, text: str, hosts: Iterable[str], *, alarm: bool = False) -> None:
        if not text or not _has_room(self.warnings, text, MAX_TEXTS):
            return
        if alarm:
            self.alarms[text] = None
        writers = self.warnings.setdefault(text, {})
        for host in hosts:
            _add_text(writers, host, limit=MAX_HOSTS)


def split_lines(chunks: Iterable[bytes]) -> Iterator[tuple[list[bytes], bool]]:
    """Yield the lines of a stream in batches, at most `MAX_LINE` bytes of each; false with a last
    line without an end.

    Lines that are escaped in JSON (or in Python's `repr`) are unescaped.
    """
    rest: list[bytes] = []
    size = 0
    for chunk in chunks:
        first, *following = chunk.replace(b"\r", b"\n").split(b"\n")
        if size <= MAX_LINE:
            rest.append(first)
            size += len(first)
        if following:
            lines = [b"".join(rest), *following]
            last = lines.pop()
            if _is_escaped(chunk) or _is_escaped(lines[0]):
                lines = [part for line in lines for part in _unescape(line[:MAX_LINE])]
            yield [line[:MAX_LINE] for line in lines], True
            rest, size = [last], len(last)
    *lines, last = _unescape(b"".join(rest)[:MAX_LINE])
    if lines:
        yield lines, True
    if last:
        yield [last], False


def parse_log(chunks: Iterable[bytes]) -> Reading:
    """Parse a log in chunks that may be cut anywhere. Lines that are not NCCL's are skipped.

    Memory is bounded by the number of different links, not by the log. A last line without an end
    is left out: it may lack the suffix that proves GPUDirect.
    """
    reading = Reading()
    counted: dict[bytes, int] = {}
    for block, ended in split_lines(chunks):
        reading.lines += len(block)
        for line in block:
            if (key := _relevant_part(line)) is None:
                continue
            if not ended:
                reading.truncated = True
                continue
            counted[key] = counted.get(key, 0) + 1
            if len(counted) >= _BATCH:
                _parse_counted(reading, counted)
    _parse_counted(reading, counted)
    return reading


def merge_readings(readings: Iterable[Reading]) -> Reading:
    """Merge several logs into one; links and warnings in more than one of them count once."""
    merged = Reading()
    for reading in readings:
        merged.add_reading(reading)
    return merged


def local_links(reading: Reading) -> frozenset[NcclLink]:
    """Return the links inside one host: without P2P and shared memory, NCCL uses the network."""
    named = {link.host for link in reading.links}.union(
        *(ranks.values() for ranks in reading.ranks.values())
    )
    if reading.nodes > len(named):
        return frozenset()  # some host's log is missing, or two hosts have one name
    ends: dict[tuple[int, int, str], list[NcclLink]] = {}
    for link in reading.links:
        ends.setdefault((link.source, link.target, link.channel), []).append(link)
    return frozenset(link for links in ends.values() if _is_local(links) for link in links)


def count_unlinked_ranks(reading: Reading) -> tuple[int, int]:
    """Return how many ranks have inter-node links, and of how many, for the communicator with the
    widest gap; (0, 0) if none is known to be missing.

    A rank counts with the links of its host: only some ranks of a node have links to others.
    """
    linked = {link.host for link in reading.links}
    writers = {link.writer for link in reading.links}
    widest_gap = (0, 0)
    largest = sorted(reading.sizes.items(), key=itemgetter(1), reverse=True)[:64]
    for communicator, size in largest:
        ranks = reading.ranks[communicator]
        if len(ranks) >= size and len(set(ranks.values())) == 1:
            continue  # inside a node
        linked_ranks = {rank for rank, host in ranks.items() if host in linked} | {
            rank for rank in writers if rank < size
        }
        if size - len(linked_ranks) > widest_gap[1] - widest_gap[0]:
            widest_gap = (len(linked_ranks), size)
    return widest_gap


def _parse_host(head: str) -> str:
    """Return the host of `host:pid:tid` before NCCL's `[device]`; empty if there is none."""
    match = _PREFIX.search(head.rpartition(" [")[0].rpartition(" ")[2])
    return match[1] if match else ""


def _has_room(collection: Mapping[str, object], key: str, limit: int) -> bool:
    return key in collection or len(collection) < limit


def _host_entry(by_host: dict[str, dict[Any, Any]], host: str) -> dict[Any, Any]:
    return by_host.setdefault(host, {}) if _has_room(by_host, host, MAX_HOSTS) else {}


def _add_text(texts: dict[str, None], text: str, *, limit: int = MAX_TEXTS) -> None:
    if text and len(texts) < limit:
        texts[text] = None


def _is_escaped(text: bytes) -> bool:
    return b"\\n" in text or b"\\u003" in text or b'{"' in text


def _unescape(line: bytes) -> list[bytes]:
    """Split a line of JSON into the lines of its strings."""
    if not _is_escaped(line):
        return [line]
    for code, meaning in _ESCAPES:
        line = line.replace(code, meaning)
    return line.split(b"\n")


def _is_local(links: Sequence[NcclLink]) -> bool:
    """True if one host wrote both the `send` and the `receive` of a channel, and no other host any.
    A host without a name, or with a placeholder (`<node>`), could be any.
    """
    (host, *others) = {link.host for link in links}
    directions = {link.direction for link in links}
    return not others and directions == {"send", "receive"} and host[:1] not in ("", "<")


def _parse_counted(reading: Reading, counted: dict[bytes, int]) -> None:
    """Parse the counted lines and clear the counts."""
    for line, times in counted.items():
        reading.add_line(line, times)
    counted.clear()


def _relevant_part(line: bytes) -> bytes | None:
    """Return the part of a line to parse; `None` if the line is irrelevant."""
    start = line.find(b"CCL INFO ")
    if start >= 0:
        # From `host:pid:tid [device] NCCL INFO` on: what stands before, such as a time stamp, makes
        # equal lines differ.
        bracket = line.rfind(b" [", 0, start)
        return line[line.rfind(b" ", 0, bracket) + 1 :] if bracket > 0 else line
    return line if any(marker in line for marker in _MARKERS) else None
