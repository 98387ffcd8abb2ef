"""Mode `predict`, and `preprocess` of any mode: the user's Python as stages of actors, called on
batches of rows.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import batches, budget, cluster, source
from . import job as jobs
from .manifest import Manifest
from .progress import Tracker

if TYPE_CHECKING:
    from ray.data import Dataset

ACTOR = "Replica"  # how Ray names the actors of the inference stage (with more around it)
IN_FLIGHT = 4  # batches on their way to one replica: the next ones are fetched while it works
CARRIED = ("_row", "_error", "_stage", "_raw", "_keep")


def run(
    job: jobs.Job,
    manifest: Manifest,
    pending: Mapping[int, list[tuple[int, int]]],
    progress: Tracker,
) -> Iterator[list[dict[str, Any]]]:
    """Yield answered and failed rows, in blocks, until every pending row came by."""
    cluster.connect(logs=True)
    cluster.settings()
    asked = job.predict
    assert asked is not None  # noqa: S101 - the mode says so
    rows, (_, most) = source.count(pending), asked.replicas
    batch = source.batch_rows(asked.batch_size, rows, most)
    data = preprocess(source.dataset(job, manifest, pending, batch), job)
    made = {
        "code": pack(job.work),
        "target": asked.target,
        "args": dict(asked.args),
        "gate": cluster.gate(asked.replicas[0]),
    }
    data = staged(data, Replica, asked, batch, source.in_flight(IN_FLIGHT, batch, rows, most), made)
    with budget.Watch(
        job, progress, ACTOR, asked.replicas, {"GPU": asked.num_gpus, "CPU": asked.num_cpus}
    ) as watch:
        for table in cluster.stream(data):
            for note in sorted({note for note in table.column("_note").to_pylist() if note}):
                progress.warn(note)
            found = [result(row) for row in table.drop_columns(["_note"]).to_pylist()]
            watch.finished(len(found))
            yield found


def preprocess(data: Dataset, job: jobs.Job) -> Dataset:
    """Put the user's function, if there is one, in front of inference, as a stage of its own, so
    that both work at the same time.
    """
    asked = job.preprocess
    if asked is None:
        return data
    made = {"code": pack(job.work), "target": asked.target}
    return staged(data, Preprocess, asked, asked.batch_size, IN_FLIGHT, made)


def staged(
    data: Dataset,
    stage: type,
    asked: jobs.Predict | jobs.Preprocess,
    batch: int,
    held: int,
    made: dict[str, Any],
) -> Dataset:
    """Add a stage of actors to a dataset."""
    from ray.data import ActorPoolStrategy

    least, most = asked.replicas
    pool = ActorPoolStrategy(min_size=least, max_size=most, max_tasks_in_flight_per_actor=held)
    return data.map_batches(
        stage,
        batch_size=batch,
        batch_format="pyarrow",
        compute=pool,
        fn_constructor_kwargs=made,
        num_cpus=asked.num_cpus,
        num_gpus=getattr(asked, "num_gpus", 0) or None,
    )


def result(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as the sink takes it."""
    out = row.pop("_out")
    return {**pickle.loads(out), **row} if out else row  # noqa: S301 - pickled by our own replica


class Replica:
    """One copy of the user's class. What its constructor raises ends the job."""

    def __init__(
        self, code: dict[str, bytes], target: str, args: dict[str, Any], gate: Any = None
    ) -> None:
        self.call = load(code, target)(**args)
        cluster.arrive(gate)

    def __call__(self, table: Any) -> Any:
        """Answer a block; rows that failed before pass by."""
        rows = table.to_pylist()
        notes: list[str] = []
        answered = attempt(rows, self.call, notes)
        out = [
            {**finished(row, answer), "_note": "".join(notes)}
            for row, answer in zip(rows, answered, strict=True)
        ]
        return source.block(out, ("_out", "_note"))


class Preprocess:
    """The user's function: batch in, batch out, a row for each row."""

    def __init__(self, code: dict[str, bytes], target: str) -> None:
        self.call = load(code, target)

    def __call__(self, table: Any) -> Any:
        """Return the block with the rows' new columns; a row that the function fails on carries its
        reason from here.
        """
        rows = table.to_pylist()
        answered = attempt(rows, self.call, [])
        return source.block(
            [prepared(row, answer) for row, answer in zip(rows, answered, strict=True)]
        )


def attempt(
    rows: Sequence[Mapping[str, Any]], code: Callable[[Any], Any], notes: list[str]
) -> list[batches.Answer]:
    """Return each row's answer, or the reason why it has none; reasons from earlier stages stay."""

    def call(part: Sequence[batches.Row]) -> list[batches.Answer]:
        return batches.answers(code(batches.columns(part)), len(part))

    good = [index for index, row in enumerate(rows) if not row["_error"]]
    # pickled by our own read task
    data = [pickle.loads(rows[index]["_data"]) for index in good]  # noqa: S301
    answered: list[batches.Answer] = [row["_error"] for row in rows]
    for index, answer in zip(good, batches.halved(data, call, notes), strict=True):
        answered[index] = answer
    return answered


def finished(row: Mapping[str, Any], answer: batches.Answer) -> dict[str, Any]:
    """Return a row with its answer; what is needed only for an error row stays behind."""
    carried = {name: row[name] for name in CARRIED}
    if isinstance(answer, dict):
        return {**carried, "_raw": "", "_out": pickle.dumps(answer)}
    return {
        **carried,
        "_error": answer,
        "_stage": row["_stage"] or "inference",
        "_raw": raw(row),
        "_out": b"",
    }


def prepared(row: Mapping[str, Any], answer: batches.Answer) -> dict[str, Any]:
    """Return a row with what the function made of its columns."""
    row = {**row, "_raw": raw(row)}  # of the input: the columns are others from here on
    if isinstance(answer, dict):
        return {**row, "_data": pickle.dumps(answer)}
    return {**row, "_error": answer, "_stage": row["_stage"] or "preprocess", "_data": b""}


def raw(row: Mapping[str, Any]) -> str:
    """Return what an error row shows of its input."""
    return row["_raw"] or (source.shown(row["_data"]) if row["_data"] else "")


def pack(work: str) -> dict[str, bytes]:
    """Return the files below WORK/code by their relative names: they travel with the replica, so no
    storage is shared.
    """
    root = os.path.join(work, "code")
    packed = {}
    for folder, _, names in sorted(os.walk(root)):
        for name in sorted(names):
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                packed[os.path.relpath(path, root)] = file.read()
    return packed


def unpack(code: dict[str, bytes]) -> str:
    """Write packed files into a new folder, which is removed with this process, and return it."""
    root = tempfile.mkdtemp(prefix="vlaunch-code-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for name, data in code.items():
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
    return root


def load(code: dict[str, bytes], target: str) -> Any:
    """Import `module:Name` from packed files; a file that was shipped wins over an installed module
    of its name.

    Raises:
        ImportError: The module, something it imports, or the name in it is not there.
    """
    name, _, attribute = target.partition(":")
    root = unpack(code)
    sys.path.insert(0, root)
    shadowed = sys.modules.get(name)
    if (
        shadowed is not None
        and f"{name.replace('.', '/')}.py" in code
        and not str(shadowed.__file__ or "").startswith(root)
    ):
        del sys.modules[name]
    found: Any = importlib.import_module(name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise ImportError(f"{name} has no `{attribute}`")
        found = getattr(found, part)
    return found
