"""HAProxy with the front's configuration, in front of stand-ins of servers."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import select
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher.agent.front import router_process
from launcher.agent.health.api import QueryTarget, query_api
from launcher.app.certificates import make_certificate
from launcher.core.domain import TlsSettings
from launcher.front.front_plan import front_target
from tests.front.running import Running, StandIn, running, wait_for

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("haproxy")]
Stage = tuple[Running, StandIn, StandIn]
# Longer than HAProxy's buffers.
TARGETS = json.dumps(
    [
        {"targets": ["10.0.0.1:29590"], "labels": {"server": f"chat.{number}"}}
        for number in range(500)
    ]
)


@pytest.fixture(scope="module")
def stage(haproxy: None) -> Iterator[Stage]:
    """A front that tests do not restart."""
    with running(targets=TARGETS, max_body=1000) as stage:
        stage[0].add_key("any")
        yield stage


def error(content: Any) -> tuple[str, str]:
    """Return the type and code of an error in OpenAI's form."""
    fields = content["error"]
    assert set(fields) == {"message", "type", "param", "code"}
    return fields["type"], fields["code"]


def test_a_server_is_reached_by_its_name(stage: Stage) -> None:
    """Without the name in the path, and without the user's key."""
    front, _, _ = stage
    status, content = front.get("/embed/v1/models?x=1", key="sk-any")

    assert (status, content["path"]) == (200, "/v1/models?x=1")
    assert "authorization" not in content["headers"]


def test_a_request_needs_a_known_key(stage: Stage) -> None:
    """For any address."""
    front, _, _ = stage
    for path in ("/chat/v1/models", "/v1/models", "/"):
        for key in ("", "sk-wrong"):
            status, content = front.get(path, key=key)
            assert (status, error(content)) == (
                401,
                ("invalid_request_error", "invalid_api_key"),
            )


def test_an_unknown_server_does_not_exist(stage: Stage) -> None:
    """The answer names no servers, since the key may be limited to some of them."""
    front, _, _ = stage
    status, content = front.get("/other/v1/models", key="sk-any")
    assert (status, error(content)[1]) == (404, "model_not_found")
    assert "embed" not in content["error"]["message"]


def test_the_rest_of_the_servers_api_does_not_exist(stage: Stage) -> None:
    """Nor does the administration of adapters, however its path is written: the server decodes."""
    front, _, _ = stage
    for path in ("/chat/sleep", "/chat/metrics", "/chat/", "/chat/v1"):
        assert front.get(path, key="sk-any")[0] == 404
    for prefix in ("/chat", ""):
        for path in ("load_lora_adapter", "unload_lora_adapter", "%6Coad%5flora_adapter?x=1"):
            body = {"id": path, "model": "e5", "lora_name": "a"}
            status, content = front.post(f"{prefix}/v1/{path}", body, key="sk-any")
            assert (status, error(content)[1]) == (404, "not_found")


def test_the_only_server_needs_no_name() -> None:
    """And answers under its name as well."""
    with running() as (front, _, _):
        front.servers = front.servers[:1]
        front.reload()
        key = front.add_key("alice")
        paths = [front.get(f"{prefix}/v1/models", key=key)[1]["path"] for prefix in ("", "/chat")]

        assert paths == ["/v1/models", "/v1/models"]


def test_a_key_may_use_its_models_only(stage: Stage) -> None:
    """A name within another one is not enough."""
    front, _, _ = stage
    front.add_key("bob", models=",chat,")

    assert front.get("/chat/v1/models", key="sk-bob")[0] == 200
    status, content = front.get("/embed/v1/models", key="sk-bob")
    assert (status, error(content)[1]) == (403, "model_not_allowed")


def test_the_socket_needs_no_key(stage: Stage) -> None:
    """The path of `vlaunch chat`."""
    front, _, _ = stage
    socket_path = str(front.folder / router_process.SERVERS)
    target = QueryTarget(**{**front_target("embed"), "api_host": socket_path})

    status, text = query_api(target, "/v1/models")
    assert (status, json.loads(text)["path"]) == (200, "/v1/models")
    status, text = query_api(replace(target, headers={router_process.SERVER: "x"}), "/v1/models")
    assert (status, error(json.loads(text))) == (503, ("server_error", "unavailable"))


