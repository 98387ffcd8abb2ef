"""Mode `engine`: vLLM replicas as Ray Data actors, fed with prompts prepared on CPUs."""

from __future__ import annotations

import array
import math
import pickle
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..job import PlacedJob
from . import adapters, budget, cluster, lines, order, predict, prompts, results, source
from .generation import error_reason
from .job_file import thin_job
from .manifest import Manifest
from .openai_format.request import parse_request
from .progress import Tracker
from .ray_internals import set_claims
from .replica import Replica
from .results import Converter, Part

if TYPE_CHECKING:
    from ray.data import Dataset

# vLLM's largest default for `max_num_seqs`, which depends on the device
SEQUENCES = 1024
# batches wait for their slowest row: twice the engine's sequences keep it busy
OVERLAP = 2
ACTOR = "Replica"  # part of Ray's name for the actors of the inference stage
PREPARED = ("_prompt", "_second", "_tokens")  # columns of a prepared row
# prompter and tokenizer by job digest, slow to create: Ray Data unpickles a stage for each task, in
# long-lived processes
TOOLS: dict[str, tuple[Any, Any]] = {}


def run(
    job: PlacedJob,
    manifest: Manifest,
    pending: Mapping[int, bytes],
    progress: Tracker,
    current: budget.CurrentMonitor,
) -> Iterator[list[Part]]:
    """Yield answered and failed rows, in blocks, until every pending row came by."""
    if job.prompt is not None:
        prompts.Prompter(job)  # reject an invalid template here, not on every row
    cluster.connect(logs=False)
    cluster.configure_data()
    rows = source.count_rows(pending)
    batch = source.batch_rows(job.engine.batch_size, rows, job.engine.replicas[1])
    at_once = window_rows(job, batch, rows, manifest.row_bytes)
    data = predict.add_preprocess_stage(source.create_dataset(job, manifest, pending, at_once), job)
    data = add_prepare_stage(data, job, batch, **prepare_options(job, rows, at_once))
    data = add_inference_stage(data, Converter(job, manifest.types), batch, rows)
    with budget.ReplicaMonitor(
        job, progress, ACTOR, job.engine.replicas, replica_resources(job), current
    ) as watch:
        for table in cluster.iter_tables(data):
            parts = results.unpack(table)
            watch.finished(results.count_rows(parts))
            yield parts


def replica_resources(job: PlacedJob) -> dict[str, float]:
    """Return the Ray resources of one replica."""
    gpus = job.engine.tp * job.engine.pp
    return {"GPU": float(gpus), "CPU": float(gpus)}


def concurrency(args: Mapping[str, Any], batch: int) -> int:
    """Return the batches in flight per replica that keep vLLM busy."""
    sequences = int(args.get("max_num_seqs") or SEQUENCES)
    return min(64, max(4, math.ceil(OVERLAP * sequences / batch)))


def window_rows(job: PlacedJob, batch: int, rows: int, size: float) -> int | None:
    """Return the rows prepared and ordered at once, of `size` bytes each; None for all of them.

    After a preprocess stage, only a batch: the engine must not wait for slow rows.
    """
    if job.preprocess:
        return batch
    if rows <= source.FEW_ROWS and rows * size <= order.BYTES:
        return None
    return order.window_rows(job.engine.order, batch, size)


def prepare_options(job: PlacedJob, rows: int, at_once: int | None) -> dict[str, Any]:
    """Return the number of prepare processes and their claims: no CPU, for replicas may hold all.

    When all rows are prepared at once, Ray Data fuses reading and preparing, given equal claims:
    each process takes seconds of a core to start, while engines load.
    """
    if at_once is None:
        return {"size": 1, "num_cpus": source.TASK_CPUS, **source.task_resources(job.read.paths)}
    size = max(source.worker_count(rows), job.engine.replicas[1])
    return {"size": size, "num_cpus": source.TASK_CPUS}


def add_prepare_stage(
    data: Dataset, job: PlacedJob, batch: int, size: int, **claims: Any
) -> Dataset:
    """Add the stage that turns blocks into prompts and cuts them into batches."""
    from ray.data import TaskPoolStrategy

    pool = TaskPoolStrategy(size=size)
    data = data.map_batches(
        Prepare(thin_job(job)), batch_size=None, batch_format="pyarrow", compute=pool, **claims
    )
    # with equal claims Ray Data fuses both stages
    data = data.repartition(target_num_rows_per_block=batch)
    set_claims(data, pool, **claims)
    return data


