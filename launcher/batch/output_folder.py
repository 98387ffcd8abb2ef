"""Local folder for a batch's output: checks, ownership and file creation.

Replaces or removes only files with the names of batch parts, in a folder with this job's mark.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from launcher.batch.folder import KINDS, is_marked, is_output
from launcher.batch.job_store import OutputFile
from launcher.core.errors import RequestError, VlaunchError
from launcher.core.sizes import format_decimal_size

_MARK = ".vlaunch-batch.json"
_SPARE = 2**30  # bytes kept free on this machine
_OTHER_FOLDER_HINT = "name another folder (`write:`, or `--output`), or move it away"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFolder:
    """A local folder for one job's output; `digest` is the job's identity, `shown` the path as
    written.
    """

    path: Path
    shown: str
    cluster: str
    job: str
    digest: str

    @property
    def mark(self) -> dict[str, str]:
        """Content of the folder's mark file."""
        return {"cluster": self.cluster, "job": self.job, "digest": self.digest}

    def parts(self) -> list[str]:
        """Return the existing output files, relative to the folder."""
        return sorted(name for name in self._names() if is_output(name))

    def has(self, file: OutputFile) -> bool:
        """Return True if the local file equals the head's."""
        path = self.path / file.path
        if not path.is_file() or path.stat().st_size != file.bytes:
            return False
        digest = hashlib.sha256()
        with path.open("rb") as content:
            while chunk := content.read(1 << 20):
                digest.update(chunk)
        return digest.hexdigest() == file.sha256

    def check(self, *, started: bool, restart: bool) -> None:
        """Verify that the folder may take the output; read-only.

        Args:
            started: the head has, or had, rows of this job.
            restart: older output of the job will be removed.

        Raises:
            RequestError: the folder holds something else.
        """
        self._check_folders()
        mark = self._read_mark()
        self._check_foreign_files(marked=mark is not None)
        if parts := self.parts():
            self._check_owner(mark or {}, parts)
        if parts and not restart:
            self._check_same_run(mark or {}, parts, started=started)

    def claim(self, *, clear: bool) -> None:
        """Mark the folder as this job's; with `clear`, remove its older output.

        Raises VlaunchError when it cannot be written.
        """
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            if clear:
                for name in (*self.parts(), "summary.json"):
                    (self.path / name).unlink(missing_ok=True)
            if self._read_mark() != self.mark:
                _replace_file(self.path / _MARK, json.dumps(self.mark).encode())

    def check_room(self, total: int) -> None:
        """Raise VlaunchError if `total` bytes would fill this machine's disk."""
        with self.writing():
            disk = shutil.disk_usage(self.path)
        # Spare 5 %, as file systems reserve, but at most 1 GiB.
        room = disk.free - min(disk.total // 20, _SPARE)
        if total > max(room, 0):
            free, needed = format_decimal_size(max(room, 0)), format_decimal_size(total)
            raise VlaunchError(
                f"{self.shown} has {free} free, but the missing output needs {needed}",
                hint=(
                    "free some space, or name another folder (`write:`, or `--output`); the output"
                    " stays on the head"
                ),
            )

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Translate this machine's OSErrors to VlaunchError, with the effect on the output."""
        try:
            yield
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            raise VlaunchError(
                f"{self.shown} cannot store the output:"
                f" {'this machine’s disk is full' if full else error}",
                hint=(
                    f"{'free some space' if full else 'check that it is writable'}; the output"
                    " stays on the head, and the same command fetches the missing files"
                ),
            ) from None

    def _names(self) -> Iterator[str]:
        for name in KINDS:
            if (self.path / name).is_dir():
                yield from (f"{name}/{path.name}" for path in (self.path / name).iterdir())

    def _read_mark(self) -> dict[str, str] | None:
        try:
            content = json.loads((self.path / _MARK).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        if not isinstance(content, dict):
            return None
        return {str(key): str(value) for key, value in content.items()}

    def _check_folders(self) -> None:
        """Raise RequestError if an expected folder is another kind of file."""
        for path in (self.path, *(self.path / name for name in KINDS)):
            if path.exists() and not path.is_dir():
                raise RequestError(
                    f"the output should be a folder, but {path} is not", hint=_OTHER_FOLDER_HINT
                )
        # A link leads outside the named folder: another person's job may have shipped it.
        if links := [name for name in KINDS if (self.path / name).is_symlink()]:
            raise RequestError(
                f"{self.shown} contains symbolic links, and vlaunch does not write through them",
                evidence=links,
                hint=_OTHER_FOLDER_HINT,
            )

    def _check_foreign_files(self, *, marked: bool) -> None:
        """Raise RequestError for files that no gathering wrote; its partial files pass."""
        names = (
            (name, name.replace("/.part-", "/part-").removesuffix("~")) for name in self._names()
        )
        foreign = sorted(name for name, final_name in names if not is_output(final_name))
        if not marked and os.path.lexists(self.path / "summary.json"):
            foreign.append("summary.json")
        if foreign:
            raise RequestError(
                f"{self.shown} contains files that vlaunch did not write",
                evidence=first_names(foreign),
                hint=_OTHER_FOLDER_HINT,
            )

    def _check_owner(self, mark: Mapping[str, str], parts: list[str]) -> None:
        """Raise RequestError for output of another job."""
        if is_marked(mark, self.job, self.cluster):
            return
        owner = (
            f"batch job `{mark.get('job')}` of cluster {mark.get('cluster')}"
            if mark
            else "another batch job"
        )
        raise RequestError(
            f"{self.shown} contains the output of {owner}",
            evidence=first_names(parts),
            hint=_OTHER_FOLDER_HINT,
        )

    def _check_same_run(self, mark: Mapping[str, str], parts: list[str], *, started: bool) -> None:
        """Raise RequestError for older output that this run does not continue."""
        hint = "start over with `--discard-results`, which deletes it; or name another folder"
        if mark.get("digest") != self.digest:
            raise RequestError(
                f"{self.shown} contains output that `{self.job}` wrote with another input"
                " or other settings",
                evidence=first_names(parts),
                hint=hint,
            )
        if not started:
            raise RequestError(
                f"{self.shown} contains output of `{self.job}`, but the head has no record of it",
                evidence=first_names(parts),
                hint=hint,
            )


def first_names(names: list[str]) -> list[str]:
    """Return the first five names, and the number of others."""
    return [*names[:5], *([f"… and {len(names) - 5} more"] if len(names) > 5 else [])]


def new_file(path: Path) -> BinaryIO:
    """Create a new file: an existing link would be followed."""
    path.unlink(missing_ok=True)
    return path.open("xb")


def _replace_file(path: Path, data: bytes) -> None:
    part = path.with_name(f"{path.name}~")
    with new_file(part) as out:
        out.write(data)
    part.replace(path)