def test_a_large_request_is_rejected(stage: Stage) -> None:
    """By its length, and one without a length after as many bytes."""
    front, _, _ = stage
    status, content = front.post("/chat/v1/completions", {"x": "x" * 1000}, key="sk-any")
    assert (status, error(content)[1]) == (413, "request_too_large")
    for size, expected in ((900, 200), (1000, 413)):
        body = iter([b'{"x": "', b"x" * size, b'"}'])
        status, content = front.post("/chat/v1/completions", body, key="sk-any")
        assert status == expected
    assert error(content)[1] == "request_too_large"


def read_in_step(front: Running, path: str, body: dict[str, Any]) -> list[bytes]:
    """Return the events of a stream whose server waits until the last event has been read."""
    read = front.folder / "read"
    read.write_bytes(b"")
    events = []
    with front.request("POST", path, {**body, "read": str(read)}, key="sk-any") as response:
        while (line := response.readline()).strip() != b"data: [DONE]":
            if line.strip():
                events.append(line)
                read.write_bytes(b"x" * len(events))
    return events


def test_a_stream_passes_without_delay(stage: Stage) -> None:
    """Every part arrives before the next one is sent."""
    front, _, _ = stage
    body = {"id": "stream", "stream": True, "parts": 5, "gap": 0}
    assert len(read_in_step(front, "/chat/v1/completions", body)) == 5


