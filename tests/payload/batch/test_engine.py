"""What vLLM replicas are built with and given: arguments, overlap, and requests.

The engine itself runs in the lab.
"""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launcher.payload.batch import engine, failures
from launcher.payload.batch.prompts import Prompter
from tests.payload.batch.jobs import job


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
    """Puts messages together as a chat template would, and makes a token of each character."""

    def apply_chat_template(self, messages: list[dict[str, str]], **asked: Any) -> str:
        if "refuse" in messages[-1]["content"]:
            raise ValueError("no such role")
        return "<s>" + "".join(message["content"] for message in messages)

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens, "the template has put them there already"
        return {"input_ids": [ord(letter) for letter in text]}


def prepared(asked: Any, columns: dict[str, Any] | None, **given: str) -> dict[str, Any]:
    prepare = engine.Prepare(asked)
    if asked.prompt.chat:
        prepare.made = (Prompter(asked), Tokenizer())
    found = row(columns, **given)
    added = prepare(found)
    return {**found, **added}


def test_an_engine_has_twice_the_rows_in_hand_that_it_runs_at_once() -> None:
    """Batches wait for their slowest row; within bounds, so that neither threads nor memory run
    away.
    """
    assert engine.concurrency({"max_num_seqs": 256}, 64) == 8
    assert engine.concurrency({}, 64) == 32
    assert engine.concurrency({"max_num_seqs": 8}, 64) == 4
    assert engine.concurrency({"max_num_seqs": 4096}, 16) == 64


def test_replicas_are_built_as_the_job_says(tmp_path: Path) -> None:
    """Parallel sizes and placement from the job; vLLM tokenizes; a row's error does not end the
    job.
    """
    asked = job(
        tmp_path,
        engine={
            "args": {"max_model_len": 512},
            "tp": 2,
            "replicas": [1, 3],
            "placement": "STRICT_PACK",
        },
    )
    made = engine.config(asked, 64, 1_000_000)
    assert made["model_source"] == "tiny"
    assert made["engine_kwargs"] == {
        "max_model_len": 512,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "disable_log_stats": True,
    }
    assert made["concurrency"] == (1, 3)
    assert made["placement_group_config"] == {
        "bundle_per_worker": {"GPU": 1, "CPU": 1},
        "strategy": "STRICT_PACK",
    }
    assert made["should_continue_on_error"]
    assert not made["log_engine_metrics"]
    assert not any(
        made[name] for name in ("chat_template_stage", "tokenize_stage", "detokenize_stage")
    )
    assert engine.needs(asked) == {"GPU": 2.0, "CPU": 2.0}


def test_a_small_job_leaves_batches_for_the_second_replica(tmp_path: Path) -> None:
    """Neither holds more than half, and no more run at once than it holds."""
    made = engine.config(job(tmp_path, engine={"replicas": [2, 2]}), 50, 200)
    assert (made["max_tasks_in_flight_per_actor"], made["max_concurrent_batches"]) == (2, 2)


def test_a_text_prompt_is_left_to_vllm_to_tokenize(tmp_path: Path) -> None:
    """It adds the special tokens, as it does for anybody's prompt; the input does not travel any
    further.
    """
    made = prepared(job(tmp_path), {"text": "hello"})
    assert (made["prompt"], list(made["tokenized_prompt"]), made["__inference_error__"]) == (
        "hello",
        [],
        "",
    )
    assert "_data" not in made


def test_a_chat_is_tokenized_without_adding_special_tokens_again(tmp_path: Path) -> None:
    """The model's template has put them there."""
    asked = job(
        tmp_path, prompt={"column": None, "chat": [{"role": "user", "content": "{{ text }}"}]}
    )
    assert prepared(asked, {"text": "hi"})["tokenized_prompt"] == [
        ord(letter) for letter in "<s>hi"
    ]


