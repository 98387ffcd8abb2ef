"""Requests of OpenAI's batch format, from their lines to those of their responses.

vLLM's application is a stand-in; the lab compares `vllm run-batch`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from openai.types import BatchError, Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion
from openai.types.shared import ErrorObject

from launcher.batch.driver import __main__ as driver
from launcher.batch.driver import engine, replica, rows, source
from launcher.batch.driver.job_file import Failed
from launcher.batch.driver.openai_format import request, response, server
from launcher.batch.driver.results import Converter, Part, unpack
from tests.batch.driver.jobs import all_rows, job, surveyed
from tests.batch.driver.test_sink import lines

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
Send = Callable[[dict[str, Any]], Any]


def answer_chat(body: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": body["messages"][-1]["content"][::-1]}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": body["model"]}
    return {**head, "choices": [choice] * body.get("n", 1), "usage": USAGE}


def answer_completion(body: dict[str, Any]) -> dict[str, Any]:
    choice = {"index": 0, "text": body["prompt"][::-1], "finish_reason": "stop", "logprobs": None}
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": body["model"]}
    return {**head, "choices": [choice], "usage": USAGE}


def answer_embedding(body: dict[str, Any]) -> dict[str, Any]:
    data = [{"object": "embedding", "index": 0, "embedding": [0.5, 1.0]}]
    usage = {"prompt_tokens": 3, "total_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
    return {"object": "list", "model": body["model"], "data": data, "usage": usage}


ROUTES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "/v1/chat/completions": answer_chat,
    "/v1/completions": answer_completion,
    "/v1/embeddings": answer_embedding,
    "/score": lambda body: {"data": [{"score": 0.5}], "usage": None},
}


class App:
    """A stand-in for vLLM's application, with its errors.

    A temperature of -1 is invalid, a `seed` of 13 kills the engine, one of 14 raises an error after
    its response, as Starlette does.
    """

    def __init__(self, client: Any) -> None:
        self.client, self.state = client, SimpleNamespace()
        self.forms: list[bytes] = []

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Any], send: Send) -> None:
        headers = dict(scope["headers"])
        content: dict[str, Any]
        assert (scope["type"], scope["method"]) == ("http", "POST")
        data = (await receive())["body"]
        assert headers[b"content-length"] == str(len(data)).encode()
        if headers[b"authorization"] != b"Bearer secret":
            status, content = 401, {"error": "Unauthorized"}
        elif headers[b"content-type"].startswith(b"multipart/form-data"):
            self.forms.append(data)
            status, content = 200, {"text": "hello", "usage": {"type": "duration", "seconds": 1}}
        else:
            assert headers[b"content-type"] == b"application/json"
            status, content = self.respond(scope["path"], json.loads(data))
        await send({"type": "http.response.start", "status": status, "headers": []})
        text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
        await send({"type": "http.response.body", "body": text[:9], "more_body": True})
        await send({"type": "http.response.body", "body": text[9:]})
        if status == 500:
            raise RuntimeError("raised again")

    def respond(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return a status and a response."""
        if path not in ROUTES:
            return 404, error(404, "Not Found", "Not Found")
        if body.get("model") != "tiny":
            text = f"The model `{body.get('model')}` does not exist."
            return 404, error(404, text, "NotFoundError", "model")
        if body.get("temperature", 0) < 0:
            text = "temperature must be non-negative"
            return 400, error(400, text, "BadRequestError", "temperature")
        if body.get("seed") == 13:
            self.client.errored = True
        if body.get("seed") in (13, 14):
            return 500, error(500, "EngineCore encountered an issue", "InternalServerError")
        return 200, ROUTES[path](body)


def error(code: int, message: str, type_: str, param: str | None = None) -> dict[str, Any]:
    """Return an error in vLLM's form."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


class Command:
    """A stand-in for vLLM's command `serve`."""

    def subparser_init(self, commands: Any) -> None:
        parser = commands.add_parser("serve")
        parser.add_argument("model_tag")
        parser.add_argument("--model", default="default")
        parser.add_argument("--served-model-name", nargs="+")
        parser.add_argument("--allowed-media-domains", nargs="+")
        parser.add_argument("--lora-modules", nargs="+")
        for name in ("max-model-len", "tensor-parallel-size", "pipeline-parallel-size"):
            parser.add_argument(f"--{name}", type=int)
        parser.add_argument("--distributed-executor-backend")
        for name in ("disable-log-stats", "enable-auto-tool-choice"):
            parser.add_argument(f"--{name}", action="store_true")

    def validate(self, args: Namespace) -> None:
        if args.enable_auto_tool_choice:
            raise TypeError("--enable-auto-tool-choice requires --tool-call-parser")


