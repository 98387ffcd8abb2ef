"""Requests to `/v1` with several servers: the model selects one, in HAProxy or in the router."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import aiohttp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.agent.front.router import Body, Failure, Router, find_json_model
from launcher.front.configuration import FrontServer
from tests.front.running import CHAT, EMBED, Running, StandIn, running, wait_for
from tests.front.test_haproxy import error, held, read_in_step

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("haproxy")]
Stage = tuple[Running, StandIn, StandIn]
LARGEST = 5 << 20
FORM = (
    '--B-x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n{file}\r\n--B-x'
    '\r\nContent-Disposition: form-data; name="model"\r\n\r\n{model}\r\n--B-x--\r\n'
)
FORM_TYPE = {"Content-Type": "multipart/form-data; boundary=B-x"}


def separate(front: Running) -> None:
    """Give each server a stand-in of its own."""
    chat, embed = front.servers
    front.servers = (FrontServer(name="chat", replicas=chat.replicas[:1], models=CHAT), embed)
    front.reload()


@pytest.fixture(scope="module")
def stage(haproxy: None) -> Iterator[Stage]:
    """A front with the servers `chat` (the first stand-in) and `embed` (the second)."""
    with running(max_body=LARGEST) as stage:
        separate(stage[0])
        for name, models in (("any", "*"), ("bob", ",chat,")):
            stage[0].add_key(name, models=models)
        yield stage


def bodies(model: str) -> dict[str, Any]:
    """Return requests for a model in many forms."""
    name = json.dumps(model)
    other = "e5" if model == "Qwen/chat" else "Qwen/chat"
    return {
        "plain": {"model": model},
        "last of 4 MB": {"prompt": "x" * (4 << 20), "model": model},
        "last of many strings": {"prompt": ['"a\\'] * 100_000, "model": model},
        "behind another one": {"tools": [{"model": other, "x": ["model"]}], "model": model},
        "second": f'{{"model": "{other}", "model": {name}}}'.encode(),
        "escaped key": rf'{{"model": "{other}", "mod\u0065l": {name}}}'.encode(),
        "escaped key only": rf'{{"\u006dodel": {name}}}'.encode(),
        "escaped name": {"model": model.replace("e", "\N{LATIN SMALL LETTER E}")},
        "as a value": {"x": "model", "y": 1, "model": model},
        "spaces": f'\n {{ "model" \t:\n {name} }}'.encode(),
        "chunked": iter([b'{"mo', f'del": {name}, "x": "'.encode(), b"x" * 100_000, b'"}']),
        "form": FORM.format(file="R" * 300_000, model=model).encode(),
    }


@pytest.mark.parametrize("form", bodies(""))
def test_the_model_selects_the_server(stage: Stage, form: str) -> None:
    """Wherever it is in the request, which arrives unchanged."""
    front, first, second = stage
    for model, stand_in in (("Qwen/chat", first), ("e5", second), ('odd "name"', second)):
        body = bodies(model)[form]
        headers = FORM_TYPE if form == "form" else {}
        data = json.dumps(body).encode() if isinstance(body, dict) else body
        status, content = front.post("/v1/chat/completions", body, key="sk-any", **headers)

        assert (status, content.get("port")) == (200, stand_in.port), content
        assert content["path"] == "/v1/chat/completions"
        assert form == "chunked" or content["digest"] == hashlib.sha256(data).hexdigest()
        names = {name.lower() for name in content["headers"]}
        assert not [
            name for name in names if name.startswith("x-vlaunch") or name == "authorization"
        ]


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/score", "/score"),
        *("/v2/rerank", "/tokenize", "/v1/audio/transcriptions"),
    ],
)
@pytest.mark.parametrize("padding", [0, 20_000])
def test_all_paths_are_routed(stage: Stage, path: str, padding: int) -> None:
    """Directly, and through the router."""
    front, _, second = stage
    body = {"model": "e5", "x": "x" * padding}
    status, content = front.post(f"{path}?a=%2F", body, key="sk-any")

    assert (status, content["port"], content["path"]) == (200, second.port, f"{path}?a=%2F")


@pytest.mark.parametrize("padding", [0, 20_000])
def test_an_unknown_model_is_answered_with_the_known_ones(stage: Stage, padding: int) -> None:
    """Of this key."""
    front, _, _ = stage
    for body in ({"model": "other"}, {"x": 1}, {"x": {"model": "e5"}}, {"model": None}):
        body["y"] = "x" * padding
        for key, names in (("any", (*CHAT, *EMBED[:2])), ("bob", CHAT)):
            status, content = front.post("/v1/completions", body, key=f"sk-{key}")
            named = body.get("model")
            expected = (404, "model_not_found") if named else (400, "model_required")
            assert (status, error(content)[1]) == expected
            assert f"models: {', '.join(names)}." in content["error"]["message"]
    assert front.post("/v1/completions", b"no JSON", key="sk-any")[0] == 400
    assert front.get("/v1/other", key="sk-any")[0] == 404


@pytest.mark.parametrize("padding", [0, 20_000])
def test_a_key_is_limited_to_its_servers(stage: Stage, padding: int) -> None:
    """A model of two servers is answered by the one that it may use."""
    front, first, second = stage
    front.add_key(f"eve{padding}", models=",embed,")
    body = {"x": "x" * padding}
    answers = {
        (key, model): front.post("/v1/completions", {**body, "model": model}, key=f"sk-{key}")
        for key in ("bob", f"eve{padding}")
        for model in ("e5", "shared")
    }

    status, content = answers["bob", "e5"]
    assert (status, error(content)[1]) == (403, "model_not_allowed")
    assert answers["bob", "shared"][1]["port"] == first.port
    assert answers[f"eve{padding}", "shared"][1]["port"] == second.port
    headers = {"x-vlaunch-server": "embed", "x-vlaunch-models": "*"}
    assert front.post("/v1/completions", {**body, "model": "e5"}, key="sk-bob", **headers)[0] == 403
    chunked = b"Authorization: Bearer sk-bob\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    start = b"POST /embed/v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    answer = front.raw(start + chunked)
    assert answer.startswith(b"HTTP/1.1 403 ")


def test_models_of_all_servers_are_listed(stage: Stage) -> None:
    """Those that the key may use."""
    front, _, _ = stage

    def listed(key: str) -> list[str]:
        rows = front.get("/v1/models", key=key)[1]["data"]
        assert all(row["max_model_len"] == 9 for row in rows)
        return [row["id"] for row in rows]

    assert listed("sk-any") == ["Qwen/chat", "shared", "e5", 'odd "name"']
    assert listed("sk-bob") == ["Qwen/chat", "shared"]
    status, content = front.get("/v1/models/Qwen/chat", key="sk-any")
    assert (status, content["id"]) == (200, "Qwen/chat")
    status, content = front.get("/v1/models/e5", key="sk-bob")
    assert (status, error(content)[1]) == (404, "model_not_found")


def test_a_server_that_does_not_answer_is_listed_by_its_spec() -> None:
    """Within seconds, although requests for it wait."""
    with running() as (front, first, _):
        separate(front)
        key = front.add_key("alice")
        first.kill()
        rows = front.get("/v1/models", key=key)[1]["data"]

    assert [row["id"] for row in rows] == ["Qwen/chat", "shared", "e5", 'odd "name"']
    assert ["max_model_len" in row for row in rows] == [False, True, True, True]


def test_a_large_request_is_rejected(stage: Stage) -> None:
    """After as many bytes, if it has no length."""
    front, _, _ = stage
    body = iter([b'{"model": "e5", "x": "', *[b"x" * (1 << 20)] * 6, b'"}'])
    status, content = front.post("/v1/completions", body, key="sk-any")
    assert (status, error(content)) == (413, ("invalid_request_error", "request_too_large"))
    head = f"Authorization: Bearer sk-any\r\nContent-Length: {LARGEST + 1}\r\n\r\n".encode()
    # HAProxy 3.2 waits for the body before it closes the connection.
    answer = front.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head, until=b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_stream_passes_without_delay_and_a_cut_one_has_no_end(stage: Stage) -> None:
    """Through the router."""
    front, _, _ = stage
    body = {"model": "e5", "x": "x" * 20_000, "stream": True, "parts": 5, "gap": 0}
    assert len(read_in_step(front, "/v1/completions", body)) == 5

    data = json.dumps({**body, "cut": True}).encode()
    head = f"Authorization: Bearer sk-any\r\nContent-Length: {len(data)}\r\n\r\n".encode()
    answer = front.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head + data)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"data: 4 " in answer
    assert b"[DONE]" not in answer
    assert not answer.endswith(b"0\r\n\r\n")


def test_a_client_that_leaves_ends_its_request(stage: Stage) -> None:
    """At the server, within a moment."""
    front, _, second = stage
    body = {"id": "left", "model": "e5", "x": "x" * 20_000, "stream": True, "parts": 99, "gap": 0.1}
    with front.request("POST", "/v1/completions", body, key="sk-any") as response:
        response.readline()
        response.close()
    wait_for(lambda: "left:gone" in second.ran, 3)


def test_limits_count_requests_once(stage: Stage) -> None:
    """With the time to wait."""
    front, _, second = stage
    key = front.add_key("dave", rpm=3)
    body = {"model": "e5", "x": "x" * 20_000}
    statuses = [front.post("/v1/completions", body, key=key)[0] for _ in range(4)]
    with front.request("POST", "/v1/completions", body, key=key) as response:
        content = json.loads(response.read())

    assert statuses == [200, 200, 200, 429]
    assert error(content) == ("requests", "rate_limit_exceeded")
    assert response.headers["Retry-After"] == "31"
    key = front.add_key("frank", concurrent=1)
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(
            front.post, "/v1/completions", {**body, "id": "slow", "delay": 2}, key=key
        )
        wait_for(lambda: "slow" in second.ran)
        assert front.get("/v1/models", key=key)[0] == 429
        assert slow.result()[0] == 200


@pytest.mark.parametrize("padding", [0, 20_000])
def test_the_log_has_the_server_and_its_replica(stage: Stage, padding: int) -> None:
    """Once for each request."""
    front, _, _ = stage
    path = f"/v1/logged/{padding}"
    front.post(path, {"model": "e5", "x": "x" * padding}, key="sk-any")
    entries = wait_for(lambda: [entry for entry in front.log if entry["path"] == path])

    assert [(e["server"], e["replica"], e["user"]) for e in entries] == [("embed", "embed", "any")]


def test_a_websocket_names_its_model_in_the_address(stage: Stage) -> None:
    """As OpenAI's clients do."""
    front, _, _ = stage
    with socket.create_connection(("127.0.0.1", front.settings.port), timeout=60) as client:
        client.sendall(
            b"GET /v1/realtime?model=Qwen%2Fchat HTTP/1.1\r\nHost: x\r\n"
            b"Authorization: Bearer sk-any\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        assert client.recv(1000).startswith(b"HTTP/1.1 101 ")
        client.sendall(b"ping")
        assert client.recv(4) == b"ping"


def test_a_server_may_be_named_like_a_part_of_a_path() -> None:
    """Such as `v1`."""
    with running() as (front, first, second):
        chat, embed = front.servers
        front.servers = (
            FrontServer(name="v1", replicas=chat.replicas[:1], models=CHAT),
            FrontServer(name="tokenize", replicas=embed.replicas, models=EMBED),
        )
        front.reload()
        key = front.add_key("alice")
        ports = [
            front.post(path, {"model": "e5"}, key=key)[1]["port"]
            for path in ("/v1/completions", "/v1/v1/completions", "/tokenize/v1/x", "/tokenize")
        ]

    assert ports == [second.port, first.port, second.port, second.port]


@pytest.mark.parametrize("length", [b"Content-Length: 20000", b"Transfer-Encoding: chunked"])
def test_a_client_may_wait_for_100_continue(stage: Stage, length: bytes) -> None:
    """RFC 9110, 10.1.1: it sends the body after that."""
    front, _, _ = stage
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-any\r\n"
    end = b"\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n\r\n"
    answer = front.raw(head + length + end, until=b"\r\n\r\n")
    assert answer == b"HTTP/1.1 100 Continue\r\n\r\n"


def test_a_full_disk_does_not_use_up_the_room_for_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece that is not stored is not counted."""

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def read(piece: bytes) -> Router:
        router = Router(str(tmp_path), session=None)  # type: ignore[arg-type] - sends nothing
        router._table = {"max_body": 1000}
        content = aiohttp.StreamReader(Mock(_reading_paused=False), 2**16)
        content.feed_data(piece)
        content.feed_eof()
        request = Mock(method="POST", headers={}, content=content)
        with pytest.raises(OSError, match="No space left"):
            await router._route(request)
        return router

    monkeypatch.setattr(Body, "add", fail)
    assert asyncio.run(read(b"x" * 100))._stored == 0


def test_stored_requests_are_bounded() -> None:
    """Together, until their clients leave."""
    with running(max_body=30_000) as (front, _, _), contextlib.ExitStack() as clients:
        separate(front)
        key = front.add_key("alice")
        head = f"Authorization: Bearer {key}\r\nContent-Length: 30000\r\n\r\n".encode()
        body = {"model": "e5", "x": "x" * 20_000}

        def refused() -> bool:
            address = ("127.0.0.1", front.settings.port)
            client = clients.enter_context(socket.create_connection(address))
            client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + head + b"x" * 29_999)
            status, content = front.post("/v1/completions", body, key=key)
            return status != 200 and error(content) == ("server_error", "unavailable")

        wait_for(refused)
        clients.close()
        wait_for(lambda: front.post("/v1/completions", body, key=key)[0] == 200)


def test_errors_of_servers_pass_and_nothing_runs_twice() -> None:
    """502, 503 and 504, through the router."""
    with running(hold=1, timeout=3) as (front, first, second):
        separate(front)
        key = front.add_key("alice")
        body = {"model": "e5", "x": "x" * 20_000}
        status, content = front.post("/v1/completions", {**body, "id": "slow", "delay": 5}, key=key)
        assert (status, error(content)) == (504, ("server_error", "timeout"))
        with ThreadPoolExecutor() as pool:
            lost = pool.submit(
                front.post, "/v1/completions", {**body, "id": "lost", "delay": 2}, key=key
            )
            wait_for(lambda: "lost" in second.ran)
            second.kill()
            status, content = lost.result()
        assert (status, error(content)) == (502, ("server_error", "bad_gateway"))
        with front.request("POST", "/v1/completions", body, key=key) as response:
            content = json.loads(response.read())
        assert (response.status, error(content)) == (503, ("server_error", "unavailable"))
        assert response.headers["Retry-After"] == "5"
        assert [*first.ran, *second.ran] == ["slow", "lost"]


def test_requests_wait_for_the_router() -> None:
    """Short ones do not need it."""
    with running(hold=120) as (front, _, second):
        separate(front)
        key = front.add_key("alice")
        front.stop_router()
        body = {"model": "e5"}
        assert front.post("/v1/completions", body, key=key)[1]["port"] == second.port
        body["x"] = "x" * 20_000
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(front.post, "/v1/completions", body, key=key)
            wait_for(lambda: held(front, 1, "ROUTER"))
            front.start_router()
            assert waiting.result()[1]["port"] == second.port


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=9) | st.just("model"), inner, max_size=4)
    ),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.sampled_from(["model", "x", 'm"o', "\\"]), JSON), max_size=6),
    ascii_only=st.booleans(),
)
def test_the_model_of_json_is_that_of_pythons_own_parser(
    pairs: list[tuple[str, Any]], ascii_only: bool
) -> None:
    """The last one of several; none unless it is a string."""
    text = ", ".join(
        f"{json.dumps(key)}:{json.dumps(value, ensure_ascii=ascii_only)}" for key, value in pairs
    )
    models = [value for key, value in pairs if key == "model"]
    are_strings = all(value is None or isinstance(value, str) for value in models)

    data = f" {{{text}}}".encode()
    if are_strings:
        assert find_json_model(data) == (models[-1] if models else None)
    else:
        with pytest.raises(Failure, match=r"`\$\.model`"):
            find_json_model(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"[]", "Expected `object`, got `array`"),
        (b'{"model":"a"', "truncated"),
        (b"x", "malformed"),
        (b'{"model":"\xff"}', "can't decode"),
        (b'\xef\xbb\xbf{"model":"a"}', "malformed"),
        (b'{"x":NaN,"model":"a"}', r"invalid character \(byte 5\)"),
        (b'{"x":' + b"[" * 3000 + b"]" * 3000 + b',"model":"a"}', "recursion"),
    ],
)
def test_a_body_that_is_not_json_is_rejected_with_the_reason(data: bytes, reason: str) -> None:
    """Also what Python's own parser reads."""
    with pytest.raises(Failure, match=f"The body is not a request in JSON: .*{reason}") as error:
        find_json_model(data)
    assert error.value.status == 400