def test_a_websocket_passes(stage: Stage) -> None:
    """In both directions."""
    front, _, _ = stage
    with socket.create_connection(("127.0.0.1", front.settings.port), timeout=60) as client:
        client.sendall(
            b"GET /chat/v1/realtime HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-any\r\n"
            b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        head = client.recv(1000)
        assert head.startswith(b"HTTP/1.1 101 ")
        client.sendall(b"ping")
        assert client.recv(4) == b"ping"


def use_tls(front: Running) -> ssl.SSLContext:
    """Reload a front with a self-signed certificate, and return the context of a client."""
    pem = make_certificate("127.0.0.1", ["127.0.0.1"])
    (front.folder / "tls.pem").write_text(pem)
    front.settings = replace(front.settings, tls=TlsSettings())
    front.reload()
    return ssl.create_default_context(cadata=pem.partition("-----BEGIN PRIVATE")[0])


def test_tls_with_a_self_signed_certificate() -> None:
    """It is verified by clients that know it, for the address of the front."""
    with running() as (front, _, _):
        key = front.add_key("alice")
        context = use_tls(front)
        context.verify_flags |= ssl.VERIFY_X509_STRICT

        def get() -> int:
            port = front.settings.port
            client = http.client.HTTPSConnection("127.0.0.1", port, context=context, timeout=60)
            client.request("GET", "/chat/v1/models", headers={"Authorization": f"Bearer {key}"})
            status = client.getresponse().status
            client.close()
            return status

        assert wait_for(get) == 200
        assert front.raw(b"GET / HTTP/1.1\r\n\r\n") == b""


def test_a_limit_per_minute(stage: Stage) -> None:
    """With the time to wait; rejected requests do not count."""
    front, _, _ = stage
    key = front.add_key("fast", rpm=3)
    statuses = [front.get("/chat/v1/models", key=key)[0] for _ in range(5)]
    with front.request("GET", "/chat/v1/models", key=key) as response:
        content = json.loads(response.read())

    assert statuses == [200, 200, 200, 429, 429]
    assert error(content) == ("requests", "rate_limit_exceeded")
    assert response.headers["Retry-After"] == "31"


def test_a_limit_of_concurrent_requests(stage: Stage) -> None:
    """It counts while a request runs."""
    front, first, second = stage
    key = front.add_key("wide", concurrent=2)
    body = {"id": "wide", "delay": 1}
    with ThreadPoolExecutor(2) as pool:
        slow = [pool.submit(front.post, "/chat/v1/completions", body, key=key) for _ in range(2)]
        wait_for(lambda: [*first.ran, *second.ran].count("wide") == 2)
        status, content = front.get("/chat/v1/models", key=key)
        other = front.get("/chat/v1/models", key="sk-any")[0]

    assert (status, error(content)[1], other) == (429, "concurrency_limit_exceeded", 200)
    assert [request.result()[0] for request in slow] == [200, 200]
    wait_for(lambda: front.get("/chat/v1/models", key=key)[0] == 200)


def test_a_revoked_key_ends_at_once_and_cuts_no_stream(stage: Stage) -> None:
    """Of any user, even its own."""
    front, _, _ = stage
    key = front.add_key("carol")
    body = {"id": "carol", "stream": True, "parts": 5, "gap": 0.1}
    with front.request("POST", "/chat/v1/completions", body, key=key) as response:
        front.node("revoke", "carol")
        assert front.get("/chat/v1/models", key=key)[0] == 401
        assert b"[DONE]" in response.read()


def test_guesses_of_keys_are_bounded() -> None:
    """A right key from the same address still works."""
    with running() as (front, _, _):
        key = front.add_key("alice")
        statuses = [front.get("/chat/v1/models", key=f"sk-{n}")[0] for n in range(40)]

        assert statuses[-1] == 429
        assert front.get("/chat/v1/models", key=key)[0] == 200


def test_the_log_has_no_prompt_and_no_key(stage: Stage) -> None:
    """It has the user, server and times, and is JSON whatever the path."""
    front, _, _ = stage
    front.post("/chat/v1/logged?token=secret", {"id": "x", "prompt": "secret"}, key="sk-any")
    front.raw(b'GET /a"b\\c HTTP/1.1\r\nAuthorization: Bearer sk-any\r\nConnection: close\r\n\r\n')
    entry = wait_for(lambda: [e for e in front.log if e["path"] == "/chat/v1/logged"])[-1]

    assert (entry["user"], entry["server"], entry["status"]) == ("any", "chat", 200)
    assert entry["replica"] in ("one", "two")
    wait_for(lambda: [entry for entry in front.log if entry["path"] == '/a"b\\c'])
    text = (front.folder / "log").read_text()
    assert "secret" not in text
    assert "sk-" not in text


def test_metrics_are_for_prometheus(stage: Stage) -> None:
    """On a port of their own."""
    connection = http.client.HTTPConnection("127.0.0.1", stage[0].settings.metrics)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()

    assert 'haproxy_server_status{proxy="chat",server="one",state="UP"} 1' in text


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/servers/one/metrics", 200),
        ("POST", "/servers/one/metrics", 404),
        ("GET", "/servers/other/metrics", 404),
        ("GET", "/servers/one/v1/models", 404),
        ("GET", "/v1/models", 404),
    ],
)
def test_metrics_of_servers_are_for_prometheus(
    stage: Stage, method: str, path: str, status: int
) -> None:
    """Nothing else of a server is reached there."""
    connection = http.client.HTTPConnection("127.0.0.1", stage[0].settings.metrics)
    connection.request(method, path)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()

    assert (response.status, '"path": "/metrics"' in text) == (status, status == 200)


def test_targets_are_listed_for_prometheus(stage: Stage) -> None:
    """As JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", stage[0].settings.metrics)
    connection.request("GET", "/servers")
    response = connection.getresponse()

    assert (response.headers["Content-Type"], json.loads(response.read())) == (
        "application/json",
        json.loads(TARGETS),
    )
    connection.close()


def test_conflicting_lengths_are_rejected(stage: Stage) -> None:
    """No byte of them reaches a server as another request."""
    front, first, second = stage
    start = b"POST /chat/v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-any\r\n"
    smuggled = b'POST /v1/completions HTTP/1.1\r\nContent-Length: 18\r\n\r\n{"id": "smuggled"}'
    for lengths in (
        b"Content-Length: 2\r\nContent-Length: 99\r\n\r\n{}",
        b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        b"Content-Length: +2\r\n\r\n{}",
        b"Transfer-Encoding: xchunked\r\n\r\n",
        b"Content-Length: 2\r\n\r\n{}",
    ):
        answer = front.raw(start + lengths + smuggled)
        valid = lengths.endswith((b": 2\r\n\r\n{}", b"0\r\n\r\n"))
        # HAProxy 3.2 closes some connections, with bytes of them unread, before its answer arrives.
        expected = (b"HTTP/1.1 4", b"HTTP/1.1 200") if valid else (b"HTTP/1.1 4",)
        assert (answer == b"" and not valid) or answer.startswith(expected), answer
    assert "smuggled" not in [*first.ran, *second.ran]


@pytest.mark.parametrize("tls", [False, True])
def test_http_2_is_not_spoken(tls: bool) -> None:
    """Its requests have no `Transfer-Encoding`, which the limit of a body depends on."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    settings_frame = b"\0\0\0\4\0\0\0\0\0"
    with running() as (front, _, _):
        context = use_tls(front) if tls else None
        address = ("127.0.0.1", front.settings.port)
        with socket.create_connection(address, timeout=60) as plain:
            client = context.wrap_socket(plain, server_hostname="127.0.0.1") if context else plain
            client.sendall(preface + settings_frame)
            answer = b""
            with contextlib.suppress(ConnectionResetError, ssl.SSLError):
                while part := client.recv(65536):
                    answer += part
            client.close()
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400 ")


