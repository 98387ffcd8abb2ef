"""The files of this machine that a job needs in the cluster: which they are, their formats, sizes
and SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from launcher.batch.driver.job import Format
from launcher.batch.places import Bounds, Misplaced, split_pattern, told
from launcher.batch.shape import Job, Source
from launcher.core.errors import RequestError
from launcher.inventory.mistakes import shown

MOST_FILES = 10_000
MOST_CODE = 16 * 2**20
_BLOCK = 4 * 2**20
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_ENDINGS: dict[str, Format] = {
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_ENDING = re.compile(r"(\.[A-Za-z0-9]+)?(\.(?:gz|zst))?$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class InputFile:
    """One file that a source names. `label` is its path below the source, or its name."""

    path: Path
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shipped:
    """One file as it lies in the job's work folder, at `to`. `label` is what the user calls it.

    `source` is the number of the source that names it, in `Job.sources`; None for code.
    """

    to: str
    label: str
    path: Path
    bytes: int
    sha256: str
    source: int | None = None


def found(source: Source, within: Bounds) -> list[InputFile]:
    """Return the files that a source on this machine names, in the order of their names.

    Folders are read to the bottom. Names that start with `.` or `_` are left out, as Ray Data and
    Spark do.

    Raises:
        Misplaced: nothing is there, or something that is no file, or that leads outside.
    """
    fixed, pattern = split_pattern(source.text, within)
    root = Path(fixed)
    try:
        paths = sorted(islice(_matches(root, pattern), MOST_FILES + 1))
    except (OSError, ValueError, NotImplementedError) as error:
        raise Misplaced(
            f"cannot be read: {getattr(error, 'strerror', None) or error}".lower()
        ) from error
    if len(paths) > MOST_FILES:
        raise Misplaced(f"{shown(source.shown)} names more than {MOST_FILES:,} files")
    if not paths:
        raise Misplaced(_nothing(root, source.shown))
    files = []
    for path in paths:
        label = path.name if path == root else path.relative_to(root).as_posix()
        files.append(InputFile(path=_regular(path, label, within), label=label))
    return files


def shipped(job: Job, progress: Callable[[int], None] | None = None) -> tuple[Shipped, ...]:
    """Read every file that is shipped with `job`, in its order: the rows first, then the code.

    Args:
        job: the checked job.
        progress: called with the number of bytes of each block that was read.

    Raises:
        RequestError: a file is not there any more, cannot be read, or all of the code is too large.
    """
    tell = progress or (lambda size: None)
    files = list(_inputs(job, tell))
    room = MOST_CODE
    for name, path in sorted(job.code.items()):
        one = _read(f"code/{name}", name, path, tell, room=room)
        room -= one.bytes
        files.append(one)
    return tuple(files)


def format_of(name: str) -> Format | None:
    """Return the format that the ending of `name` shows: `a.jsonl.gz` → jsonl."""
    match = _ENDING.search(name.partition("?")[0] if "://" in name else name)
    found = _ENDINGS.get((match[1] or "").lower()) if match else None
    return None if match and match[2] and found == "parquet" else found


def format_mistakes(
    sources: Sequence[Source], names: Sequence[Sequence[str]]
) -> list[tuple[tuple[str | int, ...], str]]:
    """Return why the format cannot be told: where in `read`, and in words."""
    known = "text, jsonl, csv or parquet"
    seen: dict[Format, str] = {}
    wrong: list[tuple[tuple[str | int, ...], str]] = []
    for at, (source, inside) in enumerate(zip(sources, names, strict=True)):
        for name in inside:
            format = format_of(name)
            if format is None:
                text = (
                    f"the ending of {shown(name.rpartition('/')[2] or source.shown)} shows no"
                    f" format; write `format`: {known}"
                )
                wrong.append((("paths", at), text))
                break
            seen.setdefault(format, name)
    if not wrong and len(seen) > 1:
        (first, one), (second, other) = list(seen.items())[:2]
        both = (
            f"{shown(one.rpartition('/')[2])} is {first}, {shown(other.rpartition('/')[2])} is"
            f" {second}"
        )
        wrong.append((("paths",), f"should all have one format: {both}"))
    return wrong


def common_format(names: Sequence[Sequence[str]]) -> Format:
    """Return the one format of all input that `mistakes` found nothing wrong with."""
    format = format_of(names[0][0])
    assert format is not None  # noqa: S101 - a rule says so
    return format


def _inputs(job: Job, tell: Callable[[int], None]) -> Iterator[Shipped]:
    bounds = Bounds(folder=Path("/"), inside=job.inside)
    labels: set[str] = set()
    number = 0
    for at, source in enumerate(job.sources):
        if source.where != "control":
            continue
        try:
            files = found(source, bounds)
        except Misplaced as error:
            raise _refused(job, f"{source.shown}: {error}") from error
        for file in files:
            label, again = file.label, 2
            while label in labels:
                label, again = f"{file.label} ({again})", again + 1
            labels.add(label)
            yield _read(
                f"input/{number:04d}-{_safe(file.path.name)}", label, file.path, tell, source=at
            )
            number += 1


def _refused(job: Job, text: str) -> RequestError:
    return RequestError(
        f"the input of `{job.name}` cannot be read", evidence=text, hint="nothing was touched"
    )


def _read(
    to: str,
    label: str,
    path: Path,
    tell: Callable[[int], None],
    *,
    source: int | None = None,
    room: int | None = None,
) -> Shipped:
    digest, size = hashlib.sha256(), 0
    try:
        # What was a file when it was listed may be a pipe or a link now: neither is waited for, nor
        # followed.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags), "rb") as file:  # noqa: PTH123 - flags
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise RequestError(f"`{path}` is not a regular file any more")
            while block := file.read(_BLOCK):
                digest.update(block)
                size += len(block)
                if room is not None and size > room:
                    limit = f"{MOST_CODE // 2**20} MiB"
                    hint = "put large files on the nodes, and give their path in `args`"
                    raise RequestError(
                        f"the code of the job is larger than {limit}", evidence=str(path), hint=hint
                    )
                tell(len(block))
    except OSError as error:
        raise RequestError(
            f"`{path}` cannot be read", evidence=error.strerror or str(error)
        ) from error
    return Shipped(
        to=to, label=label, path=path, bytes=size, sha256=digest.hexdigest(), source=source
    )


def _matches(root: Path, pattern: str) -> Iterator[Path]:
    if not pattern:
        if root.is_dir():
            yield from _walk(root)
        elif _exists(root):
            yield root
        return
    hidden = any(part.startswith((".", "_")) for part in pattern.split("/"))
    for path in root.glob(pattern):
        if not hidden and _hidden(path.relative_to(root)):
            continue
        if path.is_dir():
            # `**` names folders, too, and the files in them by themselves.
            if "**" not in pattern:
                _no_link(path)
                yield from _walk(path)
        else:
            yield path


def _walk(folder: Path) -> Iterator[Path]:
    for here, folders, names in os.walk(folder, onerror=_fail):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        for name in folders:
            _no_link(Path(here) / name)
        yield from (Path(here) / name for name in names if not name.startswith((".", "_")))


def _no_link(folder: Path) -> None:
    if folder.is_symlink():
        raise Misplaced(f"{told(folder)} is a link to a folder; name that folder itself")


def _fail(error: OSError) -> None:
    raise error


def _regular(path: Path, label: str, within: Bounds) -> Path:
    try:
        resolved = within.checked(path.resolve(), label)
        regular = resolved.is_file()
    except (OSError, RuntimeError) as error:
        raise Misplaced(f"{shown(label)} cannot be followed") from error
    if not regular:
        raise Misplaced(
            f"{shown(label)} is not a regular file"
            if _exists(resolved)
            else f"{shown(label)} leads nowhere"
        )
    return resolved


def _nothing(root: Path, written: str) -> str:
    if root.is_dir():
        return f"names no file: nothing matches {shown(written)} in {told(root)}"
    return f"names no file: there is no {told(root)}"


def _exists(path: Path) -> bool:
    return os.path.lexists(path)


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _safe(name: str) -> str:
    return _UNSAFE.sub("_", name)[-80:]
