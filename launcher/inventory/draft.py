"""The partially valid inventory that the rules check."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.inventory import merge
from launcher.inventory.document import Document
from launcher.inventory.mistakes import Mistake, YamlPath
from launcher.inventory.partial_validation import validate_parts
from launcher.inventory.schema import InventoryFile

# Stand-ins for invalid values of required keys, so that the rest is checked.
_STAND_INS: Mapping[str, object] = {
    "cluster": "x",
    "image": "x",
    "gpus": 1,
    "source": "/x",
    "target": "/x",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryDraft:
    """A parsed inventory; rules should not report `invalid_paths` again."""

    file: InventoryFile
    nodes: list[merge.ExpandedNode]
    document: Document
    invalid_paths: frozenset[YamlPath]

    def line_of(self, *path: str | int) -> int:
        """Return the line of a path."""
        return self.document.line_of(path)

    def is_written(self, *path: str | int) -> bool:
        """Return whether the file contains a path."""
        return path in self.document.lines

    def is_valid(self, *path: str | int) -> bool:
        """Return whether a path and its parents are valid."""
        return not any(path[:length] in self.invalid_paths for length in range(1, len(path) + 1))


def make_draft(document: Document, folder: Path) -> tuple[InventoryDraft | None, list[Mistake]]:
    """Validate each value on its own; the draft is None if too little is valid."""
    file, mistakes = validate_parts(document.data, InventoryFile, _stand_in)
    if file is None:
        return None, mistakes
    broken = frozenset(mistake.yaml_path for mistake in mistakes)
    return InventoryDraft(
        file=file, nodes=merge.expand_nodes(file, folder), document=document, invalid_paths=broken
    ), mistakes


def _stand_in(yaml_path: YamlPath) -> object:
    key, section = yaml_path[-1], yaml_path[0]
    if isinstance(key, int):
        # Keep the item, so that the indexes in later mistakes stay right.
        return {} if section in ("nodes", "mounts") and len(yaml_path) == 2 else None
    if key == "host" and section == "nodes":
        return f"unreadable-{yaml_path[1]}"
    return _STAND_INS.get(key) if len(yaml_path) == 1 or section in ("nodes", "mounts") else None
