"""Logs from files and from standard input: what `vlaunch doctor --from` reads."""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

from launcher.errors import RequestError
from launcher.secret_patterns import clean
from launcher.tools import log_text
from launcher.tools.diagnosis_read import Told

_MOST = 16 << 20  # bytes of one text: of more, the end
_FILES = 5000  # in an archive
_HINT = "name a file, the archive of `vlaunch collect`, or `-` for standard input"


def read(names: tuple[str, ...]) -> dict[str, Told]:
    """Return what each pod, host or file told; raises RequestError for what cannot be read."""
    found: dict[str, Told] = {}
    for name in names:
        for label, text in _texts(name):
            for node, one in log_text.told(text, label).items():
                before = found.get(node)
                found[node] = Told(logs=(*before.logs, *one.logs)) if before else one
    return found


def _texts(name: str) -> Iterator[tuple[str, str]]:
    if name == "-":
        yield "standard input", _text(sys.stdin.buffer.read())
        return
    path = Path(name)
    try:
        if path.is_file() and tarfile.is_tarfile(path):
            yield from _members(path)
        else:
            yield path.name, _text(path.read_bytes())
    except (OSError, tarfile.TarError, EOFError) as error:
        said = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise RequestError(f"{name} cannot be read", evidence=said, hint=_HINT) from None


def _members(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the logs of an archive, each by the folder that it lies in: a bundle has one for each
    node.
    """
    with tarfile.open(path) as archive:
        for _, member in zip(range(_FILES), archive, strict=False):
            part = archive.extractfile(member) if member.isfile() else None
            if part is not None and member.name.endswith((".log", ".txt")):
                with part:
                    data = part.read(_MOST)
                yield Path(member.name).parent.name or path.name, _text(data)


def _text(data: bytes) -> str:
    """Return what may be shown of it: others' logs hold secrets that nobody has told us."""
    return clean(data[-_MOST:].decode(errors="replace"))
