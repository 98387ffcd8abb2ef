"""Identity of servers: relevant differences."""

from __future__ import annotations

from tests.served import request


def test_places_make_another_server() -> None:
    """So do limits of nodes and GPUs, even without an effect on the placement."""
    digests = {
        request("mp", **overrides).digest
        for overrides in ({}, {"nodes": ("n1", "n2")}, {"gpus": 8})
    }

    assert len(digests) == 3


def test_variables_make_another_server() -> None:
    """A later run sets them again; no variables at all keep the identity."""
    plain, with_env = request("mp"), request("mp", env={"B": "1", "A": "2"})

    assert plain.digest == request("mp", env={}).digest
    assert with_env.digest == request("mp", env={"A": "2", "B": "1"}).digest
    assert with_env.digest not in (plain.digest, request("mp", env={"A": "2", "B": "2"}).digest)
    assert with_env.original_spec["env"] == {"A": "2", "B": "1"}
    assert "env" not in plain.original_spec
