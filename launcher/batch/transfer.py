"""Files on their way to the head in pieces: what is there already is not sent again, and no piece
is read before it is due.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from launcher.batch import job_store
from launcher.batch.inputs import Shipped
from launcher.core.plan import Step
from launcher.tools.site import Site

PIECE = 24 * 2**20  # bytes of one command's standard input, which is held in memory
_SECONDS = 900.0  # for one piece: 27 kB/s are enough


def there(have: Mapping[str, int], file: Shipped) -> int:
    """Return how many bytes of a file the head has, of which it can be made whole; all of them when
    it is whole.
    """
    if have.get(file.to) == file.bytes:
        return file.bytes
    on_its_way = have.get(part(file.to), 0)
    return on_its_way if on_its_way < file.bytes else 0


def part(name: str) -> str:
    """Return what a file is called while it is on its way."""
    path = PurePosixPath(name)
    return str(path.with_name(f".{path.name}.part"))


def missing(have: Mapping[str, int], files: Sequence[Shipped]) -> list[Shipped]:
    """Return the files that the head does not have whole."""
    return [each for each in files if have.get(each.to) != each.bytes]


def steps(site: Site, work: str, have: Mapping[str, int], files: Sequence[Shipped]) -> list[Step]:
    """Return what sends every missing file, piece by piece, each from where the last run
    stopped.
    """
    return [
        _piece(site, work, file, offset)
        for file in missing(have, files)
        for offset in (range(there(have, file), file.bytes, PIECE) if file.bytes else (0,))
    ]


def _piece(site: Site, work: str, file: Shipped, offset: int) -> Step:
    count = min(PIECE, file.bytes - offset)
    last = file.sha256 if offset + count == file.bytes else ""

    def read() -> bytes:
        with file.path.open("rb") as source:
            source.seek(offset)
            return source.read(count)

    return Step(
        title=f"sending {PurePosixPath(file.to).name}",
        command=site.inside(
            site.head,
            job_store.ask("put", work, file.to, offset=offset, last=last),
            timeout=_SECONDS,
            stdin=read,
            shown_stdin=_shown(file.path, offset, count, file.bytes),
        ),
    )


def _shown(path: Path, offset: int, count: int, size: int) -> str:
    """Return how a script reads one piece."""
    # What begins with a dash would be an option.
    quoted = shlex.quote(str(path.absolute()))
    if count == size:
        return f"cat {quoted}"
    # `head` ends before `tail` has written all, which is no failure.
    return f"{{ tail -c +{offset + 1} {quoted} || :; }} | head -c {count}"
