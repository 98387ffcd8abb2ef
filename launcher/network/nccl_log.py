"""Links between nodes and other facts in logs of NCCL (2.4 to 2.30) or RCCL, of any origin: escaped
in JSON or not, with any line ends, and read as a stream, for a log may be larger than the memory.

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

from launcher.core.untrusted import plain
from launcher.network.probe.network_links import via

# Different links that are kept; 64 nodes of 8 GPUs with 32 channels have about 33,000.
MAX_LINKS = 100_000
MAX_TEXTS = 200
MAX_HOSTS = 4096
_MAX_TEXT = 300  # characters of a line that are kept as a warning

# `Ring` until 2.6; the brackets hold a bus id (hexadecimal), a device number, or are missing (2.4).
_CHANNEL = re.compile(
    r"(?:Channel|Ring) (\d{1,6}(?:/\d{1,6})?) ?: (\d{1,9})(?:\[[^\]]{0,32}\])? ->"
    r" (\d{1,9})(?:\[[^\]]{0,32}\])?"
    r"(?: \[(send|receive)\])? via (.+)"
)
_USING = re.compile(
    r"(?:Using network|Assigned NET plugin) ([^\r\n]{1,64}?)(?: to comm\b.*| comm 0x.*)?\s*$"
)
_DEVICES = re.compile(r"NET/([^:/]{1,40}?) ?: Using ?(\[\d.*)")
_DEVICE = re.compile(r"\[(\d{1,6})\]([^\s;]{1,80})")
_COMMUNICATOR = re.compile(r"\brank (\d{1,9}) nranks (\d{1,9}) .*\bcommId (0x[0-9a-fA-F]{1,32})")
_NODES = re.compile(r"\bnRanks \d{1,9} nNodes (\d{1,9})\b")
# aws-ofi-nccl: `Selected Provider is efa (found 4 nics)`, later `Selected provider is efa, fabric
# is efa (found 4 nics)`.
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w.;-]{1,60})")
VERSION = re.compile(r"(?:\b[NR]CCL version ?:? ?|\bnccl==)(\d[\w.+-]{0,40})")
# Sentences that explain something although NCCL does not call them a warning.
_TELLING = re.compile(
    r"NET/[^:]{1,40}: No device found|Unable to open device|No usable listening interface|no"
    r" (?:socket )?interface found"
    r"|GPU Direct RDMA Disabled for|ailed to open (?:libibverbs|libmlx5)|No plugin found|Could not"
    r" find: ?\S*lib[nr]ccl-net"
    r"|Plugin load .{0,80}returned|lib[nr]ccl-net\S*: undefined symbol|NET/Plugin ?: ?\S+: cannot"
    r" open|Plugin name set by env"
    r"|[Ff]ailed to (?:load|initialize) .{0,40}plugin|Failed to find ncclNetPlugin symbol"
    r"|returned (?:No route to host|Connection refused|Connection timed out|Network is unreachable)"
    r"|NCCL_(?:IB_\w+|NET\w*|SOCKET_IFNAME|P2P_\w+|DMABUF_ENABLE|HOSTID) set (?:by environment )?to"
    r"|Cannot allocate memory|ibv_\w+ failed|GID (?:table|index)|(?:local|remote) ?GID|incorrect"
    r" GID|unhandled system error"
    r"|DMA-?BUF (?!is available)|peermem"
)
_PREFIX = re.compile(r"([A-Za-z0-9_.<][\w.<>-]*|):\d{1,10}:\d{1,10}$")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
MAX_LINE = 64 << 10  # bytes of a line that are kept
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
_SOON = 50_000  # different lines that are counted before they are parsed
_MARKERS = (b"CCL", b"NET/", b" via ", b"nccl==", b"Bootstrap")


class Link(NamedTuple):
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
    """The facts of a log. Every collection has a limit, so that no log can fill the memory.

    `links` has each link once, `network_links` counts the lines, `local` those inside nodes by kind
    (`P2P`, `SHM`). `using` are the networks that NCCL announced. `devices` has the network devices
    by host and NCCL's index where a `NET/IB : Using` line names them (`mlx5_0:1/RoCE`); `providers`
    are libfabric's, by host. `warnings` has the hosts that wrote each WARN or telling INFO line,
    `alarms` are those that NCCL itself calls WARN. `ranks` is the host of each rank that announced
    itself in a communicator (`commId`), `sizes` how many ranks that has, `nodes` the most nodes of
    a communicator. `truncated`: the log ends within a line; `overflow`: it has more links than are
    kept.
    """

    links: dict[Link, None] = field(default_factory=dict)
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
        """True when a link is multi-node NVLink."""
        return any(link.network == "MNNVL" for link in self.links)

    def note(self, line: bytes, times: int) -> None:
        """Take in a line that occurs so often; it may have colours and any prefix."""
        text = line.decode("utf-8", "replace")
        text = text if text.isprintable() else plain(text)
        text = _REPEATED.sub("", text) if "[repeated" in text else text.strip()
        head, info, body = text.partition("CCL INFO ")
        if not info:
            head, alarm, body = text.partition("CCL WARN ")
            if alarm:
                self._warn(body[:_MAX_TEXT], [_host(head)], alarm=True)
                self._version(body)
                return
            head, body = "", text
        if " via " in body and (match := _CHANNEL.search(body)):
            self._channel(_host(head), match, times)
        else:
            self._sentence(_host(head), body)

    def add(self, other: Reading) -> None:
        """Take in another log, as if both were one; links and warnings of both count once."""
        self.lines += other.lines
        self.network_links += other.network_links
        self.truncated |= other.truncated
        self.overflow |= other.overflow
        self.nodes = max(self.nodes, other.nodes)
        for link in other.links:
            self._link(link)
        for kind, count in other.local.items():
            self.local[kind] = self.local.get(kind, 0) + count
        for mine, theirs in ((self.using, other.using), (self.versions, other.versions)):
            for name in theirs:
                _put(mine, name)
        for text, hosts in other.warnings.items():
            self._warn(text, hosts, alarm=text in other.alarms)
        for host, names in other.devices.items():
            self.devices.setdefault(host, {}).update(names)
        for host, providers in other.providers.items():
            self.providers.setdefault(host, {}).update(providers)
        for communicator, ranks in other.ranks.items():
            self._members(communicator, other.sizes.get(communicator, 0), ranks)

    def _channel(self, host: str, match: re.Match[str], times: int) -> None:
        channel, source, target, direction, path = match.groups("")
        network, device, gpudirect, local = via(path)
        if local:
            self.local[local] = self.local.get(local, 0) + times
        elif network:
            self.network_links += times if network != "MNNVL" else 0
            ranks = int(source), int(target)
            self._link(Link(*ranks, channel, direction, network, device, gpudirect, host))

    def _link(self, link: Link) -> None:
        kind = link.network, link.gpudirect
        if link in self.links:
            return
        if len(self.links) >= MAX_LINKS:
            self.overflow = True
            # The worst kind decides the verdict: one link of each kind is kept.
            if kind in self._kinds or len(self._kinds) >= MAX_TEXTS:
                return
        self._kinds.add(kind)
        self.links[link] = None

    def _sentence(self, host: str, text: str) -> None:
        """Take in a sentence that is not about one link, by the first form that it has."""
        if match := _COMMUNICATOR.search(text):
            communicator = match[3].lower()
            if host and int(communicator, 16):
                self._members(communicator, int(match[2]), {int(match[1]): host})
        elif match := _NODES.search(text):
            self.nodes = max(self.nodes, int(match[1]))
        elif match := _PROVIDER.search(text):
            _put(_of_host(self.providers, host), match[1].lower())
        elif match := _DEVICES.search(text):
            self._name_devices(host, match)
        elif match := _USING.search(text):
            _put(self.using, match[1])
        else:
            self._warn(text[:_MAX_TEXT] if _TELLING.search(text) else "", [host])
            self._version(text)

    def _members(self, communicator: str, size: int, ranks: Mapping[int, str]) -> None:
        """Note the hosts of ranks; the first host of a rank counts, since equal lines are counted
        together. As many ranks are kept as links.
        """
        self.sizes[communicator] = max(self.sizes.get(communicator, 0), size)
        host_of_rank = self.ranks.setdefault(communicator, {})
        for rank, host in ranks.items():
            if rank not in host_of_rank and self._announced >= MAX_LINKS:
                return
            self._announced += rank not in host_of_rank
            host_of_rank.setdefault(rank, host)

    def _name_devices(self, host: str, match: re.Match[str]) -> None:
        """Name a host's devices; names of interfaces do not replace others."""
        names = _of_host(self.devices, host)
        for index, name in _DEVICE.findall(match[2]):
            if match[1] == "Socket":
                names.setdefault(int(index), name)
            else:
                names[int(index)] = name

    def _version(self, text: str) -> None:
        if match := VERSION.search(text):
            _put(self.versions, match[1].rstrip("."))

    def _warn(self, text: str, hosts: Iterable[str], *, alarm: bool = False) -> None:
        if not text or not _has_room(self.warnings, text, MAX_TEXTS):
            return
        if alarm:
            self.alarms[text] = None
        writers = self.warnings.setdefault(text, {})
        for host in hosts:
            _put(writers, host, limit=MAX_HOSTS)