def test_workers_have_no_rights() -> None:
    """Neither user nor group is root's."""
    if os.geteuid():
        pytest.skip("only root can become another user")
    with running() as (front, _, _):
        assert front.process is not None
        pids = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(front.process.pid)],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        ids = [
            re.findall(r"(?m)^[UG]id:\t(\d+)", Path(f"/proc/{pid}/status").read_text())
            for pid in pids
        ]
    assert ids
    assert all("0" not in pair for pair in ids)


def test_a_header_bomb_is_rejected(stage: Stage) -> None:
    """Long headers, and many."""
    front, _, _ = stage
    for headers in (b"X: " + b"x" * 100_000, b"".join(b"X-%d: x\r\n" % n for n in range(2000))):
        answer = front.raw(b"GET /chat/v1/models HTTP/1.1\r\n" + headers + b"\r\n\r\n")
        assert answer == b"" or answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 "))
    assert front.get("/chat/v1/models", key="sk-any")[0] == 200


def test_slow_headers_and_silence_end_after_ten_seconds(stage: Stage) -> None:
    """Other users are served meanwhile."""
    front, _, _ = stage

    def send_slowly() -> tuple[bytes, float]:
        began = time.monotonic()
        address = ("127.0.0.1", front.settings.port)
        with socket.create_connection(address, timeout=60) as client:
            client.sendall(b"GET /chat/v1/models HTTP/1.1\r\nX: ")
            while not select.select([client], [], [], 1)[0]:
                client.sendall(b"x")
            return client.recv(100), time.monotonic() - began

    with ThreadPoolExecutor(2) as pool:
        slow, silent = pool.submit(send_slowly), pool.submit(front.raw, b"", seconds=20)
        assert front.get("/chat/v1/models", key="sk-any")[0] == 200
        answer, seconds = slow.result()

    assert answer.startswith(b"HTTP/1.1 408 ")
    assert 9 < seconds < 60
    assert silent.result().startswith(b"HTTP/1.1 408 ")


def test_an_address_with_many_idle_connections_gets_no_more() -> None:
    """Users of other addresses are served before the idle connections end."""
    with running(before="ulimit -n 3000;") as (front, *_), contextlib.ExitStack() as stack:
        key, target = front.add_key("alice"), ("127.0.0.1", front.settings.port)
        clients = [
            stack.enter_context(socket.create_connection(target, source_address=("127.0.0.2", 0)))
            for _ in range(600)
        ]
        assert front.get("/chat/v1/models", key=key)[0] == 200
        ended, _, _ = select.select(clients, (), (), 0)
        # 376 of 600 are open: three quarters of 500, and one. HAProxy's threads count at once.
        assert 210 <= len(ended) <= 240


def test_the_servers_get_their_own_key() -> None:
    """From the file of the secret."""
    with running() as (front, _, _):
        (front.folder / "server-key").write_text("key-of-the-servers\n")
        front.server_key = True
        front.reload()
        key = front.add_key("alice")

        def sent_key() -> Any:  # the old worker may take the first request
            return front.get("/chat/v1/models", key=key)[1]["headers"].get("authorization")

        assert wait_for(sent_key) == "Bearer key-of-the-servers"


