"""The door: a file in, a checked `Inventory` or every mistake at once out.

Touches no network and no node.
"""

from __future__ import annotations

from pathlib import Path

from launcher.core.domain import Inventory
from launcher.core.errors import InventoryError
from launcher.inventory import document, merge, mount_rules, node_rules, rules
from launcher.inventory.document import Document
from launcher.inventory.draft import Draft, draft
from launcher.inventory.mistakes import Mistake

MAX_BYTES = 256 * 1024


def load(path: Path) -> Inventory:
    """Read and check the inventory at `path`; raises InventoryError with one line per mistake,
    sorted by line.
    """
    return loads(_read(path), path)


def loads(content: str, path: Path) -> Inventory:
    """Check `content` as if it were the file at `path`, from whose folder relative paths start."""
    read = document.parse(content)
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
    found = [
        mistake
        for rule in (*rules.ALL, *mount_rules.ALL, *node_rules.ALL)
        for mistake in rule(made)
    ]
    return [mistake for mistake in found if made.sound(*mistake.where)]


def _read(path: Path) -> str:
    try:
        return document.read_file(path, most=MAX_BYTES, kind="inventory")
    except document.UnusableFile as error:
        lines = [f"{path}:{error.line}: {error}"]
        hint = (
            "" if error.encoding else "start from inventory/example.yaml, which explains every key"
        )
        raise InventoryError(f"`{path}` cannot be used", lines, hint=hint) from error


def _error(path: Path, read: Document, mistakes: list[Mistake]) -> InventoryError:
    lines = read.told(mistakes)
    number = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
    hint = "every key is explained in inventory/example.yaml; nothing was touched"
    return InventoryError(
        f"{number} in `{path}`", [f"{path}:{line}: {told}" for line, told in lines], hint=hint
    )