@pytest.fixture(autouse=True)
def client(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A stand-in for vLLM's modules; return its client of the engine."""

    async def supported_tasks() -> tuple[str, ...]:
        return ("generate", "embed")

    async def add_state(_: Any, state: Any, args: Namespace, tasks: Any) -> None:
        state.args = args

    @asynccontextmanager
    async def engine_client(args: Namespace, usage_context: str) -> AsyncIterator[Any]:
        assert (args.model, usage_context) == ("tiny", "throughput")
        vllm_client.log.append("started")
        yield vllm_client
        vllm_client.log.append("closed")

    vllm_client = SimpleNamespace(
        errored=False, log=[], model_config=None, get_supported_tasks=supported_tasks
    )
    serve = SimpleNamespace(FlexibleArgumentParser=ArgumentParser, cmd_init=lambda: [Command()])
    api = SimpleNamespace(
        build_async_engine_client=engine_client,
        build_app=lambda args, tasks, config: App(vllm_client),
        init_app_state=add_state,
    )
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.entrypoints": {},
        "vllm.entrypoints.cli": {"serve": serve},
        "vllm.entrypoints.openai": {"api_server": api},
        "vllm.usage": {},
        "vllm.usage.usage_lib": {"UsageContext": SimpleNamespace(LLM_CLASS="throughput")},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    return vllm_client


def line(custom_id: Any, url: Any, **body: Any) -> dict[str, Any]:
    """Return a line of the input."""
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "tiny", **body}}


def chat(custom_id: str, text: str = "hi", **body: Any) -> dict[str, Any]:
    """Return a line with a chat."""
    messages = [{"role": "user", "content": text}]
    return line(custom_id, "/v1/chat/completions", messages=messages, **body)


def request_job(folder: Path, *items: dict[str, Any] | str, **changes: Any) -> Any:
    """Create a job with these lines as its input."""
    path = folder / "requests.jsonl"
    texts = [item if isinstance(item, str) else json.dumps(item) for item in items]
    path.write_text("".join(f"{text}\n" for text in texts))
    read = {"paths": [str(path)], "format": "jsonl", "id": "custom_id"}
    return job(folder, read=read, prompt=None, write={"format": "openai"}, **changes)


def pipeline(spec: Any, manifest: Any, *_: Any) -> Iterator[list[Part]]:
    """Do in this process what Ray Data does on the cluster."""
    loaded = replica.Replica(engine.engine_arguments(spec), Converter(spec, manifest.types))
    prepare = engine.Prepare(spec)
    for split in manifest.splits:
        read = list(rows.read_split(spec, manifest, split, all_rows(split)))
        yield unpack(loaded(prepare(source.to_block(read))))


