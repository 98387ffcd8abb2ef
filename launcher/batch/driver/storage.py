"""Files by path or address: listing, reading and atomic writing through pyarrow's filesystems."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .job_file import Refused

# Stores whose folders are only name prefixes, and whose objects appear complete or not at all.
OBJECT_STORES = ("s3", "gcs", "abfs")
# Files about a dataset beside its data, as on the Hugging Face Hub; skipped in folders.
ABOUT_DATASET = re.compile(
    r"(?i)(?:readme|licen[cs]e|notice|citation|changelog)(?:\.(?:md|txt|rst|cff))?|.+\.md"
    r"|dataset_(?:infos?|dict)\.json"
)
# Requests to S3, which a slow or restarting store outlasts by default: pyarrow retries a refused
# connection for six seconds, and gives up an answer after three seconds without a byte. A delayed
# open writes a small file in one request, which can be repeated when its answer is lost; the
# completion of an upload cannot.
S3_ATTEMPTS = 8
S3_OPTIONS = {"connect_timeout": 10.0, "request_timeout": 20.0, "allow_delayed_open": True}
# an object store's errors that other requests meet too, in pyarrow's words
OUTAGE = re.compile(
    r"AWS Error (?:NETWORK_CONNECTION|SLOW_DOWN|THROTTLING|SERVICE_UNAVAILABLE|REQUEST_TIMEOUT"
    r"|INTERNAL_FAILURE)\b|HTTP status 50[0234]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file: path or address (for `open_location`), size, and a mark that changes with its
    content.
    """

    path: str
    bytes: int
    mark: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A file or folder on a pyarrow filesystem; `address` is the path or address by which it was
    opened.
    """

    filesystem: Any
    path: str
    address: str
    local: bool

    def child(self, name: str) -> Location:
        path, where = f"{self.path.rstrip('/')}/{name}", join_address(self.address, name)
        return Location(filesystem=self.filesystem, path=path, address=where, local=self.local)

    def stat(self) -> StoredFile | None:
        """Return the file at this location, or None."""
        info = self.filesystem.get_file_info(self.path)
        return stored_file(info, self.address) if info.is_file else None

    def exists(self) -> bool:
        return str(self.filesystem.get_file_info(self.path).type.name) != "NotFound"

    def sizes(self) -> dict[str, int]:
        """Return the sizes of a folder's entries by name; empty if it does not exist."""
        from pyarrow import fs

        listed = self.filesystem.get_file_info(fs.FileSelector(self.path, allow_not_found=True))
        return {info.base_name: info.size or 0 for info in listed}

    def names(self) -> list[str]:
        return sorted(self.sizes())

    def open_input(self) -> Any:
        """Open for reading at any offset."""
        return self.filesystem.open_input_file(self.path)

    def read(self) -> bytes:
        with self.open_input() as file:
            return bytes(file.read())

    def stage_file(self, data: bytes, aside: Location | None = None) -> Callable[[], None]:
        """Write a file invisibly; the returned function makes it appear, complete, under its name.

        On disks by renaming a hidden file (in the folder `aside`, outside the data); an object
        store shows only complete objects.
        """
        folder, _, name = self.path.rpartition("/")
        hidden = f"{aside.path if aside else folder}/.{name}.new"
        if self.local:
            write_synced(hidden, data)
            return lambda: rename_synced(hidden, self.path)
        if self.filesystem.type_name != "hdfs":
            return lambda: self.put(self.path, data)
        self.put(hidden, data)
        return lambda: self.move(hidden)

    def write_atomic(self, data: bytes) -> None:
        """Write a file atomically, also in case of a power cut."""
        self.stage_file(data)()

    def put(self, path: str, data: bytes) -> None:
        # One write and one close: closing after an error in between would publish a part.
        stream = self.filesystem.open_output_stream(path)
        stream.write(data)
        stream.close()

    def move(self, hidden: str) -> None:
        if self.exists():
            self.filesystem.delete_file(self.path)  # HDFS does not rename over a file
        self.filesystem.move(hidden, self.path)

    def delete(self) -> None:
        """Delete the file, if it exists."""
        try:
            self.filesystem.delete_file(self.path)
        except FileNotFoundError:
            return
        if self.local:
            sync_folder(os.path.dirname(self.path))

    def make_folder(self) -> None:
        if self.local:
            os.makedirs(self.path, exist_ok=True)
            sync_folder(os.path.dirname(self.path))
        elif self.filesystem.type_name not in OBJECT_STORES:
            self.filesystem.create_dir(self.path, recursive=True)


def open_location(where: str) -> Location:
    """Open a path or an address (`s3://…`, `gs://…`, `hdfs://…`).

    Raises:
        Refused: this image's pyarrow cannot reach such an address.
    """
    if where.startswith("file://"):
        where = where[len("file://") :]
    if "://" not in where:
        from pyarrow import fs

        path = os.path.abspath(where)
        return Location(filesystem=fs.LocalFileSystem(), path=path, address=path, local=True)
    scheme, _, rest = where.partition("://")
    rest, _, query = rest.partition("?")
    host, _, path = rest.partition("/")
    try:
        root = "" if scheme in ("s3", "gs") else "/"
        filesystem, base = connect_filesystem(
            f"{scheme}://{host}{root}{'?' + query if query else ''}"
        )
    except (OSError, ValueError, ImportError, NotImplementedError) as error:
        hint = (
            "check that the image has the library for it, and check"
            " the job's secrets and environment"
        )
        raise Refused(
            f"{mask_secrets(where)} cannot be opened", brief_error(error), hint
        ) from error
    # Not parsed as a URI: a path may contain spaces, `%` and `*`.
    return Location(
        filesystem=filesystem,
        path=f"{base.rstrip('/')}/{path}".rstrip("/") or "/",
        address=where,
        local=False,
    )


