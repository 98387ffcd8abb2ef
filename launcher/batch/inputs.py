"""Local files that a job needs in the cluster: discovery, formats, sizes and SHA-256."""

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from launcher.batch.checked_job import CheckedJob, Source
from launcher.batch.driver.storage import ABOUT_DATASET
from launcher.batch.job_paths import PathBounds, PathError, quote_path, split_pattern
from launcher.batch.job_values import Format
from launcher.core.errors import RequestError
from launcher.inventory.mistakes import describe_value

MAX_FILES = 10_000
MAX_CODE_BYTES = 16 * 2**20
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
    """One file of a source. `label` is its path below the source, or its name."""

    path: Path
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedFile:
    """A file at `to` in the job's work folder; `label` is its name for the user.

    `source` is its index in `Job.sources`; None for code.
    """

    to: str
    label: str
    path: Path
    bytes: int
    sha256: str
    source: int | None = None


def list_files(source: Source, within: PathBounds) -> list[InputFile]:
    """Return the files of a source on this machine, sorted by name.

    Folders are read recursively. Names that start with `.` or `_` are skipped, as in Ray Data and
    Spark; in folders, also files about the dataset.

    Raises:
        PathError: no file matches, or one is not regular or out of bounds.
    """
    fixed, pattern = split_pattern(source.text, within)
    root = Path(fixed)
    try:
        paths = sorted(islice(_match_files(root, pattern), MAX_FILES + 1))
    except (OSError, ValueError, NotImplementedError) as error:
        raise PathError(
            f"cannot be read: {getattr(error, 'strerror', None) or error}".lower()
        ) from error
    if len(paths) > MAX_FILES:
        raise PathError(f"{describe_value(source.shown)} names more than {MAX_FILES:,} files")
    if not paths:
        raise PathError(_no_file_reason(root, source.shown))
    files = []
    for path in paths:
        label = path.name if path == root else path.relative_to(root).as_posix()
        files.append(InputFile(path=_check_regular(path, label, within), label=label))
    return files


def read_shipped(
    job: CheckedJob, progress: Callable[[int], None] | None = None
) -> tuple[ShippedFile, ...]:
    """Hash every file that is shipped with `job`: the input in order, then the code.

    Args:
        job: the checked job.
        progress: called with the byte count of each block.

    Raises:
        RequestError: a file is gone or unreadable, or the code is too large.
    """
    report = progress or (lambda size: None)
    files = list(_read_inputs(job, report))
    room = MAX_CODE_BYTES
    for name, path in sorted(job.code.items()):
        file = _hash_file(f"code/{name}", name, path, report, room=room)
        room -= file.bytes
        files.append(file)
    return tuple(files)


def format_of(name: str) -> Format | None:
    """Return the format for a file name's suffix: `a.jsonl.gz` → jsonl."""
    match = _ENDING.search(name.partition("?")[0] if "://" in name else name)
    file_format = _ENDINGS.get((match[1] or "").lower()) if match else None
    return None if match and match[2] and file_format == "parquet" else file_format


def format_mistakes(
    sources: Sequence[Source], names: Sequence[Sequence[str]]
) -> list[tuple[tuple[str | int, ...], str]]:
    """Return the mistakes that leave the format unknown: key below `read`, and text."""
    formats = "text, jsonl, csv or parquet"
    first_names: dict[Format, str] = {}
    mistakes: list[tuple[tuple[str | int, ...], str]] = []
    for index, (source, inside) in enumerate(zip(sources, names, strict=True)):
        for name in inside:
            format = format_of(name)
            if format is None:
                text = (
                    f"the ending of {describe_value(name.rpartition('/')[2] or source.shown)}"
                    f" shows no format; write `format`: {formats}"
                )
                mistakes.append((("paths", index), text))
                break
            first_names.setdefault(format, name)
    if not mistakes and len(first_names) > 1:
        (first, first_name), (second, second_name) = list(first_names.items())[:2]
        both = (
            f"{describe_value(first_name.rpartition('/')[2])} is {first},"
            f" {describe_value(second_name.rpartition('/')[2])} is {second}"
        )
        mistakes.append((("paths",), f"should all have one format: {both}"))
    return mistakes


