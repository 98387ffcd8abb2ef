"""Setup of vLLM replicas: arguments, claims, overlap and prompts.

The replicas themselves are in `test_replica`; the engine runs in the lab.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from launcher.batch.driver import engine, order, source
from launcher.batch.driver.job_file import Refused
from launcher.batch.driver.prompts import Prompter
from launcher.batch.driver.ray_internals import HEAD_RESOURCES
from launcher.batch.driver.results import Converter
from tests.batch.driver.jobs import job

CHAT = {"column": None, "chat": [{"role": "user", "content": "{{ text }}"}]}


@pytest.fixture(autouse=True)
def clear_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear the per-process cache between tests."""
    monkeypatch.setattr(engine, "TOOLS", {})


def row(columns: dict[str, Any] | None, error: str = "", stage: str = "") -> dict[str, Any]:
    data = pickle.dumps(columns) if columns is not None else b""
    return {
        "_row": 7,
        "_error": error,
        "_stage": stage,
        "_raw": "raw" if error else "",
        "_keep": b"",
        "_data": data,
    }


class Tokenizer:
    """Fake tokenizer with a chat template and a token per character."""

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
        if "refuse" in messages[-1]["content"]:
            raise ValueError("no such role")
        return "<s>" + "".join(message["content"] for message in messages)

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens, "the template has put them there already"
        return {"input_ids": [ord(letter) for letter in text]}


def prepared(spec: Any, *columns: dict[str, Any] | None, **changes: str) -> list[dict[str, Any]]:
    """Prepare rows in order of their numbers."""
    engine.TOOLS.clear()
    if spec.prompt.chat:
        engine.TOOLS[spec.digest] = (Prompter(spec), Tokenizer())
    rows = [{**row(item, **changes), "_row": place} for place, item in enumerate(columns)]
    prepared_rows: list[dict[str, Any]] = engine.Prepare(spec)(source.to_block(rows)).to_pylist()
    return sorted(prepared_rows, key=lambda item: int(item["_row"]))


def error(spec: Any, columns: dict[str, Any]) -> tuple[str, str]:
    """Return the reason of a row without a valid prompt, and its stage."""
    (result,) = prepared(spec, columns)
    return result["_stage"], result["_error"]


def test_the_number_of_rows_per_engine() -> None:
    """Twice its concurrency, as batches wait for their slowest row; limited, to save threads and
    memory.
    """
    assert engine.concurrency({"max_num_seqs": 256}, 64) == 8
    assert engine.concurrency({}, 64) == 32
    assert engine.concurrency({"max_num_seqs": 8}, 64) == 4
    assert engine.concurrency({"max_num_seqs": 4096}, 16) == 64


def test_replicas_follow_the_job(tmp_path: Path) -> None:
    """Parallel sizes from the job; an engine on several GPUs has Ray's workers."""
    spec = job(tmp_path, engine={"args": {"max_model_len": 512}})
    many = job(tmp_path, engine={"tp": 2, "pp": 3, "placement": "strict-pack"})

    assert engine.engine_arguments(spec) == {
        "model": "tiny",
        "max_model_len": 512,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "distributed_executor_backend": "uni",
    }
    assert engine.engine_arguments(job(tmp_path, task="embed"))["runner"] == "pooling"
    assert engine.engine_arguments(many)["distributed_executor_backend"] == "ray"
    assert engine.replica_resources(many) == {"GPU": 6.0, "CPU": 6.0}


def test_a_replica_claims_a_slot_or_a_placement_group(tmp_path: Path) -> None:
    """With a group it claims no GPU itself: its workers do."""
    spec = job(tmp_path)
    many = job(tmp_path, engine={"tp": 2, "placement": "strict-pack"})
    claims = engine.replica_claims(many)

    assert engine.replica_claims(spec) == {"num_gpus": 1, "num_cpus": 1}
    assert claims["num_gpus"] == 0
    assert claims["ray_remote_args_fn"].args == (2, "strict-pack")


class Dataset:
    """Fake dataset that records its stages and their claims."""

    def __init__(self) -> None:
        self.stages: list[tuple[Any, Any]] = []

    def map_batches(self, stage: Any, **options: Any) -> Dataset:
        self.stages.append((stage, options))
        return self

    def repartition(self, **options: Any) -> Dataset:
        self.stages.append(("repartition", options))
        return self


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replacement of Ray Data's pools."""
    ray, data = ModuleType("ray"), ModuleType("ray.data")
    data.ActorPoolStrategy = data.TaskPoolStrategy = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setitem(sys.modules, "ray.data", data)
    monkeypatch.setattr(engine.cluster, "create_gate", lambda least: f"gate of {least}")
    monkeypatch.setattr(
        engine, "set_claims", lambda result, *how, **what: result.stages.append((*how, what))
    )


