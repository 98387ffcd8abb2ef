"""What NCCL (or RCCL) wrote about its links, of any origin and age, read as a stream: a log may be
larger than the memory.

The forms of the lines are in `lines`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter

from launcher.tools.nccl import lines
from launcher.tools.nccl.found import MAX_LINKS, LogContents
from launcher.tools.nccl.shape import Link, Reading

__all__ = ["MAX_LINKS", "Link", "Reading", "inside", "merge", "read", "unseen"]

_SOON = 50_000  # different lines that are counted before they are understood


def read(chunks: Iterable[bytes]) -> Reading:
    """Read a log that comes in blocks, cut anywhere; any bytes are read, and what is not a line of
    NCCL tells nothing.

    What is kept is bounded by the number of different links, not by the log.
    """
    found = LogContents()
    counted: dict[bytes, int] = {}
    for block, ended in lines.split(chunks):
        found.lines += len(block)
        for line in block:
            records = (line,) if line.count(b"CCL ") < 2 else lines.unglue(line)
            for record in records:
                if (key := _key(record)) is None:
                    continue
                if not ended and record is records[-1]:
                    found.take(counted)
                    found.last(key)
                    continue
                counted[key] = counted.get(key, 0) + 1
                if len(counted) >= _SOON:
                    found.take(counted)
    found.take(counted)
    return found.reading()


def merge(readings: Iterable[Reading]) -> Reading:
    """Put several logs together, as if they were one; links and warnings that are in more than one
    of them count once.
    """
    found = LogContents()
    for each in readings:
        found.add(each)
    return found.reading()


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


def _near(links: Sequence[Link]) -> bool:
    """True when one host wrote both the `send` and the `receive` of a channel, and no other host
    any. A host without a name, or with a placeholder (`<node>`), could be any.
    """
    (host, *others) = {link.host for link in links}
    directions = {link.direction for link in links}
    return not others and directions == {"send", "receive"} and host[:1] not in ("", "<")


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
        if _inside_a_node(ranks, size):
            continue
        seen = {rank for rank, host in ranks.items() if host in linked} | {
            rank for rank in wrote if rank < size
        }
        if size - len(seen) > worst[1] - worst[0]:
            worst = (len(seen), size)
    return worst


def _inside_a_node(ranks: Mapping[int, str], size: int) -> bool:
    """True when all ranks of a communicator are known, and are in one node."""
    return len(ranks) >= size and len(set(ranks.values())) == 1


def _key(line: bytes) -> bytes | None:
    """Return the part of a line that tells something, `None` when none does."""
    at = line.find(b"CCL INFO ")
    if at >= 0:
        # From `host:pid:tid [device] NCCL INFO` on: what stands before, such as a time stamp, makes
        # equal lines differ.
        bracket = line.rfind(b" [", 0, at)
        return line[line.rfind(b" ", 0, bracket) + 1 :] if bracket > 0 else line
    if (
        b"CCL" in line
        or b"NET/" in line
        or b" via " in line
        or b"nccl==" in line
        or b"Bootstrap" in line
    ):
        return line
    return None
