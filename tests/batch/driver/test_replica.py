"""One replica of vLLM: parameters, outputs, and failed starts. The lab runs the real engine."""

from __future__ import annotations

import subprocess
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from launcher.batch.driver import failures, replica
from launcher.batch.driver.job_file import Failed
from launcher.batch.driver.results import Converter
from launcher.batch.job import Sampling
from tests.batch.driver.jobs import job
from tests.batch.driver.test_engine import prepared

# From vLLM's CPU build with separate engine and worker processes; shortened.
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


class TooLong(ValueError):
    """A renderer's exception."""


class Engine:
    """A fake that answers at once; a prompt of `abort` is aborted."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.prompts: list[str] = []
        self.engine_core = SimpleNamespace(shutdown=lambda: None)

    def add_lora(self, adapter: Any) -> None:
        self.adapter = adapter

    def add_request(
        self, request_id: str, prompt: dict[str, Any], params: Any, lora_request: Any = None
    ) -> None:
        assert lora_request is getattr(self, "adapter", None)
        assert (params.output_kind, params.skip_clone) == ("final", True)
        tokens = prompt["prompt_token_ids"]
        text = "".join(map(chr, tokens))
        self.prompts.append(text)
        answer = SimpleNamespace(
            text=text[::-1], finish_reason="abort" if text == "abort" else "stop", token_ids=[1, 2]
        )
        self.outputs.append(
            SimpleNamespace(
                request_id=request_id, finished=True, prompt_token_ids=tokens, outputs=[answer]
            )
        )

    def step(self) -> list[Any]:
        outputs, self.outputs = self.outputs, []
        return outputs


class LLM:
    """A fake of `vllm.LLM`: one token per character, at most eight."""

    def __init__(self, **arguments: Any) -> None:
        assert arguments == {"model": "tiny"}
        self.llm_engine = Engine()
        self.model_config = SimpleNamespace(is_encoder_decoder=False)
        self.renderer = SimpleNamespace(render_cmpl=self.render)

    def render(self, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        (prompt,) = prompts
        tokens = prompt.get("prompt_token_ids") or [ord(letter) for letter in prompt["prompt"]]
        if len(tokens) > 8:
            raise TooLong("the prompt is too long")
        return [{"prompt_token_ids": tokens}]


class Params(SimpleNamespace):
    """Sampling parameters with a temperature."""

    def __init__(self, temperature: float = 1.0, structured_outputs: Any = None) -> None:
        if temperature < 0:
            raise ValueError("temperature must be non-negative, got -1")
        super().__init__(temperature=temperature, structured_outputs=structured_outputs)


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A fake of vLLM."""
    vllm_module, sampling = ModuleType("vllm"), ModuleType("vllm.sampling_params")
    vllm_module.LLM, vllm_module.SamplingParams = LLM, Params  # type: ignore[attr-defined]
    sampling.StructuredOutputsParams = dict  # type: ignore[attr-defined]
    sampling.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", vllm_module)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", sampling)
    return vllm_module


def loaded(folder: Path, model: str = "tiny", **changes: Any) -> replica.Replica:
    """Return a replica of a job."""
    return replica.Replica({"model": model}, Converter(job(folder, **changes), {}))