def add_inference_stage(data: Dataset, converter: Converter, batch: int, rows: int) -> Dataset:
    """Add the stage of replicas, each with several batches in flight, one thread per batch."""
    from ray.data import ActorPoolStrategy

    job = converter.job
    minimum, maximum = job.engine.replicas
    concurrent = concurrency(job.engine.args, batch)
    in_flight = source.batches_in_flight(concurrent + 2, batch, rows, maximum)
    pool = ActorPoolStrategy(
        min_size=minimum,
        max_size=maximum,
        max_tasks_in_flight_per_actor=in_flight,
        max_concurrent_calls_per_actor=min(concurrent, in_flight),
        enable_true_multi_threading=True,
    )
    constructor_args = {
        "arguments": engine_arguments(job),
        "converter": converter,
        "gate": cluster.create_gate(minimum),
    }
    return data.map_batches(
        Replica,
        batch_size=batch,
        batch_format="pyarrow",
        zero_copy_batch=True,
        compute=pool,
        fn_constructor_kwargs=constructor_args,
        **replica_claims(job),
    )


def engine_arguments(job: PlacedJob) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM`, or of `vllm serve` for requests.

    An engine on one GPU is one process beside its actor; with several GPUs it has one Ray worker in
    each bundle of its placement group.
    """
    gpus = job.engine.tp * job.engine.pp
    return {
        "model": job.model,
        # vLLM derives the pooling of a generating model from its architecture
        **({} if job.task == "generate" else {"runner": "pooling"}),
        # a default of `vllm.LLM` only
        **({"disable_log_stats": True} if job.row_kind == "request" else {}),
        "tensor_parallel_size": job.engine.tp,
        "pipeline_parallel_size": job.engine.pp,
        "distributed_executor_backend": "uni" if gpus == 1 else "ray",
        **adapters.adapter_arguments(job),
        **job.engine.args,
    }


def replica_claims(job: PlacedJob) -> dict[str, Any]:
    """Return a replica's Ray claims: a GPU and a CPU, or a placement group."""
    gpus = job.engine.tp * job.engine.pp
    if gpus == 1:
        return {"num_gpus": 1, "num_cpus": 1}
    return {
        "num_gpus": 0,
        "ray_remote_args_fn": partial(create_placement_group, gpus, job.engine.placement),
    }


def create_placement_group(size: int, placement: str) -> dict[str, Any]:
    """Create a replica's placement group; its engine puts a worker into each bundle."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray_name = placement.upper().replace("-", "_")  # as Ray spells it
    placement_group = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * size, strategy=ray_name)
    strategy = PlacementGroupSchedulingStrategy(
        placement_group, placement_group_capture_child_tasks=True
    )
    return {"scheduling_strategy": strategy}


class Prepare:
    """Stage from input rows to prompts or errors; a row never stops the job."""

    def __init__(self, job: PlacedJob) -> None:
        self.job = job

    def __call__(self, table: Any) -> Any:
        """Prepare a block."""
        if self.job.prompt is not None:
            self.tools()  # load it here: a missing tokenizer would fail every row
        rows = [self.prepare_row(row) for row in table.to_pylist()]
        if self.job.engine.order == "prefix":
            rows.sort(key=order.prompt_key)
        return source.to_block(rows, PREPARED)

    def prepare_row(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return a row with its prompt, without its input columns."""
        data = row.pop("_data")
        prepared = {**row, "_prompt": "", "_second": "", "_tokens": b""}
        if row["_error"]:
            return prepared
        try:
            prepared["_raw"] = row["_raw"] or source.input_excerpt(data)
            return prepared | self.build_request(pickle.loads(data))  # noqa: S301 - our own data
        # any exception from a template belongs to its row
        except Exception as problem:
            return {**prepared, "_stage": "prompt", "_error": lines.excerpt(error_reason(problem))}

    def build_request(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Return a text, the two texts of a score, a chat's tokens (special tokens included), or a
        request's body and path.
        """
        if self.job.row_kind == "request":
            path, body = parse_request(columns)
            return {"_prompt": body, "_second": path}
        prompter, tokenizer = self.tools()
        if self.job.task == "score":
            first, second = prompter.texts(columns)
            f"{first}{second}".encode()
            return {"_prompt": first, "_second": second}
        prompt = prompter(columns)
        if isinstance(prompt, str):
            prompt.encode()
            return {"_prompt": prompt}
        text = prompter.chat(tokenizer, prompt, prompter.tools(columns))
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        return {"_tokens": array.array(order.TOKENS, tokens).tobytes()}

    def tools(self) -> tuple[Any, Any]:
        """Return this process's prompter and, for chats, its tokenizer."""
        if self.job.digest not in TOOLS:
            TOOLS.clear()  # a Ray process may have worked for another job
            prompter = prompts.Prompter(self.job)
            tokenizer = load_tokenizer(self.job) if self.job.chats else None
            prompter.check_template(tokenizer)
            TOOLS[self.job.digest] = prompter, tokenizer
        return TOOLS[self.job.digest]


def load_tokenizer(job: PlacedJob) -> Any:
    """Load the model's tokenizer, of vLLM's revision."""
    from transformers import AutoTokenizer

    args = job.engine.args
    revision = args.get("tokenizer_revision") or args.get("revision")
    return AutoTokenizer.from_pretrained(
        args.get("tokenizer") or job.model,
        revision=revision or "main",
        trust_remote_code=bool(args.get("trust_remote_code")),
    )