def test_requests_wait_while_no_replica_is_up() -> None:
    """All are answered once one is."""
    with running(hold=20) as (front, first, second):
        key = front.add_key("alice")
        first.kill()
        second.kill()
        with ThreadPoolExecutor(12) as pool:
            bodies = [{"id": f"held-{number}"} for number in range(12)]
            path = "/chat/v1/completions"
            answers = [pool.submit(front.post, path, body, key=key) for body in bodies]
            wait_for(lambda: held(front, 12))
            first.start()

            assert [answer.result()[0] for answer in answers] == [200] * 12
        assert sorted([*first.ran, *second.ran]) == sorted(body["id"] for body in bodies)


def held(front: Running, number: int, server: str = "chat") -> bool:
    """True when a number of requests wait at the front."""
    rows = [line.split(",") for line in front.status()["stat"].splitlines()]
    return any(row[:2] == [server, "HOLD"] and int(row[4]) == number for row in rows)


@pytest.mark.parametrize("size", [1, 4_000_000])
def test_a_wait_ends_with_503(size: int) -> None:
    """With the time to wait before the next attempt, also after a long body."""
    with running(hold=1) as (front, _, second):
        key = front.add_key("alice")
        second.kill()
        body = {"x": "x" * size}
        with front.request("POST", "/embed/v1/completions", body, key=key) as response:
            content = json.loads(response.read())

        assert (response.status, error(content)) == (503, ("server_error", "unavailable"))
        assert response.headers["Retry-After"] == "5"


def test_a_killed_replica_costs_only_its_own_requests_and_none_runs_twice() -> None:
    """Its requests fail with 502, its streams are cut; all later ones go to the other replica."""
    with running() as (front, first, second):
        key, path = front.add_key("alice"), "/chat/v1/completions"
        with ThreadPoolExecutor(16) as pool:
            bodies = [{"id": f"r{number}", "delay": 1.5} for number in range(8)]
            answers = [pool.submit(front.post, path, body, key=key) for body in bodies]
            streams = [pool.submit(read_stream, front, key, f"s{number}") for number in range(4)]
            wait_for(lambda: len([*first.ran, *second.ran]) == 12)
            lost = [*first.ran]
            first.kill()
            later = [front.post(path, {"id": f"later{n}"}, key=key)[0] for n in range(20)]
            outcomes = {
                body["id"]: answer.result() for body, answer in zip(bodies, answers, strict=True)
            }
            cut = [stream.result() for stream in streams]

        assert later == [200] * 20
        assert lost
        for name, (status, content) in outcomes.items():
            assert status == (502 if name in lost else 200)
            assert status == 200 or error(content) == ("server_error", "bad_gateway")
        assert [f"s{n}" in lost for n in range(4)] == [not done for done in cut]
        ran = [*first.ran, *second.ran]
        assert len(ran) == len(set(ran)) == 32


def test_a_client_that_reuses_connections_gets_502() -> None:
    """A connection that is closed without an answer would make it send the request again."""
    with running() as (front, first, second):
        front.servers = front.servers[1:]
        front.reload()
        headers = {"Authorization": f"Bearer {front.add_key('alice')}"}
        client = http.client.HTTPConnection("127.0.0.1", front.settings.port, timeout=60)
        client.request("GET", "/v1/models", headers=headers)
        client.getresponse().read()
        connection = client.sock
        client.request("POST", "/v1/completions", b'{"id": "x", "delay": 5}', headers)
        wait_for(lambda: second.ran)
        second.kill()

        assert (client.getresponse().status, client.sock) == (502, connection)
        client.close()
        assert (first.ran, second.ran) == ([], ["x"])


def ask(client: http.client.HTTPConnection, path: str, key: str, **body: Any) -> tuple[int, bytes]:
    """Return the status and the content of an answer on a connection that may stay open."""
    headers = {"Authorization": f"Bearer {key}"}
    client.request("POST", path, json.dumps(body).encode(), headers)
    response = client.getresponse()
    return response.status, response.read()