def run_job(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *items: dict[str, Any] | str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a job; return the responses by id, and the error entries in order of their lines."""
    spec = request_job(folder, *items)
    monkeypatch.setattr(driver, "read_job", lambda work: spec)
    monkeypatch.setitem(driver.MODES, "engine", SimpleNamespace(run=pipeline))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert driver.main(spec.work) == 0
    answers = {entry["custom_id"]: entry for entry in lines(Path(spec.write.path), "rows")}
    return answers, lines(Path(spec.write.path), "errors")


def test_responses_have_the_types_of_the_openai_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each endpoint; parameters of a line are those of its request alone."""
    answers, errors = run_job(
        tmp_path,
        monkeypatch,
        chat("c", "größer"),
        chat("two", n=2, seed=1, stop=["x"], logprobs=True, tools=[], max_completion_tokens=3),
        line("t", "/v1/completions", prompt="abc"),
        line("e", "/v1/embeddings", input="abc"),
        line("s", "/v1/score", text_1="a", text_2="b"),
    )

    assert errors == []
    assert answers.keys() == {"c", "two", "t", "e", "s"}
    for entry in answers.values():
        assert entry.keys() == {"id", "custom_id", "response", "error"}
        assert entry["response"].keys() == {"status_code", "request_id", "body"}
        assert (entry["response"]["status_code"], entry["error"]) == (200, None)
    assert len({entry["id"] for entry in answers.values()}) == 5
    body = {name: entry["response"]["body"] for name, entry in answers.items()}
    answer = ChatCompletion.model_validate(body["c"])
    assert answer.choices[0].message.content == "reßörg"
    assert answer.usage is not None and answer.usage.completion_tokens == 2
    assert len(ChatCompletion.model_validate(body["two"]).choices) == 2
    assert Completion.model_validate(body["t"]).choices[0].text == "cba"
    assert CreateEmbeddingResponse.model_validate(body["e"]).data[0].embedding == [0.5, 1.0]
    assert body["s"]["data"] == [{"score": 0.5}]
    progress = json.loads((tmp_path / "work" / "progress.json").read_text())
    assert (progress["tokens_in"], progress["tokens_out"]) == (12, 6)


def test_wrong_lines_are_error_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the parameter and the line at fault; all others are answered."""
    answers, errors = run_job(
        tmp_path,
        monkeypatch,
        "not json",
        "",
        {"method": "POST", "url": "/v1/embeddings", "body": {}},
        line(7, "/v1/embeddings"),
        {**chat("get"), "method": "GET"},
        line("url", "/v1/images"),
        {**chat("body"), "body": "text"},
        chat("stream", stream=True),
        chat("model", model="gpt-4"),
        chat("cold", temperature=-1),
        chat("internal", seed=14),
        line("rerank", "/v1/rerank"),
        chat("good"),
        chat("long", "x" * 20),
    )

    assert answers.keys() == {"good", "long"}
    for entry in errors:
        assert entry.keys() == {"id", "custom_id", "response", "error"}
        reported = BatchError.model_validate(entry["error"])
        body = entry["response"]["body"]["error"]
        assert entry["response"]["status_code"] == body["code"]
        assert ErrorObject.model_validate({**body, "code": None}).message == reported.message
    assert [
        (entry["error"]["line"], entry["custom_id"], entry["response"]["status_code"])
        for entry in errors
    ] == [
        (1, None, 400),
        (2, None, 400),
        (3, None, 400),
        (4, None, 400),
        (5, "get", 400),
        (6, "url", 400),
        (7, "body", 400),
        (8, "stream", 400),
        (9, "model", 404),
        (10, "cold", 400),
        (11, "internal", 500),
        (12, "rerank", 404),
    ]
    found = [(entry["error"]["param"], entry["error"]["message"]) for entry in errors]
    assert found[:2] == [
        (None, "not JSON: Expecting value at character 1"),
        (None, "the line is empty"),
    ]
    assert [param for param, _ in found[2:8]] == [
        *("custom_id", "custom_id", "method", "url", "body", "stream")
    ]
    assert found[5][1].endswith("/score, /rerank, not '/v1/images'")
    assert found[8:] == [
        ("model", "The model `gpt-4` does not exist. The job has tiny."),
        ("temperature", "temperature must be non-negative"),
        (None, "EngineCore encountered an issue"),
        (None, "the job's model (tiny) does not support /rerank"),
    ]
    assert errors[8]["error"]["code"] == "NotFoundError"


def test_a_dead_engine_writes_no_error_entries(client: SimpleNamespace) -> None:
    """Its process ends, so that Ray hands its requests out again."""
    ended: list[str] = []
    body = json.dumps({"model": "tiny", "seed": 13})
    with closing(server.ApiServer({"model": "tiny"}, end=lambda: ended.append("end"))) as api:
        api.answer([{"prompt": body, "second": "/v1/completions"}])

    assert ended


def test_closing_shuts_the_engine_down(tmp_path: Path, client: SimpleNamespace) -> None:
    """With the replica, as Ray Data ends it."""
    loaded = replica.Replica({"model": "tiny"}, Converter(request_job(tmp_path), {}))
    assert client.log == ["started"]
    del loaded

    assert client.log == ["started", "closed"]


@pytest.mark.parametrize(
    ("arguments", "evidence"),
    [
        ({"max_modell_len": 8}, "unrecognized arguments: --max-modell-len 8"),
        ({"enable_auto_tool_choice": True}, "requires --tool-call-parser"),
    ],
)
def test_rejected_arguments_fail_before_the_model_loads(
    client: SimpleNamespace, arguments: dict[str, Any], evidence: str
) -> None:
    """The job ends with vLLM's message."""
    with pytest.raises(Failed, match="rejected the engine arguments") as raised:
        server.ApiServer({"model": "tiny", **arguments})

    assert evidence in raised.value.evidence
    assert client.log == []


def test_arguments_are_those_of_the_server(tmp_path: Path) -> None:
    """Defaults of `vllm.LLM` are set; `task` selects the runner of vLLM."""
    spec = request_job(tmp_path, engine={"args": {"max_model_len": 8}})

    assert engine.engine_arguments(spec) == {
        "model": "tiny",
        "disable_log_stats": True,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "distributed_executor_backend": "uni",
        "max_model_len": 8,
    }
    assert engine.engine_arguments(request_job(tmp_path, task="embed"))["runner"] == "pooling"


def test_audio_is_sent_as_a_form() -> None:
    """With the file at a URL, as `vllm run-batch` takes it."""
    body = {"model": "tiny", "file_url": "data:audio/wav;base64,UklGRg==", "temperature": 0.5}
    prompts = [
        {"prompt": json.dumps(body), "second": "/v1/audio/transcriptions"},
        {"prompt": json.dumps({**body, "file_url": "ftp://x"}), "second": "/v1/audio/translations"},
    ]
    with closing(server.ApiServer({"model": "tiny"})) as api:
        answer, failure = api.answer(prompts)
    (form,) = api.app.forms

    assert json.loads(answer)["text"] == "hello"
    assert server.response_columns(answer)["prompt_tokens"] == 0
    assert b'name="file"; filename="audio.bin"' in form and b"RIFF" in form
    assert b'name="temperature"\r\n\r\n0.5\r\n' in form
    assert request.parse_error(str(failure))["param"] == "file_url"


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/completions", "/v1/completions"),
        ("/v1/score", "/score"),
        ("/v2/rerank", "/rerank"),
        ("/score", "/score"),
        ("/x/v1/embeddings", None),
        (None, None),
    ],
)
def test_urls_are_those_of_run_batch(url: Any, path: str | None) -> None:
    """And completions, which it lacks."""
    if path is None:
        with pytest.raises(request.RequestError):
            request.find_path(url)
    else:
        assert request.find_path(url) == path


