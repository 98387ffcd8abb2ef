"""Loading of inventories: a file becomes a validated `Inventory`, or one error with all its
mistakes.

Uses neither the network nor nodes.
"""

from pathlib import Path

from launcher.core.domain import Inventory
from launcher.core.errors import InventoryError
from launcher.core.sizes import format_count
from launcher.inventory import document, merge, mount_rules, node_rules, rules
from launcher.inventory.document import Document
from launcher.inventory.draft import InventoryDraft, make_draft
from launcher.inventory.mistakes import Mistake

MAX_BYTES = 256 * 1024


def load(path: Path) -> Inventory:
    """Load and validate an inventory; raises InventoryError with all mistakes, sorted by line."""
    return loads(_read_text(path), path)


def loads(content: str, path: Path) -> Inventory:
    """Validate `content` as the file at `path`; relative paths start in its folder."""
    parsed = document.parse_document(content)
    if parsed.data is None:
        raise _inventory_error(path, parsed, list(parsed.mistakes))
    inventory_draft, mistakes = make_draft(parsed, path.parent.absolute())
    mistakes += parsed.mistakes
    if inventory_draft is not None:
        mistakes += _apply_rules(inventory_draft)
    if mistakes or inventory_draft is None:
        raise _inventory_error(path, parsed, mistakes)
    return merge.build_inventory(inventory_draft.file, inventory_draft.nodes, path)


def _apply_rules(inventory_draft: InventoryDraft) -> list[Mistake]:
    mistakes = [
        mistake
        for rule in (*rules.ALL, *mount_rules.ALL, *node_rules.ALL)
        for mistake in rule(inventory_draft)
    ]
    return [mistake for mistake in mistakes if inventory_draft.is_valid(*mistake.yaml_path)]


def _read_text(path: Path) -> str:
    try:
        return document.read_file(path, max_bytes=MAX_BYTES, kind="inventory")
    except document.UnusableFile as error:
        hint = "write one with `vlaunch init`, or name another with `-i`" if not error.line else ""
        raise InventoryError(
            f"`{path}` cannot be used", [error.describe(path)], hint=hint
        ) from error


def _inventory_error(path: Path, parsed: Document, mistakes: list[Mistake]) -> InventoryError:
    lines = parsed.sorted_messages(mistakes)
    number = format_count(len(lines), "mistake")
    hint = "`vlaunch schema` describes every key; no node was changed"
    return InventoryError(
        f"{number} in `{path}`", [f"{path}:{line}: {message}" for line, message in lines], hint=hint
    )
