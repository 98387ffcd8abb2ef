"""Shared types: redacted secrets, answers, and folded names."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.core.domain import Answer, Inventory, Node, Secret, fold
from launcher.inventory.ranges import expand_range


def node(name: str, *, head: bool = False, gpus: int = 1) -> Node:
    return Node(name=name, host=name, ip="10.0.0.1", gpus=gpus, head=head)


def test_a_secret_is_shown_only_by_reveal() -> None:
    """Not in text, formatting, or its containers."""
    secret = Secret("hunter2")

    assert [str(secret), repr(secret), f"{secret}", repr([secret])] == ["***"] * 3 + ["[***]"]
    assert secret.reveal() == "hunter2"


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], ""),
        (["gpu01"], "gpu01"),
        (["gpu01", "gpu02", "gpu04"], "gpu[01-02,04]"),
        (["gpu9", "gpu10"], "gpu[9,10]"),
        (["gpu1", "head", "gpu2"], "gpu[1-2],head"),
        (["a1.rack", "a2.rack", "a3.row"], "a[1-2].rack,a3.row"),
        (["10.0.0.1", "10.0.0.2"], "10.0.0.1,10.0.0.2"),
        (["::1", "fe80::2"], "::1,fe80::2"),
        (["rack1-gpu01", "rack1-gpu02"], "rack1-gpu[01-02]"),
        (["localhost"], "localhost"),
    ],
)
def test_names_with_different_numbers_are_folded(names: list[str], folded: str) -> None:
    """In order; addresses stay as they are."""
    assert fold(names) == folded


@given(st.lists(st.integers(0, 120), unique=True, min_size=1), st.booleans())
def test_folded_names_expand_again(numbers: list[int], padded: bool) -> None:
    """With the inventory's own ranges."""
    names = tuple(f"gpu{number:03}" if padded else f"gpu{number}" for number in sorted(numbers))

    assert expand_range(fold(names)) == names


@pytest.mark.parametrize(
    ("code", "late", "ok"),
    [(0, False, True), (1, False, False), (0, True, False), (124, True, False)],
)
def test_successful_answers(code: int, late: bool, ok: bool) -> None:
    """Exit code 0, without a timeout."""
    assert Answer(node="a", code=code, timed_out=late).ok is ok


def test_the_tail_prefers_errors_and_is_short() -> None:
    """Six lines, from standard error when there is any."""
    assert (
        Answer(node="a", code=1, out="out", err="1\n2\n3\n4\n5\n6\n7\n").tail == "2\n3\n4\n5\n6\n7"
    )
    assert Answer(node="a", code=1, out="out\n", err=" \n").tail == "out"


def test_an_inventory_knows_its_head_its_workers_and_its_gpus() -> None:
    """In any order of nodes."""
    nodes = (node("a", gpus=4), node("b", head=True, gpus=8), node("c", gpus=4))
    inventory = Inventory(path=Path("x"), cluster="c", image="i", nodes=nodes)

    assert inventory.head.name == "b"
    assert [worker.name for worker in inventory.workers] == ["a", "c"]
    assert inventory.gpus == 16
    assert inventory.node("c") is nodes[2]
    with pytest.raises(KeyError):
        inventory.node("d")


@pytest.mark.parametrize(
    ("err", "tail"),
    [
        ("a\nb", "a\nb"),
        ("1\n2\n3\n4\n5\n6\n7", "2\n3\n4\n5\n6\n7"),
        (
            "docker: no such image\n\nRun 'docker run --help' for more information\n",
            "docker: no such image",
        ),
        ("docker: no such image.\nSee 'docker run --help'.", "docker: no such image."),
        (
            "Run 'docker run --help' for more information",
            "Run 'docker run --help' for more information",
        ),
    ],
)
def test_evidence_is_the_end_of_the_output(err: str, tail: str) -> None:
    """Without the advice of Docker's client below its error."""
    assert Answer(node="n", code=125, err=err).tail == tail