@pytest.mark.usefixtures("pools")
def test_a_small_job_leaves_batches_for_the_second_replica(tmp_path: Path) -> None:
    """A replica gets at most half, and runs no more at once, in threads."""
    data = Dataset()
    spec = job(tmp_path, engine={"replicas": [2, 2]}, sampling={"temperature": 0})
    engine.add_inference_stage(data, Converter(spec, {}), 50, 200)
    ((stage, options),) = data.stages

    assert stage.__name__ == engine.ACTOR
    assert options["compute"] == {
        "min_size": 2,
        "max_size": 2,
        "max_tasks_in_flight_per_actor": 2,
        "max_concurrent_calls_per_actor": 2,
        "enable_true_multi_threading": True,
    }
    assert options["fn_constructor_kwargs"]["gate"] == "gate of 2"
    assert options["fn_constructor_kwargs"]["converter"].job.sampling.temperature == 0


@pytest.mark.usefixtures("pools")
def test_replicas_know_the_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of requests from their arguments, which name it."""
    monkeypatch.setattr(engine.adapters, "read_rank", lambda name, path: 8)
    for form, lora in (("jsonl", {"sql": "/l"}), ("openai", None)):
        data = Dataset()
        spec = job(tmp_path, lora={"sql": "/l"}, write={"format": form})
        engine.add_inference_stage(data, Converter(spec, {}), 50, 200)
        constructor_args = data.stages[0][1]["fn_constructor_kwargs"]
        assert constructor_args["converter"].job.lora == {"sql": "/l"}
        modules = constructor_args["arguments"].get("lora_modules")
        assert modules == (None if lora else ["sql=/l"])


@pytest.mark.usefixtures("pools")
def test_the_prepare_stage_claims_nothing(tmp_path: Path) -> None:
    """Replicas may have claimed all; the size of a task does not grow with the job's files."""
    data = Dataset()
    spec = job(tmp_path, *(f"{n}.jsonl" for n in range(9)))
    engine.add_prepare_stage(data, spec, 50, **engine.prepare_options(spec, 10**6, 4096))
    (stage, options), cut, claimed = data.stages

    assert (options["num_cpus"], options["compute"]) == (0, {"size": 2})
    assert (stage.job.read.paths, stage.job.identity) == ((), {})
    assert cut == ("repartition", {"target_num_rows_per_block": 50})
    assert claimed == ({"size": 2}, {"num_cpus": 0})


def test_prepared_batches_are_large_enough_to_sort(tmp_path: Path) -> None:
    """After a slow stage, a batch suffices."""
    plain = job(tmp_path)
    in_input_order = job(tmp_path, engine={"order": "given"})
    slow = job(tmp_path, preprocess={"function": "mine.py:ready"})

    rows = [engine.window_rows(spec, 50, 10**6, 99.0) for spec in (plain, in_input_order, slow)]
    assert rows == [order.WINDOW, 50, 50]
    assert engine.window_rows(slow, 50, 100, 99.0) == 50


@pytest.mark.usefixtures("pools")
def test_few_small_rows_are_read_and_prepared_in_a_single_process(tmp_path: Path) -> None:
    """Equal claims let Ray Data fuse both stages; large documents count as many rows."""
    spec = job(tmp_path, "a.jsonl", engine={"replicas": [2, 2]})
    data = Dataset()
    engine.add_prepare_stage(data, spec, 50, **engine.prepare_options(spec, source.FEW_ROWS, None))
    (_, options), _, (pool, claims) = data.stages

    assert engine.window_rows(spec, 50, source.FEW_ROWS, 99.0) is None
    assert engine.window_rows(spec, 50, source.FEW_ROWS, 99_000.0) is not None
    assert options["compute"] == pool == {"size": 1}
    assert claims == {"num_cpus": 0, **source.task_resources(spec.read.paths)}
    assert options["resources"] == claims["resources"] == HEAD_RESOURCES


@pytest.mark.usefixtures("pools")
@pytest.mark.parametrize(
    ("rows", "replicas", "processes"), [(20_000, 1, 1), (20_001, 1, 2), (200, 3, 3)]
)
def test_few_rows_are_prepared_by_few_processes(
    tmp_path: Path, rows: int, replicas: int, processes: int
) -> None:
    """Their start takes seconds of CPU time while engines load; every replica needs one."""
    data = Dataset()
    spec = job(tmp_path, engine={"replicas": [replicas, replicas]})
    engine.add_prepare_stage(data, spec, 50, **engine.prepare_options(spec, rows, 4096))
    (_, options), _, (pool, _) = data.stages

    assert options["compute"] == pool == {"size": processes}