@functools.lru_cache(maxsize=64)
def connect_filesystem(address: str) -> tuple[Any, str]:
    """Return the filesystem of an address and the path in it; cached: connecting is slow."""
    from pyarrow import fs

    filesystem, path = fs.FileSystem.from_uri(address)
    if filesystem.type_name == "s3":
        # An address cannot set them. Pickling describes a filesystem by its constructor's options.
        rebuild, (options,) = filesystem.__reduce__()
        retries = fs.AwsStandardS3RetryStrategy(max_attempts=S3_ATTEMPTS)
        supported = {name: value for name, value in S3_OPTIONS.items() if name in options}
        filesystem = rebuild({**options, **supported, "retry_strategy": retries})
    return filesystem, path


def list_files(where: str) -> list[StoredFile]:
    """Return the sorted files of a path, address, folder (recursive) or glob, without hidden and
    `_…` names; of a folder, without files about the dataset.

    Raises:
        Refused: no file matches.
    """
    try:
        location = open_location(where)
        info = location.filesystem.get_file_info(location.path)
        if info.is_file:
            return [stored_file(info, location.address)]
        if info.type.name == "Directory":
            stored = [
                stored_file(entry, join_address(location.address, below))
                for entry, below in walk_files(location, deep=True)
                if not ABOUT_DATASET.fullmatch(entry.base_name)
            ]
        else:
            stored = list(glob_files(location))
    except OSError as error:
        raise Refused(
            f"{mask_secrets(where)} cannot be listed",
            brief_error(error),
            outage_hint(error, "check that the path is correct and readable"),
        ) from error
    if not stored:
        raise Refused(
            f"{mask_secrets(where)}: no such file",
            hint="check that the path is correct and mounted into the head's container",
        )
    return sorted(stored, key=lambda file: file.path)


def glob_files(location: Location) -> Iterator[StoredFile]:
    """Yield the files of a glob: `*` and `?` stay within a name, `**` crosses folders."""
    parts = location.path.split("/")
    plain = next((index for index, part in enumerate(parts) if re.search(r"[*?\[]", part)), None)
    if plain is None:
        return
    pattern = glob_regex("/".join(parts[plain:]))
    root = "/".join(parts[:plain]) or "/"
    start = re.search(r"/[^/]*[*?\[]", location.address)  # the first name with a wildcard
    above = location.address[: start.start()] if start else location.address
    base = Location(filesystem=location.filesystem, path=root, address=above, local=location.local)
    query = address_query(location)
    for info, below in walk_files(base, deep=len(parts) - plain > 1 or "**" in parts[-1]):
        if pattern.fullmatch(below):
            yield stored_file(info, f"{above}/{below}{query}")


def address_query(location: Location) -> str:
    """Return the `?…` of an address; empty for a path, where `?` is a wildcard."""
    if location.local:
        return ""
    _, mark, query = location.address.partition("?")
    return mark + query


def walk_files(location: Location, deep: bool) -> Iterator[tuple[Any, str]]:
    """Yield the files in a folder with their relative paths."""
    from pyarrow import fs

    selector = fs.FileSelector(location.path, allow_not_found=True, recursive=deep)
    prefix = location.path.rstrip("/") + "/"
    for info in location.filesystem.get_file_info(selector):
        below = (
            info.path[len(prefix) :]
            if info.path.startswith(prefix)
            else info.path.lstrip("/")[len(prefix.lstrip("/")) :]
        )
        if info.is_file and not any(part[:1] in "._" for part in below.split("/")):
            yield info, below


def glob_regex(pattern: str) -> re.Pattern[str]:
    """Convert a glob to a regular expression."""
    out = ""
    for piece in re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]]+\]|.", pattern, re.S):
        wildcards = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        if piece in wildcards:
            out += wildcards[piece]
        elif len(piece) > 1:
            out += "[" + piece[1:-1].replace("\\", "\\\\").replace("!", "^", piece[1] == "!") + "]"
        else:
            out += re.escape(piece)
    return re.compile(out, re.S)


def join_address(where: str, name: str) -> str:
    """Append a name to a path or an address, before the address's query."""
    if "://" not in where:
        return f"{where.rstrip('/')}/{name}"
    address, mark, query = where.partition("?")
    return f"{address.rstrip('/')}/{name}{mark}{query}"


def stored_file(info: Any, where: str) -> StoredFile:
    return StoredFile(
        path=where, bytes=info.size or 0, mark=f"{info.size or 0}-{info.mtime_ns or 0}"
    )


def mask_secrets(text: str) -> str:
    """Return text without the credentials of addresses in it."""
    return re.sub(r"://[^/@\s]*@", "://", text)


def brief_error(error: BaseException) -> str:
    """Return the first lines of an error: pyarrow lists every folder it searched."""
    return mask_secrets("\n".join(str(error).splitlines()[:5])[:1000])


def outage_hint(error: BaseException, otherwise: str) -> str:
    """Return the hint for an object store that is down or overloaded; else the other one."""
    if OUTAGE.search(str(error)):
        return (
            "the object store is down, unreachable or overloaded: check that it runs and that"
            " the head's container can reach it"
        )
    return otherwise


def write_synced(path: str, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def rename_synced(hidden: str, path: str) -> None:
    os.replace(hidden, path)
    sync_folder(os.path.dirname(path))


def sync_folder(path: str) -> None:
    """Make a rename or deletion in a folder survive a power cut."""
    folder = os.open(path or "/", os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