def test_rows_of_a_common_prefix_stay_together(tmp_path: Path) -> None:
    """The body's text is the prompt by which rows are ordered."""
    spec = request_job(tmp_path, chat("a", "x"))
    manifest = surveyed(spec)
    (row,) = rows.read_split(spec, manifest, manifest.splits[0], all_rows(manifest.splits[0]))
    (prepared,) = engine.Prepare(spec)(source.to_block([row])).to_pylist()

    assert json.loads(prepared["_prompt"])["messages"][0]["content"] == "x"
    assert prepared["_second"] == "/v1/chat/completions"


def test_an_application_that_fails_without_a_response() -> None:
    """Its request has an error entry."""

    async def app(*_: Any) -> None:
        raise KeyError("state")

    status, data = asyncio.run(server.post(app, "/score", "application/json", b"{}"))

    assert (status, data) == (500, b"KeyError: 'state'")


def test_reasons_of_other_stages_are_plain_text() -> None:
    """An error entry has them as its message; long ones are cut."""
    entry = json.loads(response.error_line("d" * 64, 4, None, "x" * 9000))

    assert entry["error"]["message"] == "x" * request.MAX_MESSAGE
    assert (entry["error"]["line"], entry["id"]) == (5, f"batch_req_{'d' * 16}_4")


def test_the_jobs_adapters_are_listed_too() -> None:
    """Since a request may name one of them."""
    args = Namespace(
        model="tiny", served_model_name=None, lora_modules=[SimpleNamespace(name="sql")]
    )
    stand_in: Any = SimpleNamespace(args=args)
    answer = json.dumps(error(404, "The model `x` does not exist.", "NotFoundError", "model"))
    failed = server.ApiServer.request_error(stand_in, "/v1/completions", 404, answer.encode())

    assert '"The model `x` does not exist. The job has tiny, sql."' in str(failed)
