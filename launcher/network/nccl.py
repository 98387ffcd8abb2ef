"""Logs of NCCL (or RCCL), of any origin and age, read as a stream: a log may be larger than the
memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter

from launcher.network import nccl_lines
from launcher.network.nccl_log import MAX_LINKS, Link, Reading

__all__ = ["MAX_LINKS", "Link", "Reading", "inside", "merge", "read", "unseen"]

_SOON = 50_000  # different lines that are counted before they are parsed
_TELLING = (b"CCL", b"NET/", b" via ", b"nccl==", b"Bootstrap")


def read(chunks: Iterable[bytes]) -> Reading:
    """Read a log that comes in blocks, cut anywhere. Any bytes are read; a line that is not NCCL's
    is skipped.

    What is kept is bounded by the number of different links, not by the log. A last line without an
    end may lack the word that proves GPUDirect: it is left out.
    """
    reading = Reading()
    counted: dict[bytes, int] = {}
    for block, ended in nccl_lines.split(chunks):
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
    wrote = {link.writer for link in reading.links}
    worst = (0, 0)
    largest = sorted(reading.sizes.items(), key=itemgetter(1), reverse=True)[:64]
    for communicator, size in largest:
        ranks = reading.ranks[communicator]
        if len(ranks) >= size and len(set(ranks.values())) == 1:
            continue  # inside a node
        seen = {rank for rank, host in ranks.items() if host in linked} | {
            rank for rank in wrote if rank < size
        }
        if size - len(seen) > worst[1] - worst[0]:
            worst = (len(seen), size)
    return worst


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
    at = line.find(b"CCL INFO ")
    if at >= 0:
        # From `host:pid:tid [device] NCCL INFO` on: what stands before, such as a time stamp, makes
        # equal lines differ.
        bracket = line.rfind(b" [", 0, at)
        return line[line.rfind(b" ", 0, bracket) + 1 :] if bracket > 0 else line
    return line if any(word in line for word in _TELLING) else None
