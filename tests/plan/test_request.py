"""What makes two requests the same server."""

from __future__ import annotations

from tests.plan.served import request


def test_places_make_another_server() -> None:
    """So does what it is told to keep to, though it would be placed there anyway."""
    digests = {request("mp", **more).digest for more in ({}, {"nodes": ("n1", "n2")}, {"gpus": 8})}

    assert len(digests) == 3
