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
    parsed = document.parse(content)
    if parsed.data is None:
        raise _error(path, parsed, list(parsed.mistakes))
    inventory_draft, mistakes = draft(parsed, path.parent.absolute())
    mistakes += parsed.mistakes
    if inventory_draft is not None:
        mistakes += _broken_rules(inventory_draft)
    if mistakes or inventory_draft is None:
        raise _error(path, parsed, mistakes)
    return merge.inventory(inventory_draft.file, inventory_draft.placed, path)


def _broken_rules(inventory_draft: Draft) -> list[Mistake]:
    mistakes = [
        mistake
        for rule in (*rules.ALL, *mount_rules.ALL, *node_rules.ALL)
        for mistake in rule(inventory_draft)
    ]
    return [mistake for mistake in mistakes if inventory_draft.sound(*mistake.where)]


def _read(path: Path) -> str:
    try:
        return document.read_file(path, max_bytes=MAX_BYTES, kind="inventory")
    except document.UnusableFile as error:
        lines = [f"{path}:{error.line}: {error}"]
        hint = (
            "" if error.encoding else "start from inventory/example.yaml, which explains every key"
        )
        raise InventoryError(f"`{path}` cannot be used", lines, hint=hint) from error


def _error(path: Path, parsed: Document, mistakes: list[Mistake]) -> InventoryError:
    lines = parsed.told(mistakes)
    number = "1 mistake" if len(lines) == 1 else f"{len(lines)} mistakes"
    hint = "every key is explained in inventory/example.yaml; nothing was touched"
    return InventoryError(
        f"{number} in `{path}`", [f"{path}:{line}: {message}" for line, message in lines], hint=hint
    )
