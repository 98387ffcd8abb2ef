"""The order of a chain while a copy runs: with what nodes say a second at a time."""

from __future__ import annotations

from collections.abc import Mapping

from launcher.plan.steering import CALM, LOOKS, Steering

MB = 10**6


def run(
    steering: Steering, links: Mapping[str, float], seconds: int, begin: int = 1
) -> list[tuple[int, list[str]]]:
    """Let every node get what its link carries in MB a second, and no more than the one before it
    has; return the changes of the order.
    """
    changes = []
    have = dict.fromkeys(links, 0.0)
    for now in range(begin, begin + seconds):
        coming = links[steering.order[0]]
        for name in steering.order:
            coming = min(coming, links[name])
            have[name] += coming
            steering.progress(name, int(have[name] * MB), float(now))
        if steering.judge(float(now)):
            changes.append((now, list(steering.order)))
    return changes


def chain(*names: str) -> Steering:
    return Steering(list(names), 1 * MB)


def test_everybody_asks_the_one_before_and_then_the_next_ones_up() -> None:
    """Down to the source, which has everything."""
    assert chain("s", "a", "b", "c").orders() == {
        "a": ("s",),
        "b": ("a", "s"),
        "c": ("b", "a", "s"),
    }


def test_equal_nodes_stay() -> None:
    """Also when they lag by what each holds back, and when none of them is fast."""
    rates = {"s": 100, "a": 10, "b": 9.5, "c": 9.2}

    assert run(chain("s", "a", "b", "c"), rates, 60) == []


def test_a_slow_node_goes_to_the_end() -> None:
    """After some looks, once; those that were behind it are no longer delayed by it, and are not
    judged for what it did.
    """
    steering = chain("s", "a", "b", "c", "d")
    changes = run(steering, {"s": 100, "a": 10, "b": 2.5, "c": 10, "d": 10}, 30)

    assert [order for _, order in changes] == [["s", "a", "c", "d", "b"]]
    assert changes[0][0] <= LOOKS + 2
    assert steering.moved == {"b": "it took 25% of what came to a"}
    assert steering.before("b") == ("d", "c", "a", "s")


def test_the_first_one_is_not_compared_with_the_source() -> None:
    """Who has everything from the beginning makes all others look slow."""
    assert run(chain("s", "a", "b"), {"s": 1000, "a": 5, "b": 5}, 30) == []


def test_a_stalled_node_is_not_a_slow_one() -> None:
    """What does not move at all is broken, and may be so because of the one before it."""
    assert run(chain("s", "a", "b"), {"s": 100, "a": 10, "b": 0.1}, 30) == []


def test_a_small_lag_is_no_reason() -> None:
    """A node that is slow for a moment has only the chunks on the way behind."""
    links = {"s": 100.0, "a": 10.0, "b": 5.0, "c": 10.0}

    assert run(Steering(["s", "a", "b", "c"], 50 * MB), links, 20) == []
    assert run(Steering(["s", "a", "b", "c"], 1 * MB), links, 20) != []


def test_a_node_that_is_through_is_not_slow() -> None:
    """Nothing comes any more, because all is there."""
    steering = chain("s", "a", "b")
    steering.complete("b")

    assert run(steering, {"s": 100, "a": 10, "b": 2.5}, 30) == []


def test_a_dead_node_is_left_out() -> None:
    """And nobody is judged for a while: everybody behind it has lost time."""
    steering = chain("s", "a", "b", "c")
    steering.dead("a", 1.0)

    assert steering.orders() == {"b": ("s",), "c": ("b", "s")}
    rates = {"s": 100.0, "b": 10.0, "c": 2.0}
    assert run(steering, rates, int(CALM), begin=1) == []
    assert run(steering, rates, 10, begin=1 + int(CALM)) == []  # the last one is there already


def test_who_passes_on_wrong_bytes_goes_to_the_end() -> None:
    """The second time; the source cannot."""
    steering = chain("s", "a", "b")

    assert not steering.wrong("a", 1.0)
    assert steering.wrong("a", 2.0)
    assert steering.order == ["s", "b", "a"]
    assert steering.moved == {"a": "it passed on wrong bytes"}
    assert not any(steering.wrong("s", 3.0) for _ in range(5))
    assert not steering.wrong("nobody", 3.0)


def test_two_reports_of_one_moment() -> None:
    """No rate follows from them, and nothing is divided by nothing."""
    steering = chain("s", "a", "b")
    for have in (1, 2):
        steering.progress("a", have, 5.0)

    assert not steering.judge(5.0)
