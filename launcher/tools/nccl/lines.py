"""The sentences of NCCL and RCCL that tell something about links, one by one: NCCL 2.4 to 2.30,
RCCL, behind any prefix.

Sources: NVIDIA/nccl src/transport/{net,p2p,shm,coll_net,net_socket}.cc and net_ib, init.cc,
bootstrap.cc, debug.cc, graph/topo.cc at its tags; ROCm/rccl has the same files, and appends `comm
POINTER nRanks N`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from launcher.payload.network_links import via
from launcher.tools.untrusted import plain

BLOCK = 1 << 20
MAX_LINE = 64 << 10  # bytes of a line that are looked at
MAX_TEXT = 300  # characters of a line that are kept as a warning


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What one line says; `network` with a `source` is a link, `local` the kind of a link inside a
    node.

    `cut` is for the last line of a log that does not end with a line break: `surely` when it breaks
    off within a word that matters, `maybe` when `/GDRDMA` could have followed. `alarm`: NCCL itself
    calls the warning WARN. `rank` of `ranks` goes with `communicator`; `nodes` is how many nodes a
    communicator has; `provider` is libfabric's.
    """

    host: str = ""
    network: str = ""
    source: int = 0
    target: int = 0
    channel: str = ""
    direction: str = ""
    device: int | None = None
    gpudirect: bool = False
    local: str = ""
    using: str = ""
    devices: tuple[tuple[int, str], ...] = ()
    fabric: str = ""
    communicator: str = ""
    version: str = ""
    gdr_disabled: str = ""
    warning: str = ""
    cut: str = ""
    alarm: bool = False
    provider: str = ""
    collnet: bool = False
    rank: int = 0
    ranks: int = 0
    nodes: int = 0


