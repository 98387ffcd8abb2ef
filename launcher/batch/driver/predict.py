"""Mode `predict`, and `preprocess` of any mode: user code as actor stages over batches."""

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

from ..job import PlacedJob, Predict
from ..job import Preprocess as PreprocessOptions
from . import batches, budget, cluster, pooling, results, source
from .generation import with_output
from .manifest import Manifest
from .progress import Tracker
from .results import Converter, Part

if TYPE_CHECKING:
    from ray.data import Dataset

ACTOR = "Replica"  # part of Ray's name for the actors of the inference stage
IN_FLIGHT = 4  # batches in flight per replica: the next ones are fetched while it works


def run(
    job: PlacedJob,
    manifest: Manifest,
    pending: Mapping[int, bytes],
    progress: Tracker,
    current: budget.CurrentMonitor,
) -> Iterator[list[Part]]:
    """Yield answered and failed rows, in blocks, until every pending row came by."""
    cluster.connect(logs=True)
    cluster.configure_data()
    options = job.predict
    assert options is not None  # noqa: S101 - the mode says so
    rows, (_, maximum) = source.count_rows(pending), options.replicas
    batch = source.batch_rows(options.batch_size, rows, maximum)
    data = add_preprocess_stage(source.create_dataset(job, manifest, pending, batch), job)
    constructor_args = {
        "code": pack_code(job.work),
        "target": options.class_,
        "args": dict(options.args),
        "converter": Converter(job, manifest.types),
        "gate": cluster.create_gate(options.replicas[0]),
    }
    data = add_actor_stage(
        data,
        Replica,
        options,
        batch,
        source.batches_in_flight(IN_FLIGHT, batch, rows, maximum),
        constructor_args,
    )
    needs = {"GPU": options.num_gpus, "CPU": options.num_cpus}
    with budget.ReplicaMonitor(job, progress, ACTOR, options.replicas, needs, current) as watch:
        for table in cluster.iter_tables(data):
            parts = results.unpack(table)
            watch.finished(results.count_rows(parts))
            yield parts


def add_preprocess_stage(data: Dataset, job: PlacedJob) -> Dataset:
    """Add the user's function, if any, as a stage that runs beside inference."""
    options = job.preprocess
    if options is None:
        return data
    constructor_args = {"code": pack_code(job.work), "target": options.function}
    return add_actor_stage(
        data, Preprocess, options, options.batch_size, IN_FLIGHT, constructor_args
    )


def add_actor_stage(
    data: Dataset,
    stage: type,
    options: Predict | PreprocessOptions,
    batch: int,
    in_flight: int,
    constructor_args: dict[str, Any],
) -> Dataset:
    """Add a stage of actors to a dataset."""
    from ray.data import ActorPoolStrategy

    minimum, maximum = options.replicas
    pool = ActorPoolStrategy(
        min_size=minimum, max_size=maximum, max_tasks_in_flight_per_actor=in_flight
    )
    return data.map_batches(
        stage,
        batch_size=batch,
        batch_format="pyarrow",
        compute=pool,
        fn_constructor_kwargs=constructor_args,
        num_cpus=options.num_cpus,
        num_gpus=getattr(options, "num_gpus", 0) or None,
    )


class Replica:
    """One instance of the user's class. An exception in its constructor ends the job."""

    def __init__(
        self,
        code: dict[str, bytes],
        target: str,
        args: dict[str, Any],
        converter: Converter,
        gate: Any = None,
    ) -> None:
        self.converter = converter
        self.call = load_target(code, target)(**args)
        cluster.wait_at_gate(gate)

    def __call__(self, table: Any) -> Any:
        """Answer a block; rows that failed before are passed on."""
        rows = table.to_pylist()
        notes: list[str] = []
        answered = answer_rows(rows, self.call, notes)
        done = [with_answer(row, answer) for row, answer in zip(rows, answered, strict=True)]
        return results.pack(self.converter.convert(done, notes))


class Preprocess:
    """The user's function: a batch to a batch with the same rows."""

    def __init__(self, code: dict[str, bytes], target: str) -> None:
        self.call = load_target(code, target)

    def __call__(self, table: Any) -> Any:
        """Return the block with the rows' new columns; a row that fails carries its reason."""
        rows = table.to_pylist()
        answered = answer_rows(rows, self.call, [])
        return source.to_block(
            [with_columns(row, answer) for row, answer in zip(rows, answered, strict=True)]
        )


def answer_rows(
    rows: Sequence[Mapping[str, Any]], code: Callable[[Any], Any], notes: list[str]
) -> list[batches.Answer]:
    """Return each row's answer or reason; reasons of earlier stages stay."""

    def call(part: Sequence[batches.Row]) -> list[batches.Answer]:
        return batches.to_answers(code(batches.to_columns(part)), len(part))

    good = [index for index, row in enumerate(rows) if not row["_error"]]
    # pickled by our own read task
    data = [pickle.loads(rows[index]["_data"]) for index in good]  # noqa: S301
    answered: list[batches.Answer] = [row["_error"] for row in rows]
    for index, answer in zip(good, batches.bisect_failures(data, call, notes), strict=True):
        answered[index] = answer
    return answered


def with_answer(row: dict[str, Any], answer: batches.Answer) -> dict[str, Any]:
    """Return a row with its answer; one that failed before is passed on."""
    return row if row["_error"] else with_output(row, answer, pooling.require_columns)


def with_columns(row: Mapping[str, Any], answer: batches.Answer) -> dict[str, Any]:
    """Return a row with the function's result in place of its columns."""
    row = {**row, "_raw": source.raw_input(row)}  # of the input: its columns are replaced below
    if isinstance(answer, dict):
        return {**row, "_data": pickle.dumps(answer)}
    return {**row, "_error": answer, "_stage": row["_stage"] or "preprocess", "_data": b""}


def pack_code(work: str) -> dict[str, bytes]:
    """Return the files below WORK/code by relative name; they travel with the replica."""
    root = os.path.join(work, "code")
    packed = {}
    for folder, _, names in sorted(os.walk(root)):
        for name in sorted(names):
            path = os.path.join(folder, name)
            with open(path, "rb") as file:
                packed[os.path.relpath(path, root)] = file.read()
    return packed


def unpack_code(code: dict[str, bytes]) -> str:
    """Write packed files into a new folder, removed at exit, and return it."""
    root = tempfile.mkdtemp(prefix="vlaunch-code-")
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    for name, data in code.items():
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)
    return root


def load_target(code: dict[str, bytes], target: str) -> Any:
    """Import `module:Name` from packed files; a shipped file takes precedence over an installed
    module.

    Raises:
        ImportError: the module, one of its imports, or the name is missing.
    """
    name, _, attribute = target.partition(":")
    root = unpack_code(code)
    sys.path.insert(0, root)
    shadowed = sys.modules.get(name)
    if (
        shadowed is not None
        and f"{name.replace('.', '/')}.py" in code
        and not str(shadowed.__file__ or "").startswith(root)
    ):
        del sys.modules[name]
    target_object: Any = importlib.import_module(name)
    for part in attribute.split("."):
        if not hasattr(target_object, part):
            raise ImportError(f"{name} has no `{attribute}`")
        target_object = getattr(target_object, part)
    return target_object