def split_lines(chunks: Iterable[bytes]) -> Iterator[tuple[list[bytes], bool]]:
    """Yield the lines of a stream, many at a time, at most `MAX_LINE` bytes of each; false with a
    last line that has no end.

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


def read(chunks: Iterable[bytes]) -> Reading:
    """Read a log that comes in blocks, cut anywhere. Any bytes are read; a line that is not NCCL's
    is skipped.

    What is kept is bounded by the number of different links, not by the log. A last line without an
    end may lack the word that proves GPUDirect: it is left out.
    """
    reading = Reading()
    counted: dict[bytes, int] = {}
    for block, ended in split_lines(chunks):
        reading.lines += len(block)
        for line in block:
            if (key := _key(line)) is None:
                continue
            if not ended:
                reading.truncated = True
                continue
            counted[key] = counted.get(key, 0) + 1
            if len(counted) >= _SOON:
                _take(reading, counted)
    _take(reading, counted)
    return reading


def merge(readings: Iterable[Reading]) -> Reading:
    """Put several logs together, as if they were one; links and warnings that are in more than one
    of them count once.
    """
    merged = Reading()
    for reading in readings:
        merged.add(reading)
    return merged


def inside(reading: Reading) -> frozenset[Link]:
    """Return the links of which both ends are in one host: without P2P and shared memory, NCCL uses
    the network there, too.
    """
    named = {link.host for link in reading.links}.union(
        *(ranks.values() for ranks in reading.ranks.values())
    )
    if reading.nodes > len(named):
        return frozenset()  # some host's log is missing, or two hosts have one name
    ends: dict[tuple[int, int, str], list[Link]] = {}
    for link in reading.links:
        ends.setdefault((link.source, link.target, link.channel), []).append(link)
    return frozenset(link for links in ends.values() if _near(links) for link in links)


def unseen(reading: Reading) -> tuple[int, int]:
    """Return of how many ranks of how many there are links between nodes; (0, 0) where none is
    known to be missing.

    A rank counts with the links of its host: of the ranks of a node only some have links to others.
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


