"""Batches for user code: rows to columns and back, and bisection to the rows at fault. No Ray."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
Answer = dict[str, Any] | str  # a row's new columns, or the reason for none


class NotABatch(TypeError):
    """A return value without columns: user code that is wrong for any rows."""


def bisect_failures(
    rows: Sequence[Row], call: Callable[[Sequence[Row]], list[Answer]], notes: list[str]
) -> list[Answer]:
    """Call user code on rows; when it raises, on each half, down to the rows at fault.

    A batch of n rows takes at most 2n - 1 calls.

    Args:
        notes: receives one note when a batch did not fit into memory.

    Raises:
        NotABatch: from `call`: no row is at fault.
    """
    if not rows:
        return []
    try:
        return call(rows)
    except NotABatch:
        raise
    except (Exception, SystemExit) as problem:  # user code may raise anything
        message = last_line(problem)
        if is_device_broken(problem):
            exit_process(message)
        if is_out_of_memory(problem):
            release_memory()
            if len(rows) > 1 and not notes:
                notes.append(
                    f"a batch of {len(rows)} rows did not fit into memory and was halved: lower"
                    " `batch_size`"
                )
    # Outside the handler: its traceback holds the failed batch in memory, which the halves need.
    if len(rows) == 1:
        return [message]
    middle = len(rows) // 2
    return bisect_failures(rows[:middle], call, notes) + bisect_failures(rows[middle:], call, notes)


def to_columns(rows: Sequence[Row]) -> dict[str, Any]:
    """Return rows as one NumPy array per column, stacked when all rows have the same shape.

    The format of Ray Data's guides. A row without a column has None in it.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: to_array([row.get(name) for row in rows]) for name in names}


def to_array(values: list[Any]) -> Any:
    """Return a column as an array: numeric for numbers of one shape, else of objects."""
    import numpy as np

    kinds = {type(value) for value in values}
    numbers = kinds <= {bool} or kinds <= {int, float} or kinds <= {list}
    if numbers or all(issubclass(kind, (np.ndarray, np.generic)) for kind in kinds):
        try:
            numbers_array = np.asarray(values)
            if numbers_array.dtype.kind in "biufM":
                return numbers_array
        except (ValueError, OverflowError):  # ragged, or larger than 64 bits
            pass
    objects = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):
        objects[index] = value
    return objects


def to_answers(batch: Any, rows: int) -> list[Answer]:
    """Return a batch of answers as rows.

    A batch is a dict of columns, a data frame or an Arrow table.

    Raises:
        NotABatch: It is none of them.
        ValueError: A column does not have a value for each row.
    """
    plain = {str(name): to_list(name, values) for name, values in as_columns(batch).items()}
    for name, values in plain.items():
        if len(values) != rows:
            raise ValueError(
                f"the code returned {len(values)} values of `{name}` for {rows}"
                f" {'row' if rows == 1 else 'rows'}"
            )
    return [dict(zip(plain, values, strict=True)) for values in zip(*plain.values(), strict=True)]


def as_columns(batch: Any) -> Mapping[Any, Any]:
    """Return a batch as a dict of columns.

    Raises:
        NotABatch: it has no columns.
    """
    if hasattr(batch, "to_pydict"):
        batch = batch.to_pydict()
    elif hasattr(batch, "columns") and not isinstance(batch, Mapping):
        batch = {name: batch[name] for name in batch.columns}
    if not isinstance(batch, Mapping):
        raise NotABatch(f"the code returned {type(batch).__name__}, not a dict of columns")
    if not batch:
        raise NotABatch("the code returned no columns")
    return batch


def to_list(name: Any, values: Any) -> list[Any]:
    """Return a column as plain Python values."""
    values = to_host(values)
    kind = getattr(getattr(values, "dtype", None), "kind", "")
    if kind == "M":
        values = values.astype("datetime64[us]")  # nanoseconds would become whole numbers
    if hasattr(values, "tolist") and kind != "O":
        values = values.tolist()
    if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__iter__"):
        raise ValueError(
            f"the code returned {type(values).__name__} as `{name}`, not a value for each row"
        )
    return [to_plain(value) for value in values]


def to_plain(value: Any) -> Any:
    value = to_host(value)
    return value.tolist() if hasattr(value, "tolist") else value


def to_host(value: Any) -> Any:
    """Return a tensor as an array in host memory; other values unchanged."""
    if not hasattr(value, "detach"):
        return value
    value = value.detach().cpu()
    return (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()


def last_line(problem: BaseException) -> str:
    """Return the last line of Python's traceback for this exception."""
    name, lines = type(problem).__name__, str(problem).strip().splitlines()
    if is_out_of_memory(problem):
        return f"{name}: {lines[0] if lines else ''} (this row alone does not fit into memory)"[
            :2000
        ]
    return f"{name}: {lines[-1]}"[:2000] if lines else name


def is_out_of_memory(problem: BaseException) -> bool:
    is_memory_error = (
        isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError"
    )
    return is_memory_error or "out of memory" in str(problem).lower()


def is_device_broken(problem: BaseException) -> bool:
    """Return True if the device is unusable by this process: every further call would fail."""
    text = str(problem)
    is_device_error = (
        type(problem).__name__ == "AcceleratorError" or "CUDA error" in text or "HIP error" in text
    )
    return is_device_error and not is_out_of_memory(problem)


def exit_process(message: str) -> None:
    """Exit, so that Ray restarts the replica and reassigns its batches."""
    sys.stderr.write(
        f"the device is unusable after this error, the replica is restarted: {message}\n"
    )
    sys.stderr.flush()
    os._exit(1)


def release_memory() -> None:
    """Release cached device memory before a smaller batch."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