def test_an_adapter_is_loaded_before_the_first_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And applied to every row."""
    module = ModuleType("vllm.lora.request")
    module.LoRARequest = lambda *values: values  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm.lora", ModuleType("vllm.lora"))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", module)
    actor = loaded(tmp_path, lora={"sql": "/l/sql"})

    assert actor.llm.llm_engine.adapter == ("sql", 1, "/l/sql")
    rows = prepared(job(tmp_path), {"text": "abc"})
    (answer,) = actor.answer(rows)
    assert answer["answer"] == "cba"


def test_a_block_is_answered_row_by_row(tmp_path: Path) -> None:
    """As the sink expects: an answer, or the reason of its absence, with the input; earlier
    failures pass through.
    """
    columns = [{"text": "abc"}, {"text": "far too long"}, {"none": 1}, {"text": "abort"}]
    rows = prepared(job(tmp_path), *columns)
    results = loaded(tmp_path, sampling={"temperature": 0.0}).answer(rows)

    assert results[0] == {
        "_row": 0,
        "_error": "",
        "_stage": "",
        "_raw": "",
        "_keep": b"",
        "answer": "cba",
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "output_tokens": 2,
        "_cached": 0,
    }
    assert [(row["_error"], row["_stage"], row["_raw"]) for row in results[1:]] == [
        ("TooLong: the prompt is too long", "inference", "far too long"),
        ("the prompt is column `text`, which this row lacks", "prompt", '{"none": 1}'),
        ("vLLM aborted this request: abort", "inference", "abort"),
    ]
    assert all("answer" not in row for row in results[1:])


@pytest.mark.parametrize(
    ("order", "prompts"),
    [("prefix", ["cccc", "bbb", "aa", "a"]), ("given", ["aa", "cccc", "a", "bbb"])],
)
def test_long_rows_run_early_and_answers_stay_in_order(
    tmp_path: Path, order: Any, prompts: list[str]
) -> None:
    """Unless the job requires input order."""
    texts = ["aa", "cccc", "a", "bbb"]
    rows = prepared(job(tmp_path), *({"text": text} for text in texts))
    result = loaded(tmp_path, engine={"order": order})

    assert [row["answer"] for row in result.answer(rows)] == [text[::-1] for text in texts]
    assert result.llm.llm_engine.prompts == prompts


def test_tokens_are_unchanged(tmp_path: Path) -> None:
    """Those of a chat; vLLM never gets its text."""
    (row,) = prepared(
        job(tmp_path, prompt={"column": None, "chat": [{"role": "user", "content": "{{ text }}"}]}),
        {"text": "hi"},
    )

    assert replica.vllm_prompt(row) == {"prompt_token_ids": [ord(letter) for letter in "<s>hi"]}


def test_encoder_decoder_engines_receive_the_prompt_itself() -> None:
    """vLLM assigns texts to encoder and decoder."""
    llm = SimpleNamespace(model_config=SimpleNamespace(is_encoder_decoder=True))

    assert replica.render_prompt(llm, {"prompt": "hi"}) == {"prompt": "hi"}


def test_rejected_sampling_parameters_fail_before_the_model_loads(tmp_path: Path) -> None:
    """They are wrong for every row."""
    spec = replace(job(tmp_path), sampling=Sampling(temperature=-1))
    with pytest.raises(Failed, match="rejected these sampling parameters") as raised:
        replica.Replica({"model": "not loaded"}, Converter(spec, {}))

    assert "must be non-negative" in raised.value.evidence


@pytest.mark.parametrize(
    ("log", "last"),
    [
        (DIED, "NameError: name 'time' is not defined (Worker pid=431 on 10.0.0.1)"),
        (
            "nothing to see\n",
            "the engine was killed, most likely for lack of host memory",
        ),
    ],
)
def test_a_failed_start_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, vllm: ModuleType, tmp_path: Path, log: str, last: str
) -> None:
    """vLLM only points to its own processes' output; output of an earlier actor of the process does
    not count.
    """
    path = tmp_path / "worker.out"
    path.write_text("ValueError: of an earlier actor\n")

    def broken(**_: object) -> None:
        with path.open("a") as file:
            file.write(log)
        raise RuntimeError(
            "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
        )

    vllm.LLM = broken  # type: ignore[attr-defined]
    monkeypatch.setattr(replica, "log_sizes", lambda: {str(path): path.stat().st_size})
    monkeypatch.setattr(replica, "await_output", lambda _: None)
    with pytest.raises((replica.NotStarted, RuntimeError)) as raised:
        loaded(tmp_path)
    # Ray forwards only the text of an exception in an actor's constructor.
    failed = failures.explain(
        RuntimeError("".join(traceback.format_exception(raised.value))), "engine"
    )

    assert failed.message == last
    assert ("began = time.monotonic()" in failed.evidence) is (log == DIED)
    assert ("nothing to see" in failed.evidence) is (log != DIED)
    assert "earlier actor" not in failed.evidence


def test_the_logs_of_a_process_are_rays_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With their current lengths; stdout itself is a pipe, which cannot be read again."""
    out, err = tmp_path / "worker.out", tmp_path / "worker.err"
    out.write_text("one\n")
    monkeypatch.setattr(replica, "log_paths", lambda: (str(out), str(err)))

    assert replica.log_sizes() == {str(out): 4}


def test_a_log_is_read_once_it_is_complete(tmp_path: Path) -> None:
    """Ray forwards whole lines with a delay."""
    log = tmp_path / "worker.out"
    log.touch()
    program = (
        "import os, sys; from launcher.batch.driver import replica;"
        " os.write(1, b'KeyError: 1'); replica.await_output(sys.argv[1], 60)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(log)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout, log.open("w") as file:
        for line in process.stdout:
            file.write(line)
            file.flush()

    assert process.wait(60) == 0
    assert log.read_text().splitlines()[0] == "KeyError: 1"
    assert log.read_text().splitlines()[1].startswith(replica.NOT_STARTED)
