"""Bring a batch's output from the head to this machine: only what is missing, whole files only,
each verified.

Nothing on this machine is replaced or removed but files that carry the names of a batch's parts, in
a folder that carries the mark of this very job.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from launcher.errors import BatchError, NodeError, RequestError, UnreadableAnswer, VlaunchError
from launcher.events import Event
from launcher.model import Answer, Argv
from launcher.site import Site
from launcher.tools import job_store
from launcher.tools.job_store import Output
from launcher.transport import Transport

# bytes of one answer: an answer is cut at 8 MiB, and base64 makes it a third longer
PIECE = 4 * 2**20
_STAGE = "gather"
_MARK = ".vlaunch-batch.json"
_LOST = 45.0  # seconds without an answer until gathering is given up
_SPARE = 2**30  # bytes that stay free on this machine
_TELL = 10.0  # seconds between two lines where every line stays
_FOLDERS = ("rows", "errors")
_OTHER = "name another folder (`write:`, or `--output`), or move it away"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A folder of this machine that holds the output of one job: `digest` says of what it is
    made.
    """

    path: Path
    shown: str
    cluster: str
    job: str
    digest: str

    @property
    def mark(self) -> dict[str, str]:
        """What the folder says of itself."""
        return {"cluster": self.cluster, "job": self.job, "digest": self.digest}

    def parts(self) -> list[str]:
        """Return the output files that are there, as paths relative to the folder."""
        return sorted(name for name in self._names() if job_store.OUTPUT.fullmatch(name))

    def strangers(self) -> list[str]:
        """Return what lies among the output and is none of a job's files; halves that a gathering
        left are none either.
        """
        whole = (
            (name, name.replace("/.part-", "/part-").removesuffix("~")) for name in self._names()
        )
        return sorted(name for name, meant in whole if not job_store.OUTPUT.fullmatch(meant))

    def _names(self) -> Iterator[str]:
        for folder in _FOLDERS:
            if (self.path / folder).is_dir():
                yield from (f"{folder}/{each.name}" for each in (self.path / folder).iterdir())


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """What was done: files that were fetched, that were there already, and that were removed;
    `bytes` of the fetched.
    """

    fetched: int
    kept: int
    removed: int
    bytes: int


def check(target: Target, *, begun: bool, restart: bool) -> None:
    """See that the folder may take the output; touches nothing.

    Args:
        target: the folder.
        begun: the head has, or had, rows of this job.
        restart: the job is begun anew, so that older output of it will be removed.

    Raises:
        RequestError: the folder holds something else.
    """
    _see_folders(target)
    mark = _read_mark(target)
    _see_strangers(target, marked=mark is not None)
    if parts := target.parts():
        _see_whose(target, mark or {}, parts)
    if parts and not restart:
        _see_alike(target, mark or {}, parts, begun=begun)


def _see_folders(target: Target) -> None:
    """Raise RequestError where a folder is something else."""
    for path in (target.path, *(target.path / folder for folder in _FOLDERS)):
        if path.exists() and not path.is_dir():
            raise RequestError(f"the output should be a folder, and {path} is none", hint=_OTHER)
    # Where a link leads is not what was named: a job that somebody else wrote may have brought it
    # along.
    if links := [folder for folder in _FOLDERS if (target.path / folder).is_symlink()]:
        raise RequestError(
            f"{target.shown} holds links, through which nothing is written",
            evidence=links,
            hint=_OTHER,
        )


def _see_strangers(target: Target, *, marked: bool) -> None:
    """Raise RequestError where files lie among the output that no gathering put there."""
    strangers = target.strangers()
    if not marked and os.path.lexists(target.path / "summary.json"):
        strangers.append("summary.json")
    if strangers:
        raise RequestError(
            f"{target.shown} holds files that are no output of vlaunch",
            evidence=_some(strangers),
            hint=_OTHER,
        )


def _see_whose(target: Target, mark: Mapping[str, str], parts: list[str]) -> None:
    """Raise RequestError where the output is another job's."""
    if (mark.get("job"), mark.get("cluster")) == (target.job, target.cluster):
        return
    whose = (
        f"batch job `{mark.get('job')}` of cluster {mark.get('cluster')}"
        if mark
        else "another batch job"
    )
    raise RequestError(
        f"{target.shown} holds the output of {whose}", evidence=_some(parts), hint=_OTHER
    )