def _host(head: str) -> str:
    """Return the host of `host:pid:tid`, the last word before NCCL's `[device]`; empty where there
    is none.
    """
    match = _PREFIX.search(head.rpartition(" [")[0].rpartition(" ")[2])
    return match[1] if match else ""


def _has_room(collection: Mapping[str, object], key: str, limit: int) -> bool:
    return key in collection or len(collection) < limit


def _of_host(by_host: dict[str, dict[Any, Any]], host: str) -> dict[Any, Any]:
    return by_host.setdefault(host, {}) if _has_room(by_host, host, MAX_HOSTS) else {}


def _put(texts: dict[str, None], text: str, *, limit: int = MAX_TEXTS) -> None:
    if text and len(texts) < limit:
        texts[text] = None


def _is_escaped(text: bytes) -> bool:
    return b"\\n" in text or b"\\u003" in text or b'{"' in text


def _unescape(line: bytes) -> list[bytes]:
    """Return the strings of a line of JSON, each line of them by itself."""
    if not _is_escaped(line):
        return [line]
    for code, meaning in _ESCAPES:
        line = line.replace(code, meaning)
    return line.split(b"\n")


def _near(links: Sequence[Link]) -> bool:
    """True when one host wrote both the `send` and the `receive` of a channel, and no other host
    any. A host without a name, or with a placeholder (`<node>`), could be any.
    """
    (host, *others) = {link.host for link in links}
    directions = {link.direction for link in links}
    return not others and directions == {"send", "receive"} and host[:1] not in ("", "<")


def _take(reading: Reading, counted: dict[bytes, int]) -> None:
    """Parse lines that were counted, and forget the counts."""
    for line, times in counted.items():
        reading.note(line, times)
    counted.clear()


def _key(line: bytes) -> bytes | None:
    """Return the part of a line that tells something, `None` when none does."""
    start = line.find(b"CCL INFO ")
    if start >= 0:
        # From `host:pid:tid [device] NCCL INFO` on: what stands before, such as a time stamp, makes
        # equal lines differ.
        bracket = line.rfind(b" [", 0, start)
        return line[line.rfind(b" ", 0, bracket) + 1 :] if bracket > 0 else line
    return line if any(marker in line for marker in _MARKERS) else None