# `Ring` until 2.6; the brackets hold a bus id (hexadecimal), a device number, or are missing (2.4).
_CHANNEL = re.compile(
    r"(?:Channel|Ring) (\d{1,6}(?:/\d{1,6})?) ?: (\d{1,9})(?:\[[^\]]{0,32}\])? ->"
    r" (\d{1,9})(?:\[[^\]]{0,32}\])?"
    r"(?: \[(send|receive)\])? via (.+)"
)
# Most lines of most logs, matched without more ado; what is not in this form is looked at more
# closely.
USUAL = re.compile(
    r"([\w.-]*):\d{1,10}:\d{1,10} \[\d{1,4}\] [NR]CCL INFO (?:Channel|Ring)"
    r" (\d{1,6}(?:/\d{1,6})?) ?: "
    r"(\d{1,9})(?:\[\w{1,32}\])? -> (\d{1,9})(?:\[\w{1,32}\])?(?: \[(send|receive)\])? via ([A-Z2]["
    r" -Z^-~]{1,120})",
    re.ASCII,
)
_BROKEN = re.compile(r"(?:Channel|Ring) \d{1,6}(?:/\d{0,6})?(?: ?(?:: ?(?:\d[^:]{0,120})?)?)?$")
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
_VERSION = re.compile(r"(?:\b[NR]CCL version ?:? ?|\bnccl==)(\d[\w.+-]{0,40})")
_GDR_OFF = re.compile(
    r"GPU Direct RDMA Disabled for (?:[^/]{0,60}/ )?(HCA \d{1,6})(?: '([^']{1,60})')?"
)
# Sentences that are worth showing although they are not called a warning.
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
# Where a record begins: `host:pid:tid [device] NCCL INFO`, or `… [device] file.cc:12 (function)
# NCCL WARN`.
_START = re.compile(
    rb"([\w.<>-]{1,255}):\d{1,10}:\d{1,10} \[\d{1,4}\] (?=[NR]CCL |[\w./]+:\d{1,6} )"
)
# What a path ends with, when the next record's host follows it without a break.
_PATH_END = re.compile(rb"GDRDMA|Shared|MNNVL|IPC|CUMEM|read|direct|CE|\d{1,4}(?=[A-Za-z_])")
_ESCAPED = (
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
_PREFIX = re.compile(r"([A-Za-z0-9_.<][\w.<>-]*|):\d{1,10}:\d{1,10}$")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")


def split(chunks: Iterable[bytes]) -> Iterator[tuple[list[bytes], bool]]:
    """Yield the lines of a stream, many at a time, `MAX_LINE` bytes of each at most; false with a
    last line that has no end.

    A carriage return ends a line, too; what stands escaped in JSON (or in Python's `repr`) comes as
    the lines it stands for.
    """
    rest: list[bytes] = []
    size = 0
    for block in _newlines(chunks):
        first, *more = block.split(b"\n")
        if size <= MAX_LINE:
            rest.append(first)
            size += len(first)
        if more:
            lines = [b"".join(rest), *more]
            last = lines.pop()
            escaped = _escaped(block) or _escaped(lines[0])
            lines = [line[:MAX_LINE] for line in lines]
            yield _all_plain(lines) if escaped else lines, True
            rest, size = [last], len(last)
    line = b"".join(rest)[:MAX_LINE]
    if line:
        *lines, last = _plain(line)
        if lines:
            yield lines, True
        yield [last], False


def unglue(line: bytes) -> list[bytes]:
    """Return the records of a line to which several processes have written without a line break
    between them.
    """
    starts = list(_START.finditer(line))
    cuts = [0]
    for start in starts[1:]:
        host, at = start[1], start.start()
        if host.endswith(starts[0][1]):
            at = start.end(1) - len(starts[0][1])
        elif line[at - 1 : at] == b"/" and (match := _PATH_END.match(host)):
            at += match.end()
        cuts.append(at)
    return [line[a:b] for a, b in zip(cuts, [*cuts[1:], len(line)], strict=True)]


def _newlines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield blocks in which every line ends with a line feed alone."""
    held = b""
    for chunk in chunks:
        for at in range(0, len(chunk), BLOCK):
            block = chunk[at : at + BLOCK]
            if held or b"\r" in block:
                block = held + block
                held = b"\r" if block.endswith(b"\r") else b""
                block = (
                    (block[:-1] if held else block).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
                )
            yield block
    if held:
        yield b"\n"


def _escaped(text: bytes) -> bool:
    return b"\\n" in text or b"\\u003" in text or b'{"' in text


def _plain(line: bytes) -> list[bytes]:
    """Return what a line of JSON stands for: its strings, each line of them by itself."""
    if not _escaped(line):
        return [line]
    for code, meaning in _ESCAPED:
        line = line.replace(code, meaning)
    return line.split(b"\n")


def _all_plain(lines: Iterable[bytes]) -> list[bytes]:
    return [part for line in lines for part in _plain(line)]


def said(text: str) -> Said | None:
    """Return what a line says, `None` when it tells nothing; it may still have colours and what was
    put round it.
    """
    text = text if text.isprintable() else plain(text)
    text = _REPEATED.sub("", text) if "[repeated" in text else text.strip()
    head, info, body = text.partition("CCL INFO ")
    if not info:
        head, info, body = text.partition("CCL WARN ")
        if info:
            return Said(
                host=_host(head), warning=body[:MAX_TEXT], version=_version(body), alarm=True
            )
        head, body = "", text
    if " via " in body and (match := _CHANNEL.search(body)):
        return _link(_host(head), match)
    found = _sentence(body)
    return replace(found, host=_host(head)) if found is not None else None


def _host(head: str) -> str:
    """Return the host of `host:pid:tid`, the last word before NCCL's `[device]`; empty when there
    is none.
    """
    match = _PREFIX.search(head.rpartition(" [")[0].rpartition(" ")[2])
    return match[1] if match else ""


def _communicator(match: re.Match[str]) -> Said:
    known = int(match[3], 16) != 0
    return Said(
        communicator=match[3].lower() if known else "", rank=int(match[1]), ranks=int(match[2])
    )


def _devices(match: re.Match[str]) -> Said:
    devices = tuple((int(at), name) for at, name in _DEVICE.findall(match[2]))
    return Said(fabric=match[1], devices=devices)


# What a sentence says; the first form that it has counts.
_SENTENCES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], Said]], ...] = (
    (_COMMUNICATOR, _communicator),
    (_NODES, lambda match: Said(nodes=int(match[1]))),
    (_PROVIDER, lambda match: Said(provider=match[1].lower())),
    (re.compile(" via COLLNET/"), lambda _: Said(collnet=True)),
    (_DEVICES, _devices),
    (_USING, lambda match: Said(using=match[1])),
)


def _sentence(text: str) -> Said | None:
    """Return what a sentence says that is not about one link."""
    for form, meaning in _SENTENCES:
        if match := form.search(text):
            return meaning(match)
    return _remark(text)


def _remark(text: str) -> Said | None:
    """Return what is worth showing of a sentence in no form that is read."""
    off = _GDR_OFF.search(text)
    telling = _TELLING.search(text) is not None
    version = _version(text)
    if telling or version:
        return Said(
            warning=text[:MAX_TEXT] if telling else "",
            version=version,
            gdr_disabled=(off[2] or off[1]) if off else "",
        )
    return Said(cut="surely") if _BROKEN.search(text) else None


def _version(text: str) -> str:
    match = _VERSION.search(text)
    return match[1].rstrip(".") if match else ""


def _link(host: str, match: re.Match[str]) -> Said:
    channel, source, target, direction, path = match.groups("")
    network, device, gpudirect, local, cut = via(path)
    if local:
        return Said(local=local)
    return Said(
        host=host,
        network=network,
        source=int(source),
        target=int(target),
        channel=channel,
        direction=direction,
        device=device,
        gpudirect=gpudirect,
        cut=cut,
    )
