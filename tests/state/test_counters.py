"""What a server has to do, as it was counted last."""

from __future__ import annotations

from tests import kept
from tests.simulated import World
from tests.state.conftest import ANSWER, LATE, serve


def test_what_a_busy_server_has_to_do_is_told(world: World) -> None:
    """As it was counted last: while the completion waited, else by the keeper, else a moment
    ago.
    """
    counts = {"running": 8, "waiting": 892, "tokens_per_s": 310.2}
    world.said["server"] = {
        "health": 200,
        "load": {"running": 1, "waiting": 2, "tokens_per_s": None},
    }
    completion = {**LATE, "moved": True, "load": counts}
    by_keeper = kept.seen(load=kept.load(waiting=900))

    assert serve(world, by_keeper, default=completion).load == kept.load()
    assert serve(world, by_keeper, default={**LATE, "moved": True}).load == kept.load(waiting=900)
    assert serve(world, by_keeper, age=30.0, default=ANSWER).load == kept.load(
        running=1, waiting=2, tokens_per_s=0.0
    )
