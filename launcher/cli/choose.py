"""Which nodes a command means: names as given, or all of them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from launcher.errors import RequestError
from launcher.model import Inventory, Node, fold


def chosen(inventory: Inventory, names: Sequence[str]) -> tuple[Node, ...]:
    """Return the named nodes in inventory order, all when none is named; raises RequestError for a name that is not one."""
    known = [node.name for node in inventory.nodes]
    unknown = [name for name in names if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        raise RequestError(
            f"no node `{unknown[0]}` in {inventory.path.name}",
            evidence=f"nodes: {fold(known)}",
            hint=f"did you mean `{near[0]}`?" if near else "",
        )
    return tuple(node for node in inventory.nodes if not names or node.name in names)
