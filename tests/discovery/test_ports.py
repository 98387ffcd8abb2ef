"""Ports beside those of other clusters."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from launcher.discovery.ports import beside
from launcher.errors import RequestError
from launcher.model import Ports


def taken(ports: Ports) -> set[int]:
    """All ports of a cluster."""
    named = asdict(ports)
    low, high = named.pop("worker_min"), named.pop("worker_max")
    return {*named.values(), *range(low, high + 1)}


def test_a_cluster_alone_has_the_usual_ports() -> None:
    """Ray's own."""
    assert beside([]) == Ports()


def test_clusters_beside_each_other_share_no_port() -> None:
    """Up to three of them; a fourth is told to choose by hand."""
    others = [Ports()]
    others.append(beside(others))
    others.append(beside(others))

    assert sum(len(taken(each)) for each in others) == len(set().union(*map(taken, others)))
    assert all(max(taken(each)) < 65536 for each in others)
    with pytest.raises(RequestError, match="no ports are left beside 3 other clusters"):
        beside(others)


def test_a_place_that_has_become_free_is_taken_again() -> None:
    """The second cluster is gone, the third one lives."""
    second = beside([Ports()])
    third = beside([Ports(), second])

    assert beside([Ports(), third]) == second
