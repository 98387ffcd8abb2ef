"""What Hugging Face says of a model and a token: a server on this machine stands for it, asked over
real HTTP.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from launcher.core.domain import Secret
from launcher.hosts import hub

TOKEN = Secret("hf_thisMustStayHidden")


@dataclass
class Hub:
    """A hub: what it answers, and what it was asked (path, Authorization)."""

    url: str = ""
    code: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    mute: threading.Event | None = None


@pytest.fixture
def served() -> Iterator[Hub]:
    """A hub that HF_ENDPOINT may name."""
    yield from serve()


@pytest.fixture
def other() -> Iterator[Hub]:
    """Another host that the first may send on to."""
    yield from serve()


def serve() -> Iterator[Hub]:
    """Run a hub on a port of its own until the test is over."""
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append((self.path, self.headers["Authorization"]))
            if state.mute is not None:
                state.mute.wait(20)
                return
            self.send_response(state.code)
            for name, value in state.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            return None

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield state
        if state.mute is not None:
            state.mute.set()
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _here(served: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked through a proxy, and no other file or variable has a say."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("HF_ENDPOINT", served.url + "/")


GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model org/m is restricted"}


@pytest.mark.parametrize(
    ("code", "headers", "token", "status", "text"),
    [
        (200, {}, TOKEN, "ok", "org/m may be read"),
        (200, {}, None, "ok", "org/m may be read without a token"),
        (
            401,
            {"X-Error-Message": "Invalid credentials"},
            TOKEN,
            "unauthorized",
            "Invalid credentials",
        ),
        (401, GATED, TOKEN, "gated", "Access to model org/m is restricted"),
        (403, GATED, TOKEN, "gated", "Access to model org/m is restricted"),
        (403, {}, TOKEN, "gated", "HTTP 403"),
        (404, {"X-Error-Code": "RepoNotFound"}, TOKEN, "not found", "HTTP 404"),
        (404, {}, None, "not found", "HTTP 404"),
        (401, {}, None, "no token", "HTTP 401"),
        (403, GATED, None, "no token", "Access to model org/m is restricted"),
        (503, {}, TOKEN, "offline", "HTTP 503"),
        (429, {}, TOKEN, "offline", "HTTP 429"),
    ],
)
def test_each_answer_has_a_status(
    served: Hub, code: int, headers: dict[str, str], token: Secret | None, status: str, text: str
) -> None:
    """With the hub's own words where it has some."""
    served.code, served.headers = code, headers
    said = hub.ask("org/m", token)

    assert (said.status, said.text) == (status, text)
    assert TOKEN.reveal() not in repr(said)


def test_the_token_travels_as_a_header_only(served: Hub) -> None:
    """To the model's page in the API; without a token there is no such header."""
    hub.ask("org/m", TOKEN)
    hub.ask("org/a b?c", None)

    assert served.asked == [
        ("/api/models/org/m/revision/main", f"Bearer {TOKEN.reveal()}"),
        ("/api/models/org/a%20b%3Fc/revision/main", None),
    ]


def test_a_model_that_was_renamed_is_followed(served: Hub) -> None:
    """On the same host, with the token: the hub sends on from the old name."""
    served.code, served.headers = 307, {"Location": "/api/models/new/m"}
    hub.ask("org/m", TOKEN)

    assert served.asked[1] == ("/api/models/new/m", f"Bearer {TOKEN.reveal()}")


def test_another_host_never_sees_the_token(served: Hub, other: Hub) -> None:
    """Whoever answers may send us on; the token is not theirs to give away."""
    served.code, served.headers = (
        302,
        {"Location": f"{other.url.replace('127.0.0.1', 'localhost')}/elsewhere"},
    )
    said = hub.ask("org/m", TOKEN)

    assert other.asked == [("/elsewhere", None)]
    assert said.status == "ok"


def test_another_login_on_this_machine_has_no_say(
    served: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster's token is what is tried, and not one that `~/.netrc` has for the host."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password other\n", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    hub.ask("org/m", TOKEN)
    hub.ask("org/m", None)

    assert [authorization for _, authorization in served.asked] == [
        f"Bearer {TOKEN.reveal()}",
        None,
    ]


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """An air-gapped machine is no fault."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    said = hub.ask("org/m", TOKEN)

    assert (said.status, said.text) == ("offline", "127.0.0.1: ConnectionError")


def test_a_hub_that_does_not_answer_is_given_up(
    served: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the deadline."""
    served.mute = threading.Event()
    monkeypatch.setattr(hub, "_SECONDS", 0.2)
    said = hub.ask("org/m", TOKEN)

    assert (said.status, said.text) == ("offline", "127.0.0.1: ReadTimeout")


def test_a_ring_of_hosts_is_given_up(served: Hub) -> None:
    """Sent on for ever."""
    served.code, served.headers = 302, {"Location": "/again"}

    assert hub.ask("org/m", TOKEN).status == "offline"


@pytest.mark.parametrize(
    "where", ["huggingface.co", "http://", "http://[", "ftp://x", "http://a b"]
)
def test_an_endpoint_that_is_none(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is named, and what it holds."""
    monkeypatch.setenv("HF_ENDPOINT", where)
    said = hub.ask("org/m", TOKEN)

    assert said.status == "offline"
    assert where in said.text


@pytest.mark.parametrize("token", ["hf_ünïcode", "hf_日本", "hf_with\nbreak"])
def test_a_token_that_no_header_can_carry(served: Hub, token: str) -> None:
    """It is not accepted, and not shown."""
    said = hub.ask("org/m", Secret(token))

    assert (said.status, token in said.text) == ("unauthorized", False)


def test_a_path_needs_no_hub(served: Hub) -> None:
    """Nobody is asked."""
    assert (hub.ask("/models/m", TOKEN).status, served.asked) == ("not asked", [])
