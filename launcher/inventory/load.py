"""The door: a file in, a checked `Inventory` or every mistake at once out. Touches no network and no node."""

from __future__ import annotations

from pathlib import Path

from launcher.errors import InventoryError
from launcher.inventory import document, merge, node_rules, rules
from launcher.inventory.document import Document
from launcher.inventory.draft import Draft, draft
from launcher.inventory.mistakes import Mistake, spell
from launcher.model import Inventory

MAX_BYTES = 256 * 1024


def load(path: Path) -> Inventory:
    """Read and check the inventory at `path`; raises InventoryError with one line per mistake, sorted by line."""
    return loads(_read(path), path)


def loads(text: str, path: Path) -> Inventory:
    """Check `text` as if it were the file at `path`, from whose folder relative paths start."""
    read = document.parse(text)
    if read.data is None:
        raise _error(path, read, list(read.mistakes))
    made, mistakes = draft(read, path.parent.absolute())
    mistakes += read.mistakes
    if made is not None:
        mistakes += _broken_rules(made)
    if mistakes or made is None:
        raise _error(path, read, mistakes)
    return merge.inventory(made.file, made.placed, path)


def _broken_rules(made: Draft) -> list[Mistake]:
    found = [mistake for rule in (*rules.ALL, *node_rules.ALL) for mistake in rule(made)]
    return [mistake for mistake in found if made.sound(*mistake.where)]


def _read(path: Path) -> str:
    try:
        if path.is_dir():
            raise _unusable(path, "is a directory; name the YAML file in it")
        if path.exists() and not path.is_file():
            raise _unusable(path, "is not a regular file")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _unusable(path, f"cannot be read: {reason.lower()}") from error
    if len(content) > MAX_BYTES:
        raise _unusable(path, f"is larger than {MAX_BYTES // 1024} KiB, which no inventory needs to be")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        text = f"the byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8"
        raise InventoryError(f"`{path}` cannot be used", [f"{path}:{line}: {text}"]) from error


def _unusable(path: Path, text: str) -> InventoryError:
    hint = "start from inventory/example.yaml, which explains every key"
    return InventoryError(f"`{path}` cannot be used", [f"{path}:1: {text}"], hint=hint)


def _error(path: Path, read: Document, mistakes: list[Mistake]) -> InventoryError:
    lines = sorted({(mistake.line or read.line(mistake.where), _told(mistake, read)) for mistake in mistakes})
    number = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
    hint = "every key is explained in inventory/example.yaml; nothing was touched"
    return InventoryError(f"{number} in `{path}`", [f"{path}:{line}: {told}" for line, told in lines], hint=hint)


def _told(mistake: Mistake, read: Document) -> str:
    where = mistake.where
    if mistake.about_key:
        where = where[:-1]
    # `ray: 2.6` stands for `ray.version`: the path ends where the file does.
    while where and where not in read.lines:
        where = where[:-1]
    return f"{spell(where)}: {mistake.text}" if where else mistake.text
