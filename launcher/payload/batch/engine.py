"""Mode `engine`: vLLM replicas as Ray Data LLM builds them, fed with prompts that are made row by
row on CPUs.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from . import cluster, failures, postmortem, source
from .job import ANSWER, Failed
from .ray_internals import engine_stage

# vLLM's largest default for `max_num_seqs`; which default holds depends on the device
SEQUENCES = 1024
# batches wait for their slowest row: twice the rows that an engine runs at once keep it full
OVERLAP = 2
MANY = 10_000  # lines of a log, of which no more than the last 64 KiB are read
ACTOR = "Replica"  # how Ray names the actors of the inference stage (with more around it)


def run(
    job: Any, manifest: Any, pending: Mapping[int, list[tuple[int, int]]], progress: Any
) -> Iterator[list[dict[str, Any]]]:
    """Yield answered and failed rows, in blocks, until every pending row came by."""
    from . import budget, predict, prompts

    prompts.Prompter(job)  # a template that is wrong in itself is refused here, not on every row
    cluster.connect(logs=False)
    cluster.settings()
    rows = source.count(pending)
    most = job.engine.replicas[1]
    batch = source.batch_rows(job.engine.batch_size, rows, most)
    data = source.dataset(job, manifest, pending, batch)
    if job.preprocess:
        data = predict.preprocess(data, job)
    data = processor(job, batch, rows)(data)
    with budget.Watch(job, progress, ACTOR, job.engine.replicas, needs(job)) as watch:
        for table in cluster.stream(data):
            found = [result(row) for row in table.column("__data").to_pylist()]
            watch.finished(len(found))
            yield found


def needs(job: Any) -> dict[str, float]:
    """Return the Ray resources of one replica."""
    each = job.engine.tp * job.engine.pp
    return {"GPU": float(each), "CPU": float(each)}


def concurrency(args: Mapping[str, Any], batch: int) -> int:
    """Return how many batches one replica should have in hand so that vLLM always has rows to
    run.
    """
    sequences = int(args.get("max_num_seqs") or SEQUENCES)
    return min(64, max(4, math.ceil(OVERLAP * sequences / batch)))


def config(job: Any, batch: int, rows: int) -> dict[str, Any]:
    """Return the arguments of Ray Data LLM's `vLLMEngineProcessorConfig`."""
    args = dict(job.engine.args)
    args["tensor_parallel_size"] = job.engine.tp
    args["pipeline_parallel_size"] = job.engine.pp
    args.setdefault("disable_log_stats", True)  # else every batch writes a line
    least, most = job.engine.replicas
    concurrent = concurrency(args, batch)
    mine = source.in_flight(concurrent + 2, batch, rows, most)
    placement: dict[str, Any] = {"bundle_per_worker": {"GPU": 1, "CPU": 1}}
    if job.engine.tp * job.engine.pp > 1:
        placement["strategy"] = job.engine.placement
    return {
        "model_source": job.model,
        "engine_kwargs": args,
        "batch_size": batch,
        "concurrency": (least, most),
        "max_concurrent_batches": min(concurrent, mine),
        "max_tasks_in_flight_per_actor": mine,
        "placement_group_config": placement,
        "should_continue_on_error": True,
        "log_engine_metrics": False,
        "chat_template_stage": False,
        "tokenize_stage": False,
        "detokenize_stage": False,
    }


def processor(job: Any, batch: int, rows: int) -> Any:
    """Return Ray Data LLM's processor for this job: prompts, then engines whose rows are ready to
    be written.
    """
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    light = {"num_cpus": source.LIGHT, "concurrency": max(2, job.engine.replicas[1])}
    asked = vLLMEngineProcessorConfig(**config(job, batch, rows))
    built = build_processor(asked, preprocess=Prepare(job), preprocess_map_kwargs=light)
    stage = built.get_stage_by_name("vLLMEngineStage")
    stage.fn = replica(job.sampling, cluster.gate(job.engine.replicas[0]))
    built.postprocess = None  # a task for each block, only to rename columns: `result` does it
    return built


class Prepare:
    """One row of input → one request, or the reason why there is none.

    A row cannot stop the job here.
    """

    def __init__(self, job: Any) -> None:
        self.job = job
        self.made: tuple[Any, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"job": self.job, "made": None}

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        """Return the columns to add; the columns that are no longer needed leave the row."""
        import pickle

        data = row.pop("_data")
        empty = {"prompt": "", "tokenized_prompt": [], "sampling_params": {"n": 1}}
        if row["_error"]:
            return {**empty, "__inference_error__": row["_error"]}
        # a tokenizer that cannot be had is no row's error: it would make one of every row
        self.tools()
        try:
            row["_raw"] = row["_raw"] or source.shown(data)
            return {
                **empty,
                **self.request(pickle.loads(data)),  # noqa: S301 - of our own read task
                "__inference_error__": "",
            }
        # whatever a hostile row does to a template is that row's own error
        except Exception as problem:
            row["_stage"] = "prompt"
            return {**empty, "__inference_error__": reason(problem)}

    def request(self, columns: dict[str, Any]) -> dict[str, Any]:
        """Return `prompt`, or `tokenized_prompt` for a chat (whose template has put the special
        tokens there already).
        """
        prompter, tokenizer = self.tools()
        prompt = prompter(columns)
        if isinstance(prompt, str):
            prompt.encode()
            return {"prompt": prompt}
        text = prompter.chat(tokenizer, prompt)
        return {"tokenized_prompt": tokenizer(text, add_special_tokens=False)["input_ids"]}

    def tools(self) -> tuple[Any, Any]:
        """Return this process's prompter and, for chats, its tokenizer."""
        if self.made is None:
            from .prompts import Prompter

            tokenizer = None
            if self.job.prompt is not None and self.job.prompt.chat:
                from transformers import AutoTokenizer

                name = self.job.engine.args.get("tokenizer") or self.job.model
                trust = bool(self.job.engine.args.get("trust_remote_code"))
                # as in vLLM
                revision = self.job.engine.args.get(
                    "tokenizer_revision"
                ) or self.job.engine.args.get("revision")
                tokenizer = AutoTokenizer.from_pretrained(
                    name, revision=revision or "main", trust_remote_code=trust
                )
            self.made = (Prompter(self.job), tokenizer)
        return self.made


