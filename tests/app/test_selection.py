"""Selection of the nodes of a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.app.selection import select_nodes
from launcher.core.errors import RequestError
from launcher.inventory.load import loads

INVENTORY = loads(
    "cluster: c\nimage: x:1\nnodes: [{host: 'gpu[1-3]', ip: '10.0.0.[1-3]', gpus: 1}]\n",
    Path("inventory.yaml"),
)


@pytest.mark.parametrize(
    ("names", "expected"), [([], ["gpu1", "gpu2", "gpu3"]), (["gpu3", "gpu1"], ["gpu1", "gpu3"])]
)
def test_names_or_all_in_the_inventorys_order(names: list[str], expected: list[str]) -> None:
    """Without names: all nodes."""
    assert [node.name for node in select_nodes(INVENTORY, names)] == expected


def test_an_unknown_name_lists_the_nodes() -> None:
    """Without a near miss, the error has no hint."""
    with pytest.raises(RequestError) as caught:
        select_nodes(INVENTORY, ["gpu1", "zebra"])

    assert (caught.value.message, caught.value.evidence, caught.value.hint) == (
        "no node `zebra` in inventory.yaml",
        "nodes: gpu[1-3]",
        "",
    )