def test_a_row_without_a_prompt_is_an_error_of_its_own(tmp_path: Path) -> None:
    """Missing, of another type, not text, or refused by the model's template: the engine never sees
    it.
    """
    chat = job(
        tmp_path, prompt={"column": None, "chat": [{"role": "user", "content": "{{ text }}"}]}
    )
    plain = job(tmp_path)
    assert "which this row lacks" in prepared(plain, {"other": 1})["__inference_error__"]
    assert "surrogate" in prepared(plain, {"text": "half \ud800"})["__inference_error__"]
    refused = prepared(chat, {"text": "refuse"})
    assert "no such role" in refused["__inference_error__"]
    assert engine.result(refused) == {
        "_row": 7,
        "_error": refused["__inference_error__"],
        "_keep": b"",
        "_stage": "prompt",
        "_raw": "refuse",
    }


def test_a_row_that_failed_to_be_read_passes_by(tmp_path: Path) -> None:
    """With its reason and its stage."""
    made = engine.result(prepared(job(tmp_path), None, error="not JSON", stage="read"))
    assert (made["_error"], made["_stage"]) == ("not JSON", "read")


def test_answers_and_refusals_of_vllm_become_rows() -> None:
    """Only what is written leaves the pipeline."""
    answer = {"answer": "yes", "finish_reason": "stop", "prompt_tokens": 3, "output_tokens": 1}
    found = {
        "_row": 7,
        "_keep": b"k",
        "_stage": "",
        "_raw": "raw",
        "__inference_error__": "",
        **answer,
    }
    assert engine.result(found) == {
        "_row": 7,
        "_error": "",
        "_keep": b"k",
        "_stage": "",
        "_raw": "",
        **answer,
    }
    refused = engine.result(
        {**found, "__inference_error__": "ValueError: the prompt is longer than 512 tokens"}
    )
    assert (refused["_stage"], refused["_raw"]) == ("inference", "raw")
    assert "answer" not in refused


def test_what_travels_to_workers_does_not_hold_a_compiled_template(tmp_path: Path) -> None:
    """Compiled templates and tokenizers do not pickle: each process makes its own."""
    prepare = engine.Prepare(job(tmp_path))
    prepare.tools()
    assert pickle.loads(pickle.dumps(prepare)).made is None


def test_a_tokenizer_that_cannot_be_had_is_no_rows_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would make an error of every row; and it is of the revision that the engine loads."""
    asked = job(
        tmp_path,
        prompt={"column": None, "chat": [{"role": "user", "content": "{{ text }}"}]},
        engine={"args": {"revision": "v2"}},
    )
    said: list[str] = []

    class AutoTokenizer:
        @staticmethod
        def from_pretrained(name: str, *, revision: str, trust_remote_code: bool) -> None:
            said.append(revision)
            raise OSError("429 Too Many Requests")

    module = ModuleType("transformers")
    module.AutoTokenizer = AutoTokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers", module)
    row = {
        "_row": 0,
        "_error": "",
        "_stage": "",
        "_raw": "",
        "_keep": b"",
        "_data": pickle.dumps({"text": "hi"}),
    }
    with pytest.raises(OSError, match="429"):
        engine.Prepare(asked)(row)
    assert said == ["v2"]


def staged(monkeypatch: pytest.MonkeyPatch, base: type) -> type:
    """The replica, on another stage of Ray Data LLM's than the real one."""
    name = "ray.llm._internal.batch.stages.vllm_engine_stage"
    for index in range(1, name.count(".") + 1):
        above = ".".join(name.split(".")[:index])
        monkeypatch.setitem(sys.modules, above, ModuleType(above))
    stage = ModuleType(name)
    stage.vLLMEngineStageUDF = base  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, name, stage)
    return engine.replica({})