def reason(problem: BaseException) -> str:
    """Return what to write into an error row for this exception."""
    if isinstance(problem, UnicodeEncodeError):
        return "the prompt holds half of a surrogate pair, which is not text"
    name = type(problem).__name__
    text = str(problem).strip()
    if name == "PromptError":
        return text
    return f"{name}: {text}" if text else name


class NoAnswer(Exception):
    """What vLLM says of a request that it cannot do."""


class NotStarted(Exception):
    """What the log of a replica says of an engine that did not start.

    Ray passes on only the text of such an exception.
    """


def logs() -> dict[str, int]:
    """Return the files that this process and its children print to, with their lengths; vLLM's log
    comes first, on stdout.
    """
    sizes = {f"/proc/self/fd/{number}": os.fstat(number) for number in (1, 2)}
    return {path: info.st_size for path, info in sizes.items() if stat.S_ISREG(info.st_mode)}


def cause(problem: BaseException, before: Mapping[str, int]) -> list[str]:
    """Return what an engine's own processes said, since the logs were so long, of what `problem`
    only points to; or nothing.
    """
    if not failures.POINTER.search(str(problem)):
        return []
    try:
        return failures.root(
            line for path, size in before.items() for line in postmortem.tail(path, MANY, size)
        )
    except OSError:  # what it says only explains
        return []


@contextmanager
def explained() -> Iterator[None]:
    """Say why an engine does not start in its own words, where its logs have them."""
    before = logs()
    try:
        yield
    except Exception as problem:
        if not (found := cause(problem, before)):
            raise
        raise NotStarted("\n".join(["the engine did not start:", *found])) from problem


def replica(sampling: Mapping[str, Any], gate: Any = None) -> type:
    """Return Ray Data LLM's engine stage, with the sampling parameters as they were written and
    only the answer as output.
    """

    class Replica(engine_stage()):  # the base is made late, where Ray is
        """One vLLM engine."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            from vllm.sampling_params import RequestOutputKind

            check(sampling)
            with explained():
                super().__init__(*args, **kwargs)
            # Else vLLM hands out every row at every token.
            self.asked = {**sampling, "output_kind": RequestOutputKind.FINAL_ONLY}
            self.finished: dict[tuple[int, int], str] = {}
            cluster.arrive(gate)

        async def remembering(self, request: Any) -> Any:
            """Generate; keep why it ended, and why it could not, which the stage around it leaves
            out.
            """
            try:
                output = await self.generate(request)
            except Exception as problem:
                if str(problem).strip() or problem.__cause__ is None:
                    raise
                raise NoAnswer(reason(problem.__cause__)) from problem
            self.finished[request.idx_in_batch, request.request_id] = ended(output)
            return output

        def prepare(self, row: dict[str, Any]) -> None:
            row["sampling_params"] = dict(self.asked)
            if len(row["tokenized_prompt"]):
                row["prompt"] = None
            else:
                del row["tokenized_prompt"]

        def columns(self, row: dict[str, Any], index: int, out: dict[str, Any]) -> dict[str, Any]:
            for name in ("prompt", "tokenized_prompt", "sampling_params"):
                row.pop(name, None)
            if not out["__inference_error__"]:
                row["_raw"] = ""  # only for error rows
            return {
                "answer": out["generated_text"],
                "prompt_tokens": out["num_input_tokens"],
                "output_tokens": out["num_generated_tokens"],
                "__inference_error__": out["__inference_error__"].removeprefix("NoAnswer: "),
                "finish_reason": self.finished.pop((index, out["request_id"]), ""),
            }

    return Replica


def ended(output: Any) -> str:
    """Return why vLLM ended a request.

    Raises:
        NoAnswer: It gave the request up.
    """
    why = str(output.outputs[0].finish_reason or "")
    if why in ("abort", "error"):
        raise NoAnswer(f"vLLM ended this request: {why}")
    return why


def check(sampling: Mapping[str, Any]) -> None:
    """Make vLLM's sampling parameters once, on a replica that is about to load: what is wrong in
    them is wrong for every row.

    Raises:
        Failed: vLLM does not take them.
    """
    import vllm
    from vllm.sampling_params import StructuredOutputsParams

    plain = dict(sampling)
    structured = plain.pop("structured_outputs", None)
    try:
        made = StructuredOutputsParams(**structured) if structured else None
        vllm.SamplingParams(**plain, structured_outputs=made)
    except Exception as problem:
        raise Failed(
            "vLLM refuses these sampling parameters",
            reason(problem),
            "change `sampling` as that says",
        ) from problem


def result(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as the sink takes it."""
    error = row.get("__inference_error__") or ""
    kept = {"_row": row["_row"], "_error": error, "_keep": row["_keep"]}
    if error:
        return {**kept, "_stage": row["_stage"] or "inference", "_raw": row["_raw"]}
    return {**kept, "_stage": "", "_raw": "", **{name: row[name] for name in ANSWER}}