def test_vllm_tokenizes_text_prompts(tmp_path: Path) -> None:
    """With special tokens, as usual; input columns stay only in error rows."""
    (result,) = prepared(job(tmp_path), {"text": "hello"})
    assert (result["_prompt"], result["_tokens"], result["_error"]) == ("hello", b"", "")
    assert result["_raw"] == "hello"
    assert "_data" not in result


@pytest.mark.parametrize("prompt", [{"column": "text"}, CHAT])
def test_rows_with_a_common_prefix_stay_together(tmp_path: Path, prompt: dict[str, Any]) -> None:
    """With their numbers, by text or tokens, beside a row without a prompt."""
    texts = ["b1", "a1", "", "b2", "a2"]
    by_name: dict[str, list[int]] = {}
    for how in ("prefix", "given"):
        spec = job(tmp_path, prompt=prompt, engine={"order": how})
        engine.TOOLS[spec.digest] = (Prompter(spec), Tokenizer())
        rows = [{**row({"text": text}), "_row": number} for number, text in enumerate(texts)]
        prepared_rows = engine.Prepare(spec)(source.to_block(rows)).to_pylist()
        by_name[how] = [row["_row"] for row in prepared_rows]
        assert [row["_row"] for row in prepared_rows if row["_error"]] == [2]

    assert by_name == {"prefix": [2, 1, 4, 0, 3], "given": [0, 1, 2, 3, 4]}


def test_a_row_without_a_prompt_is_an_error_row(tmp_path: Path) -> None:
    """Missing, of another type, not text, or rejected by the model's template: the engine never
    gets it.
    """
    chat, plain = job(tmp_path, prompt=CHAT), job(tmp_path)

    assert error(plain, {"other": 1}) == (
        "prompt",
        "the prompt is column `text`, which this row lacks",
    )
    assert "surrogate" in error(plain, {"text": "half \ud800"})[1]
    assert "no such role" in error(chat, {"text": "refuse"})[1]


def test_messages_and_tools_reach_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A template without tools ends the job before the first row."""
    prompt = {"column": None, "messages": "chat", "tools": "uses"}
    tools: list[Any] = []

    class ToolTokenizer(Tokenizer):
        template = "{{ tools }}"

        def get_chat_template(self, tools: list[Any]) -> str:
            return self.template

        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
            tools.append(options.get("tools"))
            return super().apply_chat_template(messages)

    monkeypatch.setattr(engine, "load_tokenizer", lambda spec: ToolTokenizer())
    stage = engine.Prepare(job(tmp_path, prompt=prompt))
    chat = [{"role": "user", "content": "hi"}]
    rows = [row({"chat": chat, "uses": [{"name": "a"}]}), row({"chat": chat})]
    results = stage(source.to_block(rows)).to_pylist()
    assert [result["_error"] for result in results] == ["", ""]
    assert tools == [[{"name": "a"}], None]
    engine.TOOLS.clear()
    ToolTokenizer.template = "{{ messages }}"
    with pytest.raises(Refused, match="does not support tools"):
        stage(source.to_block(rows))


def test_unencodable_reasons(tmp_path: Path) -> None:
    """They may quote the row."""

    def refuse(columns: dict[str, Any]) -> str:
        raise ValueError(columns["text"])

    spec = job(tmp_path)
    engine.TOOLS[spec.digest] = (refuse, None)
    (result,) = engine.Prepare(spec)(source.to_block([row({"text": "half \ud800"})])).to_pylist()

    assert result["_error"] == "ValueError: half \\ud800"


def test_unreadable_rows_pass_through(tmp_path: Path) -> None:
    """With reason and stage."""
    (result,) = prepared(job(tmp_path), None, error="not JSON", stage="read")
    assert (result["_error"], result["_stage"], result["_raw"]) == ("not JSON", "read", "raw")


def test_a_missing_tokenizer_fails_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all rows would fail; its revision is the engine's."""
    spec = job(tmp_path, prompt=CHAT, engine={"args": {"revision": "v2"}})
    messages: list[str] = []

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(name: str, *, revision: str, trust_remote_code: bool) -> None:
            messages.append(revision)
            raise OSError("429 Too Many Requests")

    module = ModuleType("transformers")
    module.AutoTokenizer = AutoTokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", module)
    with pytest.raises(OSError, match="429"):
        engine.Prepare(spec)(source.to_block([row({"text": "hi"})]))
    assert messages == ["v2"]


def test_a_process_loads_its_tokenizer_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray Data unpickles a stage for every block; another job's tokenizer is not reused."""
    options: list[str] = []
    monkeypatch.setattr(
        engine, "load_tokenizer", lambda spec: options.append(spec.digest) or Tokenizer()
    )
    for digest in ("one", "one", "two"):
        stage = pickle.loads(
            pickle.dumps(engine.Prepare(job(tmp_path, prompt=CHAT, digest=digest)))
        )
        stage(source.to_block([row({"text": "hi"})]))

    assert options == ["one", "two"]