def common_format(names: Sequence[Sequence[str]]) -> Format:
    """Return the common format of all input, after `format_mistakes` found none."""
    format = format_of(names[0][0])
    assert format is not None  # noqa: S101 - a rule says so
    return format


def _read_inputs(job: CheckedJob, report: Callable[[int], None]) -> Iterator[ShippedFile]:
    bounds = PathBounds(folder=Path("/"), inside=job.inside)
    labels: set[str] = set()
    number = 0
    for index, source in enumerate(job.sources):
        if source.where != "control":
            continue
        try:
            files = list_files(source, bounds)
        except PathError as error:
            raise _input_error(job, f"{source.shown}: {error}") from error
        for file in files:
            label, suffix = file.label, 2
            while label in labels:
                label, suffix = f"{file.label} ({suffix})", suffix + 1
            labels.add(label)
            yield _hash_file(
                f"input/{number:04d}-{_safe_name(file.label)}",
                label,
                file.path,
                report,
                source=index,
            )
            number += 1


def _input_error(job: CheckedJob, text: str) -> RequestError:
    return RequestError(
        f"cannot read the input of `{job.name}`", evidence=text, hint="nothing was changed"
    )


def _hash_file(
    destination: str,
    label: str,
    path: Path,
    report: Callable[[int], None],
    *,
    source: int | None = None,
    room: int | None = None,
) -> ShippedFile:
    digest, size = hashlib.sha256(), 0
    try:
        # The listed file may have become a pipe or a link: do not block on it or follow it.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(path, flags), "rb") as file:  # noqa: PTH123 - flags
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise RequestError(f"`{path}` is no longer a regular file")
            while block := file.read(_BLOCK):
                digest.update(block)
                size += len(block)
                if room is not None and size > room:
                    limit = f"{MAX_CODE_BYTES // 2**20} MiB"
                    hint = "put large files on the nodes, and pass their path in `args`"
                    raise RequestError(
                        f"the code of the job is larger than {limit}", evidence=str(path), hint=hint
                    )
                report(len(block))
    except OSError as error:
        raise RequestError(
            f"cannot read `{path}`", evidence=error.strerror or str(error)
        ) from error
    return ShippedFile(
        to=destination, label=label, path=path, bytes=size, sha256=digest.hexdigest(), source=source
    )


def _match_files(root: Path, pattern: str) -> Iterator[Path]:
    if not pattern:
        if root.is_dir():
            yield from _walk_files(root)
        elif _path_exists(root):
            yield root
        return
    hidden = any(part.startswith((".", "_")) for part in pattern.split("/"))
    for path in root.glob(pattern):
        if not hidden and _is_hidden(path.relative_to(root)):
            continue
        if path.is_dir():
            # `**` also matches folders, and their files on their own.
            if "**" not in pattern:
                _refuse_link(path)
                yield from _walk_files(path)
        else:
            yield path


def _walk_files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder, onerror=_raise_error):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        for name in folders:
            _refuse_link(Path(parent) / name)
        yield from (
            Path(parent) / name
            for name in names
            if not name.startswith((".", "_")) and not ABOUT_DATASET.fullmatch(name)
        )


def _refuse_link(folder: Path) -> None:
    if folder.is_symlink():
        raise PathError(f"{quote_path(folder)} is a link to a folder; name that folder itself")


def _raise_error(error: OSError) -> None:
    raise error


def _check_regular(path: Path, label: str, within: PathBounds) -> Path:
    try:
        resolved = within.check_inside(path.resolve(), label)
        regular = resolved.is_file()
    except (OSError, RuntimeError) as error:
        raise PathError(f"{describe_value(label)} cannot be followed") from error
    if not regular:
        raise PathError(
            f"{describe_value(label)} is not a regular file"
            if _path_exists(resolved)
            else f"{describe_value(label)} is a broken link"
        )
    return resolved


def _no_file_reason(root: Path, text: str) -> str:
    if root.is_dir():
        return f"no such file: nothing matches {describe_value(text)} in {quote_path(root)}"
    return f"no such file: {quote_path(root)}"


def _path_exists(path: Path) -> bool:
    return os.path.lexists(path)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "_")) for part in path.parts)


def _safe_name(label: str) -> str:
    # Of the label: a file in the Hub's cache is a link to one without an ending.
    return _UNSAFE.sub("_", label.rpartition("/")[2])[-80:]
