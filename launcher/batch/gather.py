"""Copy of a batch's output from the head: only missing files, each verified before its rename.

`output_folder` checks the local folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from launcher.batch import job_store
from launcher.batch.job_store import OutputFile
from launcher.batch.output_folder import OutputFolder, first_names, new_file
from launcher.core.errors import BatchError, NodeError, UnreadableAnswer, VlaunchError
from launcher.core.events import Event
from launcher.core.sizes import format_decimal_size
from launcher.core.transport import Transport
from launcher.tools.follow import INTERVAL, Contact
from launcher.tools.site import Site

_MAX_LIST_BYTES = 256 * 2**20  # bytes of the file list
_STAGE = "gather"
T = TypeVar("T")
# Yields the content of a file in the head's container; raises NodeError.
ReadFile = Callable[[str], Iterator[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatherResult:
    """Numbers of fetched, unchanged and removed files; `bytes` of the fetched."""

    fetched: int
    unchanged: int
    removed: int
    bytes: int


def gather(
    site: Site,
    work: str,
    folder: OutputFolder,
    transport: Transport,
    read: ReadFile,
    *,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Generator[Event, None, GatherResult]:
    """Fetch missing or differing output files, and remove error files of retried rows.

    Raises:
        BatchError: the head is unreachable.
        NodeError: a file differs from the list.
        VlaunchError: this machine cannot store the files.
    """
    output = _RemoteOutput(site, work, transport, read, clock, sleep)
    yield Event(
        kind="stage", stage=_STAGE, text=f"Gather the output in {folder.shown}", state="running"
    )
    files = _list_output(output, folder)
    with folder.writing():
        missing = [file for file in files if not folder.has(file)]
    gone = _outdated_files(output, folder, files)
    total = sum(file.bytes for file in missing)
    folder.check_room(total)
    yield from _fetch_all(output, folder, missing)
    with folder.writing():
        for name in gone:
            (folder.path / name).unlink(missing_ok=True)
    done = GatherResult(
        fetched=len(missing), unchanged=len(files) - len(missing), removed=len(gone), bytes=total
    )
    yield Event(
        kind="step",
        stage=_STAGE,
        text=_summarize(done),
        state="ok" if missing or gone else "unchanged",
    )
    return done


def _list_output(output: _RemoteOutput, folder: OutputFolder) -> list[OutputFile]:
    """Return the head's files, the summary last, as the mark of a complete copy.

    Raises NodeError when the head has none.
    """
    listed = output.list_files()
    if not listed:
        raise NodeError(
            output.head,
            f"no longer has any output of `{folder.job}`, not even a summary",
            hint="it was removed from the job's folder there; start over with `--discard-results`",
        )
    return sorted(listed, key=lambda file: (file.path == "summary.json", file.path))


def _outdated_files(
    output: _RemoteOutput, folder: OutputFolder, files: Sequence[OutputFile]
) -> list[str]:
    """Return local error files that the head no longer has: their rows were retried.

    Raises NodeError when answers are among them.
    """
    listed = {file.path for file in files}
    gone = [name for name in folder.parts() if name not in listed]
    if unknown := [name for name in gone if name.startswith("rows/")]:
        raise NodeError(
            output.head,
            f"has no record of answers in {folder.shown}",
            evidence=first_names(unknown),
            hint=(
                "the job's folder on the head was changed; start over with"
                " `--discard-results`, or name another folder"
            ),
        )
    return gone


def _fetch_all(
    output: _RemoteOutput,
    folder: OutputFolder,
    files: Sequence[OutputFile],
) -> Iterator[Event]:
    """Fetch files in order, reporting progress after each block."""
    total, so_far = sum(file.bytes for file in files), 0
    for index, file in enumerate(files, start=1):
        path = folder.path / file.path
        with folder.writing():
            path.parent.mkdir(parents=True, exist_ok=True)
            for count in output.fetch(path, file):
                now = so_far + count
                text = (
                    f"gathering file {index} of {len(files)}, {format_decimal_size(now)} of"
                    f" {format_decimal_size(total)}"
                )
                data = {"bytes": now, "total": total}
                yield Event(kind="wait", stage=_STAGE, text=text, data=data)
            so_far += file.bytes


class _RemoteOutput:
    """The output on the head. Queries are retried for a while: a connection may recover."""

    def __init__(
        self,
        site: Site,
        work: str,
        transport: Transport,
        read: ReadFile,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._site, self._work, self._transport, self._read = site, work, transport, read
        self._contact, self._sleep = Contact(clock=clock), sleep
        self._furthest = 0  # most bytes of the present file that any try has read

    @property
    def head(self) -> str:
        return self._site.head.name

    def list_files(self) -> tuple[OutputFile, ...]:
        """Return the committed files; raises BatchError."""
        command = self._site.in_container(
            self._site.head, job_store.build_command("outputs", self._work), timeout=900
        )
        while True:
            (answer,) = self._transport.run([command])
            try:
                job_store.parse_answer(answer)
                outputs = job_store.parse_outputs(self.head, self._read_list())
                self._contact.restore()
                return outputs
            except UnreadableAnswer as error:
                # Only silence is temporary: an unreadable answer would repeat.
                self._wait(error, temporary=answer.code == 255)
            except NodeError as error:
                self._wait(error)

    def fetch(self, path: Path, file: OutputFile) -> Iterator[int]:
        """Copy a file to a hidden one and rename it after verification; yield bytes so far."""
        part = path.with_name(f".{path.name}~")
        self._furthest = 0
        try:
            while True:
                try:
                    digest = yield from self._copy_file(part, file)
                    break
                except NodeError as error:
                    self._wait(error)
            if digest != file.sha256:
                raise NodeError(
                    self.head,
                    f"{file.path} changed while it was being fetched",
                    hint="run the same command again",
                )
            part.replace(path)
        finally:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)

    def _read_list(self) -> str:
        text = bytearray()
        for block in self._read(job_store.outputs_file(self._work)):
            text += block
            if len(text) > _MAX_LIST_BYTES:
                raise BatchError(f"{self.head}: the list of output files is too long")
        return text.decode(errors="replace")

    def _copy_file(self, part: Path, file: OutputFile) -> Generator[int, None, str]:
        """Write a file's content; yield bytes so far and return their SHA-256."""
        digest, count = hashlib.sha256(), 0
        with new_file(part) as out:
            for block in self._read(job_store.output_file(self._work, file)):
                count += len(block)
                if count > self._furthest:
                    self._furthest = count
                    self._contact.restore()
                if count > file.bytes:
                    return ""
                out.write(block)
                digest.update(block)
                yield count
            out.flush()
            os.fsync(out.fileno())
        return digest.hexdigest()

    def _wait(self, error: VlaunchError, *, temporary: bool = True) -> None:
        """Sleep before the next try; raises BatchError after the time limit."""
        if not temporary or self._contact.lose():
            raise BatchError(
                f"cannot fetch the output: {error.message}",
                evidence=error.evidence,
                hint="it stays on the head: the same command fetches the missing files",
            ) from None
        self._sleep(INTERVAL)


def _summarize(done: GatherResult) -> str:
    if not done.fetched and not done.removed:
        return f"all {done.unchanged} files are up to date"
    removed = f"; {done.removed} removed (their error rows were retried)" if done.removed else ""
    return (
        f"{done.fetched} file{'' if done.fetched == 1 else 's'} fetched"
        f" ({format_decimal_size(done.bytes)}){removed}"
    )
