"""The text of a file that a person wrote: read whole, bounded, UTF-8."""

from __future__ import annotations

from pathlib import Path


class Unusable(Exception):
    """The file cannot be used, for a reason that `line` shows; `encoding` when its bytes are not
    UTF-8.
    """

    def __init__(self, text: str, *, line: int = 1, encoding: bool = False) -> None:
        super().__init__(text)
        self.line = line
        self.encoding = encoding


def read(path: Path, *, most: int, kind: str) -> str:
    """Return what is in the file at `path`; raises Unusable.

    Args:
        path: any path; what is not a regular file is refused before it is opened.
        most: bytes that such a file may have.
        kind: what the file is called, as in `which no inventory needs to be`.
    """
    try:
        if path.is_dir():
            raise Unusable("is a directory; name the YAML file in it")
        if path.exists() and not path.is_file():
            raise Unusable("is not a regular file")
        with path.open("rb") as file:
            content = file.read(most + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Unusable(f"cannot be read: {reason.lower()}") from error
    if len(content) > most:
        raise Unusable(f"is larger than {most // 1024} KiB, which no {kind} needs to be")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        text = f"the byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise Unusable(text, line=line, encoding=True) from error
