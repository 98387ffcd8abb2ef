"""Whether an engine lives, from what moved and what could be asked."""

from __future__ import annotations

import pytest

from launcher.payload.agent import health
from launcher.payload.agent.health import Movement


def test_only_what_is_looked_at_stands_still() -> None:
    """What could not be asked is unknown: it neither moves nor stands still."""
    movement = Movement(0.0)
    movement.changed("answers", 1, 10.0, None)
    assert movement.still(1000.0) == (0.0, None)

    movement.worked("work", 0, 20.0, None)
    assert movement.still(1000.0) == (980.0, None)


def test_anything_that_changes_moves() -> None:
    """An answer, a counter, a line, CPU time: one is enough; the same again is none."""
    movement = Movement(0.0)
    for source, value in (("answers", 1), ("counters", "x"), ("lines", 3)):
        movement.changed(source, value, 0.0, None)
    movement.worked("work", 5, 0.0, None)
    for at, (source, value) in enumerate(
        [("answers", 2), ("counters", "y"), ("lines", 4), ("work", 6)], 1
    ):
        assert movement.still(10.0 * at) == (10.0, None)
        movement.changed(source, value, 10.0 * at, None)
        assert movement.still(10.0 * at) == (0.0, None)
    movement.changed("counters", "y", 90.0, None)
    movement.worked("work", 6, 90.0, None)

    assert movement.still(100.0) == (60.0, None)


def test_standing_still_begins_when_somebody_looks() -> None:
    """A server that took an hour to start has not stood still for one, when its ranks become known
    at last.
    """
    movement = Movement(0.0)
    movement.worked("work", 7, 3600.0, None)
    movement.worked("work", 7, 3610.0, None)

    assert movement.still(3620.0) == (20.0, None)


def test_replicas_are_judged_on_their_own() -> None:
    """One that hangs is dead though the whole answers: its share of the requests would never come
    back.
    """
    movement = Movement(0.0, (None, 0, 1))
    for replica in (0, 1):
        movement.worked(("work", replica), 1, 0.0, None, replica)
    for at in range(1, 10):
        movement.changed("answers", at, 10.0 * at, None, 0)

    assert movement.still(90.0) == (90.0, 1)


def test_when_all_stand_still_it_is_the_whole_that_does() -> None:
    """And no replica is named."""
    movement = Movement(0.0, (None, 0, 1))
    movement.worked("work", 1, 5.0, None, 0, 1)

    assert movement.still(65.0) == (60.0, None)


def test_a_replica_that_nobody_looks_at_is_not_judged() -> None:
    """vLLM may not name it in its lines; then the whole is all that is known."""
    movement = Movement(0.0, (None, 0, 1))
    movement.worked("work", 1, 40.0, None, 0)

    assert movement.still(100.0) == (60.0, None)


def test_parts_that_do_not_exist_are_ignored() -> None:
    """A line may name a replica that the server does not have."""
    movement = Movement(0.0)
    movement.worked("work", 1, 50.0, None, 7)
    movement.worked("work", 1, 60.0, 7)

    assert movement.still(100.0) == (50.0, None)


def test_only_work_that_was_done_is_progress() -> None:
    """Ranks that wait for a dead one are busy waiting, and print that they are."""
    movement = Movement(0.0)
    for at in (1, 2):
        movement.changed("answers", at, 10.0 * at, None, progress=True)
    for at in (3, 4):
        movement.changed("lines", at, 10.0 * at, None)
        movement.worked("work", at, 10.0 * at, None)

    assert (movement.idle(50.0), movement.still(50.0)) == (30.0, (10.0, None))


def test_pauses_double_up_to_the_longest() -> None:
    """5, 10, 20 … and never more than ten minutes, however long it goes on."""
    pauses = [health.pause(5.0, 600.0, streak) for streak in (0, 1, 2, 3, 7, 8, 9, 10**6)]

    assert pauses == [5.0, 5.0, 10.0, 20.0, 320.0, 600.0, 600.0, 600.0]


@pytest.mark.parametrize(
    ("before", "after", "fresh", "lost"),
    [
        ((3, 0.0), (3, 0.0), True, 3),
        ((3, 5.0), (0, 12.0), True, 7),
        ((0, 5.0), (0, 5.0), True, 0),
        ((3, 5.0), (0, 2.0), True, 3),
        ((3, 0.0), (3, 0.0), False, None),
        (None, (3, 0.0), True, None),
        ((3, 0.0), None, True, None),
    ],
)
def test_lost_requests(
    before: tuple[int, float] | None, after: tuple[int, float] | None, fresh: bool, lost: int | None
) -> None:
    """What was open, or was answered with 5xx since; known only when somebody has just looked."""
    assert health.lost(before, after, fresh) == lost