def _see_alike(target: Target, mark: Mapping[str, str], parts: list[str], *, begun: bool) -> None:
    """Raise RequestError where older output of the job is not what this run goes on with."""
    again = "begin anew with `--restart`, which removes it; or name another folder"
    if mark.get("digest") != target.digest:
        raise RequestError(
            f"{target.shown} holds output that `{target.job}` made of another input, or with other"
            " settings",
            evidence=_some(parts),
            hint=again,
        )
    if not begun:
        raise RequestError(
            f"{target.shown} holds output of `{target.job}`, of which the head knows nothing any"
            " more",
            evidence=_some(parts),
            hint=again,
        )


def claim(target: Target, *, clear: bool) -> None:
    """Make the folder this job's; with `clear` older output of it is removed.

    Raises VlaunchError when it cannot be written.
    """
    with _writing(target):
        target.path.mkdir(parents=True, exist_ok=True)
        if clear:
            for name in (*target.parts(), "summary.json"):
                (target.path / name).unlink(missing_ok=True)
        if _read_mark(target) != target.mark:
            _write(target.path / _MARK, json.dumps(target.mark).encode())


def gather(
    site: Site,
    work: str,
    target: Target,
    transport: Transport,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Generator[Event, None, Gathered]:
    """Fetch every output file that is missing here or differs, and remove error files whose rows
    have been tried again.

    Raises:
        BatchError: the head cannot be asked any more.
        NodeError: what it sent is not what it announced.
        VlaunchError: this machine cannot take the files.
    """
    output = _OnHead(site, work, transport, clock, sleep)
    yield Event(
        kind="stage", stage=_STAGE, text=f"Gather the output in {target.shown}", state="running"
    )
    files = _announced(output, target)
    with _writing(target):
        missing = [each for each in files if not _same(target.path / each.path, each)]
    gone = _outdated(output, target, files)
    total = sum(each.bytes for each in missing)
    _see_room(target, total)
    yield from _fetch_all(output, target, missing, clock)
    with _writing(target):
        for name in gone:
            (target.path / name).unlink(missing_ok=True)
    done = Gathered(
        fetched=len(missing), kept=len(files) - len(missing), removed=len(gone), bytes=total
    )
    yield Event(
        kind="step", stage=_STAGE, text=_told(done), state="ok" if missing or gone else "unchanged"
    )
    return done


def _announced(output: _OnHead, target: Target) -> list[Output]:
    """Return the files that the head has, the summary last: who sees it has all the rest.

    Raises NodeError when the head has none.
    """
    listed = output.listed()
    if not listed:
        raise NodeError(
            output.head,
            f"has no output of `{target.job}` any more, not even a summary",
            hint=(
                "somebody removed it from the job's folder on the head; begin anew with `--restart`"
            ),
        )
    return sorted(listed, key=lambda each: (each.path == "summary.json", each.path))


def _outdated(output: _OnHead, target: Target, files: Sequence[Output]) -> list[str]:
    """Return the error files here that the head has no more: their rows have been tried again.

    Raises NodeError when answers are among them.
    """
    known = {each.path for each in files}
    gone = [name for name in target.parts() if name not in known]
    if unknown := [name for name in gone if name.startswith("rows/")]:
        raise NodeError(
            output.head,
            f"does not know answers that {target.shown} holds",
            evidence=_some(unknown),
            hint=(
                "somebody changed the job's folder on the head; begin anew with `--restart`, or"
                " name another folder"
            ),
        )
    return gone


def _fetch_all(
    output: _OnHead,
    target: Target,
    files: Sequence[Output],
    clock: Callable[[], float],
) -> Iterator[Event]:
    """Fetch files one after another, and tell after each piece how far it is."""
    total, so_far, told = sum(each.bytes for each in files), 0, clock()
    for at, each in enumerate(files, start=1):
        path = target.path / each.path
        with _writing(target):
            path.parent.mkdir(parents=True, exist_ok=True)
            for count in output.fetch(path, each):
                so_far += count
                text = f"gathering file {at} of {len(files)}, {size(so_far)} of {size(total)}"
                tell, told = (True, clock()) if clock() - told >= _TELL else (False, told)
                yield Event(
                    kind="wait",
                    stage=_STAGE,
                    text=text,
                    state="running" if tell else "",
                    data={"bytes": so_far, "total": total},
                )


def _see_room(target: Target, total: int) -> None:
    """Raise VlaunchError when what is announced would fill the disk of this machine, which others
    need too.
    """
    with _writing(target):
        disk = shutil.disk_usage(target.path)
    # A part of a small disk, as file systems themselves keep it back, and of a large one what
    # nobody misses.
    room = disk.free - min(disk.total // 20, _SPARE)
    if total > max(room, 0):
        raise VlaunchError(
            f"{target.shown} has room for {size(max(room, 0))}, the output that is missing there"
            f" has {size(total)}",
            hint=(
                "free some space, or name another folder (`write:`, or `--output`); the output"
                " stays on the head"
            ),
        )


def size(count: int) -> str:
    """Write down how many bytes something has."""
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} bytes"


class _OnHead:
    """The output as it lies on the head. It is asked for until there is an answer that can be read:
    a connection may break and come back.
    """

    def __init__(
        self,
        site: Site,
        work: str,
        transport: Transport,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._site, self._work, self._transport = site, work, transport
        self._clock, self._sleep = clock, sleep

    @property
    def head(self) -> str:
        return self._site.head.name

    def listed(self) -> list[Output]:
        """Ask for all files, page after page; a page that would not lead on is the last one."""
        found: dict[str, Output] = {}
        start = ""
        while True:
            page, after = self._until_read(
                job_store.outputs(self._work, start), 900, job_store.parse_outputs
            )
            found |= {each.path: each for each in page}
            if after <= start:
                return list(found.values())
            start = after

    def fetch(self, path: Path, file: Output) -> Iterator[int]:
        """Fetch one file into a hidden one beside it, and rename it when it is what was announced;
        yields the bytes of each piece.
        """
        digest, offset = hashlib.sha256(), 0
        part = path.with_name(f".{path.name}~")
        try:
            with _new(part) as target:
                while offset < file.bytes:
                    count = min(PIECE, file.bytes - offset)
                    piece = job_store.get(self._work, file.path, offset, count)
                    data, whole = self._until_read(piece, 120, job_store.parse_piece)
                    if len(data) != count or whole != file.bytes:
                        raise self._altered(file)
                    target.write(data)
                    digest.update(data)
                    offset += count
                    yield count
                target.flush()
                os.fsync(target.fileno())
            if digest.hexdigest() != file.sha256:
                raise self._altered(file)
            part.replace(path)
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def _until_read(self, argv: Argv, timeout: float, read: Callable[[Answer], T]) -> T:
        command = self._site.inside(self._site.head, argv, timeout=timeout)
        began = self._clock()
        while True:
            (answer,) = self._transport.run([command])
            try:
                return read(answer)
            except UnreadableAnswer as error:
                # Only silence may pass: who answers nonsense once will do it again.
                if answer.code != 255 or self._clock() - began >= _LOST:
                    raise BatchError(
                        f"the output cannot be gathered: {error.message}",
                        evidence=error.evidence,
                        hint="it stays on the head: the same command fetches what is missing",
                    ) from None
            self._sleep(1.0)

    def _altered(self, file: Output) -> NodeError:
        return NodeError(
            self.head,
            f"{file.path} changed while it was fetched",
            hint="run the same command again",
        )


def _same(path: Path, file: Output) -> bool:
    """True when a file of this machine is the one that the head has."""
    if not path.is_file() or path.stat().st_size != file.bytes:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as content:
        while chunk := content.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest() == file.sha256


def _read_mark(target: Target) -> dict[str, str] | None:
    try:
        said = json.loads((target.path / _MARK).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return {str(key): str(value) for key, value in said.items()} if isinstance(said, dict) else None


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}~")
    with _new(part) as target:
        target.write(data)
    part.replace(path)


def _new(path: Path) -> BinaryIO:
    """Open a file that is new: a link in its place would be written through, to wherever it
    leads.
    """
    path.unlink(missing_ok=True)
    return path.open("xb")


@contextlib.contextmanager
def _writing(target: Target) -> Iterator[None]:
    """Say what this machine's own troubles mean for the output."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise VlaunchError(
            f"{target.shown} cannot take the output:"
            f" {'this machine’s disk is full' if full else error}",
            hint=(
                f"{'free some space' if full else 'see that it can be written'}; the output stays"
                " on the head, and the same command fetches what is missing"
            ),
        ) from None


def _some(names: list[str]) -> list[str]:
    return [*names[:5], *([f"… and {len(names) - 5} more"] if len(names) > 5 else [])]


def _told(done: Gathered) -> str:
    if not done.fetched and not done.removed:
        return f"all {done.kept} files are there"
    removed = f"; {done.removed} removed, whose error rows were tried again" if done.removed else ""
    return (
        f"{done.fetched} file{'' if done.fetched == 1 else 's'} fetched"
        f" ({size(done.bytes)}){removed}"
    )
