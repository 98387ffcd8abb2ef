"""Batches of user code: bisection to bad rows, split answers, and errors without a row at fault."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from launcher.batch.driver import batches


def calling(bad: set[int], batch: list[int]) -> Any:
    def call(rows: Sequence[batches.Row]) -> list[batches.Answer]:
        batch.append(len(rows))
        if any(row["n"] in bad for row in rows):
            raise ValueError(f"first line\ncannot do {sorted(bad & {row['n'] for row in rows})}")
        return [{"twice": 2 * row["n"]} for row in rows]

    return call


def rows(count: int) -> list[dict[str, int]]:
    return [{"n": index} for index in range(count)]


def test_a_good_batch_takes_a_single_call() -> None:
    """Without repetitions."""
    calls: list[int] = []
    assert batches.bisect_failures(rows(3), calling(set(), calls), []) == [
        {"twice": 0},
        {"twice": 2},
        {"twice": 4},
    ]
    assert calls == [3]


def test_only_the_rows_at_fault_become_errors() -> None:
    """With the last line of their own exception; other rows are answered, in order."""
    answers = batches.bisect_failures(rows(64), calling({5, 40}, []), [])
    assert {index: answer for index, answer in enumerate(answers) if isinstance(answer, str)} == {
        5: "ValueError: cannot do [5]",
        40: "ValueError: cannot do [40]",
    }
    assert answers[41] == {"twice": 82}


def test_bisection_is_bounded() -> None:
    """A batch of n bad rows takes 2n - 1 calls at most; one bad row of 64 takes thirteen."""
    calls: list[int] = []
    batches.bisect_failures(rows(64), calling(set(range(64)), calls), [])
    assert len(calls) == 127
    calls.clear()
    batches.bisect_failures(rows(64), calling({63}, calls), [])
    assert len(calls) == 13


def test_code_that_returns_no_batch_is_not_blamed_on_rows() -> None:
    """The job must fail: bisection would only repeat it for every row."""

    def call(part: Sequence[batches.Row]) -> list[batches.Answer]:
        return batches.to_answers([1] * len(part), len(part))

    with pytest.raises(batches.NotABatch, match="returned list, not a dict of columns"):
        batches.bisect_failures(rows(8), call, [])


def test_a_batch_too_large_for_memory_is_halved_and_reported_once() -> None:
    """The rows are answered; the note names the setting. A single row that does not fit is an
    error.
    """

    def call(part: Sequence[batches.Row]) -> list[batches.Answer]:
        if len(part) > 2 or any(row["n"] == 7 for row in part):
            raise RuntimeError("CUDA out of memory. Tried to allocate 2 GiB\nsome advice")
        return [{"n": row["n"]} for row in part]

    notes: list[str] = []
    answers = batches.bisect_failures(rows(8), call, notes)
    assert notes == ["a batch of 8 rows did not fit into memory and was halved: lower `batch_size`"]
    assert answers[:7] == [{"n": index} for index in range(7)]
    assert (
        answers[7]
        == "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB (this row alone does not fit"
        " into memory)"
    )


def test_exit_is_an_error_row() -> None:
    """`exit()` in users' code is another exception."""

    def call(part: Sequence[batches.Row]) -> list[batches.Answer]:
        raise SystemExit(3)

    assert batches.bisect_failures(rows(1), call, []) == ["SystemExit: 3"]


def test_device_errors_differ_from_out_of_memory() -> None:
    """An illegal access poisons the process, a full memory does not."""
    assert batches.is_device_broken(
        RuntimeError("CUDA error: an illegal memory access was encountered")
    )
    assert not batches.is_device_broken(RuntimeError("CUDA error: out of memory"))
    assert not batches.is_device_broken(ValueError("no"))


def test_answers_are_split_by_row() -> None:
    """A dict of lists, of arrays with `tolist`, or another type with columns."""

    class Column:
        dtype = None

        def tolist(self) -> list[int]:
            return [1, 2]

    class Table:
        def to_pydict(self) -> dict[str, list[int]]:
            return {"a": [1, 2]}

    class Frame:
        columns = ("a",)

        def __getitem__(self, name: str) -> list[int]:
            return [1, 2]

    expected = [{"a": 1}, {"a": 2}]
    assert [
        batches.to_answers(batch, 2) for batch in ({"a": [1, 2]}, {"a": Column()}, Table(), Frame())
    ] == [expected] * 4


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"a": [1]}, "the code returned 1 values of `a` for 2 rows"),
        ({"a": "xy"}, "the code returned str as `a`, not a value for each row"),
        ({"a": 7}, "the code returned int as `a`, not a value for each row"),
        ({"a": {"x": 1, "y": 2}}, "the code returned dict as `a`, not a value for each row"),
    ],
)
def test_columns_of_another_length(batch: Any, expected: str) -> None:
    """The reason names the column."""
    with pytest.raises(ValueError, match="^" + expected + "$"):
        batches.to_answers(batch, 2)


def test_an_empty_batch_is_an_error() -> None:
    """An empty dict would lose every row."""
    with pytest.raises(batches.NotABatch, match="no columns"):
        batches.to_answers({}, 2)


def test_rows_become_arrays_as_the_guides_show() -> None:
    """Numbers of one shape are stacked; the ragged, the mixed and the missing are objects."""
    arrays = batches.to_columns(
        [{"v": [1.0, 2.0], "s": "a", "r": [1], "m": 1}, {"v": [3.0, 4.0], "s": "b", "r": [1, 2]}]
    )
    assert arrays["v"].shape == (2, 2)
    assert arrays["s"].tolist() == ["a", "b"]
    assert arrays["r"].dtype == object
    assert arrays["m"].tolist() == [1, None]