# Of vLLM's CPU build, whose engine and worker are processes of their own; shortened.
DIED = """\
(Worker pid=431) ERROR 11-22 03:10:11 [multiproc_executor.py:870] WorkerProc failed to start.
(Worker pid=431) ERROR 11-22 03:10:11 [multiproc_executor.py:870] Traceback (most recent call last):
(Worker pid=431) ERROR 11-22 03:10:11 [multiproc_executor.py:870]   File "vllm/v1/worker/cpu_worker.py", line 90, in load_model
(Worker pid=431) ERROR 11-22 03:10:11 [multiproc_executor.py:870]     began = time.monotonic()
(Worker pid=431) ERROR 11-22 03:10:11 [multiproc_executor.py:870]             ^^^^
(Worker pid=431) ERROR 11-22 03:10:11 [multiproc_executor.py:870] NameError: name 'time' is not defined
(EngineCore pid=412) ERROR 11-22 03:10:12 [core.py:1510] EngineCore failed to start.
(EngineCore pid=412) ERROR 11-22 03:10:12 [core.py:1510] Exception: WorkerProc initialization failed due to an exception in a \
background process. See stack trace for root cause.
(EngineCore pid=412) Process EngineCore:
(EngineCore pid=412) Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace \
for root cause.
"""  # noqa: E501


@pytest.mark.parametrize(
    ("log", "last"),
    [
        (DIED, "NameError: name 'time' is not defined"),
        (
            "nothing to see\n",
            (
                "RuntimeError: Engine core initialization failed. See root cause above. Failed core"
                " proc(s): {}"
            ),
        ),
    ],
)
def test_an_engine_that_does_not_start_shows_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, log: str, last: str
) -> None:
    """vLLM only points to what its own processes print; what is in the log of an earlier actor of
    this process is not it.
    """
    path = tmp_path / "worker.out"
    path.write_text("ValueError: of an earlier actor\n")

    class Stage:
        def __init__(self) -> None:
            with path.open("a") as file:
                file.write(log)
            raise RuntimeError(
                "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
            )

    monkeypatch.setattr(engine, "check", lambda sampling: None)
    monkeypatch.setattr(engine, "logs", lambda: {str(path): path.stat().st_size})
    made = staged(monkeypatch, Stage)
    vllm = ModuleType("vllm.sampling_params")
    vllm.RequestOutputKind = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", vllm)
    with pytest.raises((engine.NotStarted, RuntimeError)) as raised:
        made()
    # Of what is raised where an actor is made, Ray passes on the text alone.
    failed = failures.explain(
        RuntimeError("".join(traceback.format_exception(raised.value))), "engine"
    )

    assert failed.message == last
    assert ("began = time.monotonic()" in failed.evidence) is (log == DIED)
    assert "earlier actor" not in failed.evidence


def test_the_logs_of_a_process_are_files(tmp_path: Path) -> None:
    """As Ray makes them, with what is in them by then; a pipe cannot be read again."""
    said = (
        "import sys; from launcher.payload.batch import engine; print('one', flush=True);"
        " sys.stderr.write(str(engine.logs()))"
    )
    with (tmp_path / "worker.out").open("w") as out:
        done = subprocess.run(
            [sys.executable, "-c", said], stdout=out, stderr=subprocess.PIPE, text=True, check=True
        )

    assert done.stderr == "{'/proc/self/fd/1': 4}"


def test_a_request_that_vllm_gave_up_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much of it there is."""
    replica: Any = object.__new__(staged(monkeypatch, object))
    replica.finished = {}

    async def generate(ended: str) -> Any:
        return SimpleNamespace(outputs=[SimpleNamespace(finish_reason=ended)])

    for ended in ("abort", "error"):
        replica.generate = lambda _, ended=ended: generate(ended)
        with pytest.raises(engine.NoAnswer, match=f"ended this request: {ended}"):
            asyncio.run(replica.remembering(SimpleNamespace(idx_in_batch=0, request_id=1)))
    replica.generate = lambda _: generate("length")
    asyncio.run(replica.remembering(SimpleNamespace(idx_in_batch=0, request_id=1)))
    assert replica.finished == {(0, 1): "length"}
