"""What a server has to do, as it was counted last."""

from __future__ import annotations

from tests import kept
from tests.simulated import World
from tests.state.conftest import ANSWER, LATE, serve


def test_what_a_busy_server_has_to_do_is_told(world: World) -> None:
    """As it was counted last: while the completion waited, else a moment before, with the keeper's
    tokens per second.
    """
    counts = {"running": 8, "waiting": 892, "tokens_per_s": 310.2}
    world.said["about"] = {
        "health": 200,
        "load": {"running": 1, "waiting": 2, "tokens_per_s": None},
    }
    completion = {**LATE, "moved": True, "load": counts}
    by_keeper = kept.seen(load=kept.load(waiting=900))

    assert serve(world, by_keeper, default=completion).load == kept.load()
    assert serve(world, by_keeper, default={**LATE, "moved": True}).load == kept.load(
        running=1, waiting=2
    )
    assert serve(world, by_keeper, age=30.0, default=ANSWER).load == kept.load(
        running=1, waiting=2, tokens_per_s=0.0
    )


def test_a_server_that_has_just_finished_has_nothing_to_do(world: World) -> None:
    """Its APIs count after our own request; what the keeper saw seconds ago is over."""
    by_keeper = kept.seen(load=kept.load(waiting=37))
    done = {**ANSWER, "load": {"running": 0, "waiting": 0}}

    seen = serve(world, by_keeper, default=done)

    assert seen.load is not None
    assert (seen.load.running, seen.load.waiting) == (0, 0)