def test_requests_on_one_connection_are_not_concurrent(stage: Stage) -> None:
    """One is over before the next one is read, a stream as well."""
    front, _, _ = stage
    key = front.add_key("serial", concurrent=1)
    client = http.client.HTTPConnection("127.0.0.1", front.settings.port, timeout=60)
    body = {"id": "serial", "parts": 1, "gap": 0}
    path = "/chat/v1/completions"
    answers = [ask(client, path, key, stream=bool(n % 2), **body) for n in range(100)]
    client.close()

    assert {status for status, _ in answers} == {200}


def test_a_large_request_gets_the_answer_to_its_first_bytes(stage: Stage) -> None:
    """The front does not read the rest of its body, and keeps no connection of an unknown user."""
    front, _, _ = stage
    client = http.client.HTTPConnection("127.0.0.1", front.settings.port, timeout=60)
    for key, path, expected in (
        ("sk-any", "/chat/v1/completions", 413),
        ("sk-any", "/other/v1/completions", 404),
        ("sk-wrong", "/chat/v1/completions", 401),
    ):
        for _ in range(5):
            assert ask(client, "/chat/v1/tokenize", "sk-any")[0] == 200
            headers = {"Authorization": f"Bearer {key}"}
            with contextlib.suppress(OSError):
                client.request("POST", path, b"x" * 500_000, headers)
            response = client.getresponse()
            response.read()
            assert response.status == expected
            client.close()


def test_a_reload_changes_open_connections_with_their_next_answer() -> None:
    """It cuts none; a key that is revoked later is revoked on them, too."""
    with running() as (front, _, _):
        keys = [front.add_key(name) for name in ("alice", "bob")]
        clients = [
            http.client.HTTPConnection("127.0.0.1", front.settings.port, timeout=60) for _ in keys
        ]
        path = "/embed/v1/completions"
        for client, key in zip(clients, keys, strict=True):
            assert ask(client, path, key)[0] == 200
        connections = [client.sock for client in clients]
        front.settings = replace(front.settings, hold=6.0)
        front.reload()
        front.node("revoke", "bob")

        assert [client.sock for client in clients] == connections
        assert ask(clients[0], path, keys[0])[0] == 200
        assert ask(clients[1], path, keys[1])[0] == 401
        assert [client.sock for client in clients] == [None, None]  # closed after the answer


def read_stream(front: Running, key: str, name: str) -> bool:
    """Return whether a stream arrived complete."""
    body = {"id": name, "stream": True, "parts": 20, "gap": 0.1}
    with front.request("POST", "/chat/v1/completions", body, key=key) as response:
        try:
            return b"[DONE]" in response.read()
        except http.client.IncompleteRead as error:
            assert b"[DONE]" not in error.partial
            return False


def test_a_slow_server_answers_504() -> None:
    """A long wait of the client alone is no reason."""
    with running(timeout=2) as (front, _, _):
        key = front.add_key("alice")
        status, content = front.post("/chat/v1/completions", {"id": "x", "delay": 4}, key=key)

        assert (status, error(content)) == (504, ("server_error", "timeout"))


def test_keys_survive_a_restart_and_a_reload_cuts_no_stream() -> None:
    """Although it lasts longer than `timeout`. A bad configuration changes nothing."""
    with running(timeout=3) as (front, _, _):
        key = front.add_key("alice")
        body = {"id": "x", "stream": True, "parts": 10, "gap": 0.5}
        with front.request("POST", "/chat/v1/completions", body, key=key) as response:
            front.servers = front.servers[:1]
            front.reload()
            wait_for(lambda: front.get("/embed/v1/models", key=key)[0] == 404)
            assert b"[DONE]" in response.read()
        good = front.config.read_text()
        front.config.write_text(good.replace("balance leastconn", "balance by-magic"))
        check = subprocess.run(
            ["haproxy", "-c", "-f", front.config], check=False, capture_output=True
        )
        assert check.returncode != 0
        assert b"balance only supports" in check.stderr
        assert front.process is not None
        front.process.send_signal(signal.SIGUSR2)
        wait_for(lambda: "balance only supports" in (front.folder / "log").read_text())
        assert front.get("/chat/v1/models", key=key)[0] == 200
        front.stop()
        front.start()
        wait_for(lambda: front.get("/chat/v1/models", key=key)[0] == 200)
