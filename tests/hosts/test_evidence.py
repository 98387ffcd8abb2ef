"""Evidence for `check`: only for selected checks, from reachable nodes, with reasons for gaps."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from launcher.app.hooks import Hooks
from launcher.app.progress import SilentPrinter
from launcher.app.session import Session
from launcher.core import expectations_file
from launcher.core.domain import Answer, Secret
from launcher.core.errors import ConnectError
from launcher.core.transport import Command
from launcher.hosts import evidence
from launcher.hosts.check import Evidence, HubAccess
from launcher.hosts.checks import catalogue
from launcher.inventory.load import loads
from tests.fakes import FakeTransport
from tests.ports import free_port
from tests.simulated import World

NODES = "".join(f"  - {{host: gpu0{n}, ip: 10.0.0.1{n}, gpus: 8}}\n" for n in (1, 2, 3))
ALL = [check.id for check in catalogue.CATALOGUE]
TOKEN = Secret("hf_thisMustStayHidden")


@pytest.fixture(autouse=True)
def _no_file_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore the expectations file of the user who runs the tests."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


def world(extra: str = "") -> World:
    """Three nodes with the image."""
    return World(loads(f"cluster: c\nimage: x:1\n{extra}\nnodes:\n{NODES}", Path("inventory.yaml")))


def gather(
    of: World,
    ids: Sequence[str] = ALL,
    *,
    missing: Sequence[str] = (),
    model: str = "",
    offline: bool = True,
) -> tuple[Evidence, list[Command]]:
    """Return the evidence for these checks, and the commands."""
    transport = FakeTransport(of.answer)
    lost = {name: ConnectError(name, "no answer") for name in missing}
    session: Any = Session(
        inventory=of.inventory,
        fleet=None,
        transport=transport,
        printer=SilentPrinter(),
        hooks=Hooks(inventory=of.inventory, verb=""),
        missing=lost,  # type: ignore[arg-type]
    )
    gathered = evidence.gather_evidence(
        session,
        catalogue.select_checks(only=ids),
        model=model,
        expectations=expectations_file.load_for_user(),
        offline=offline,
    )
    return gathered, transport.commands


@pytest.mark.parametrize(
    ("ids", "times"),
    [
        (["ssh"], 1),
        (["disk"], 1),
        (["shm"], 2),
        (["ray-version"], 2),
        (["high-port"], 2),
        (["mtu"], 2),
        (["model"], 2),
        (ALL, 4),
    ],
)
def test_only_required_commands_run(ids: list[str], times: int) -> None:
    """The survey always, in one round trip per node; containers, port probes and files if a check
    of their group is selected.
    """
    _, commands = gather(world(), ids, model="org/m")

    assert len(commands) == 3 * times
    assert all(command.argv[3] == "probe" for command in commands[:3])


def test_healthy_nodes_have_complete_evidence() -> None:
    """For all nodes and directions, on one unused high port."""
    of = world()
    of.machines["gpu02"].model = {"config.json": 7}
    gathered, commands = gather(of, model="org/m")
    probes = [json.loads(command.argv[-1]) for command in commands if "peers" in command.argv[-1]]

    assert list(gathered.facts) == list(gathered.inside) == ["gpu01", "gpu02", "gpu03"]
    assert (gathered.inside_missing, gathered.probes_missing, gathered.missing) == ({}, {}, {})
    assert len(gathered.port_probes or ()) == 6
    assert gathered.files == {"gpu01": None, "gpu02": {"config.json": 7}, "gpu03": None}
    assert len({(command["port"], command["nonce"]) for command in probes}) == 1
    assert 40000 <= probes[0]["port"] < 60000


def test_two_runs_use_another_port_and_nonce() -> None:
    """Listeners of an earlier run do not count."""
    first, second = (gather(world(), ["high-port"])[1][-1].argv[-1] for _ in range(2))

    assert json.loads(first)["nonce"] != json.loads(second)["nonce"]


def test_a_missing_node_gets_no_commands() -> None:
    """The others probe one another."""
    gathered, commands = gather(world(), missing=["gpu02"], model="org/m")

    assert "gpu02" not in {command.node for command in commands}
    assert gathered.missing == {"gpu02": "no answer"}
    assert {(command.source, command.target) for command in gathered.port_probes or ()} == {
        ("gpu01", "gpu03"),
        ("gpu03", "gpu01"),
    }


def test_a_single_node_probes_no_peers() -> None:
    """No probe differs from a failed probe."""
    gathered, _ = gather(world(), missing=["gpu01", "gpu02"])

    assert gathered.port_probes is None
    assert list(gathered.facts) == ["gpu03"]


def test_no_reachable_node() -> None:
    """No commands."""
    gathered, commands = gather(world(), missing=["gpu01", "gpu02", "gpu03"], model="org/m")

    assert (gathered.facts, commands, gathered.files) == ({}, [], {})


def test_a_connection_that_breaks_leaves_gaps_with_reasons() -> None:
    """During any query."""
    of = world()
    answer, count = of.answer, 0

    def breaking(command: Command) -> Answer | None:
        nonlocal count
        if command.node == "gpu03":
            count += 1
            if count > 1:
                return Answer(node="gpu03", code=255, err="connection lost")
        return answer(command)

    of.answer = breaking  # type: ignore[method-assign]
    gathered, _ = gather(of, model="org/m")
    results = {result.check.id: result for result in catalogue.run_checks(gathered)}

    assert gathered.inside["gpu03"].error == "connection lost"
    assert "connection lost" in gathered.probes_missing["gpu03"]
    assert "gpu03" not in gathered.files
    for id_ in ("ray-version", "ports-reachable"):
        assert {f.node: f.status for f in results[id_].findings}["gpu03"] == "skip"


@pytest.mark.parametrize(
    ("extra", "rdma", "level"),
    [
        ("", "", "any"),
        ("", "mlx5_0/ports/1/state:4: ACTIVE", "rdma"),
        ("network: {fabric: infiniband}", "", "gdrdma"),
        ("network: {fabric: infiniband, require: any}", "", "any"),
        ("accelerator: cpu", "", "any"),
    ],
)
def test_the_level_equals_that_of_check_nccl(extra: str, rdma: str, level: str) -> None:
    """From the inventory, else from the survey."""
    of = world(extra)
    for machine in of.machines.values():
        machine.survey["rdma"] = rdma

    assert gather(of, ["ssh"])[0].required == level


def test_the_token_goes_to_hugging_face_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the inventory; other secrets are not even resolved."""
    request: list[tuple[str, Secret | None]] = []

    def ask(model: str, token: Secret | None) -> HubAccess:
        request.append((model, token))
        return HubAccess(status="ok")

    monkeypatch.setattr(evidence, "query_hub", ask)
    monkeypatch.setenv("THE_TOKEN", "hf_thisMustStayHidden")
    secret = "secrets: {HF_TOKEN: {env: THE_TOKEN}, OTHER: {command: 'exit 7'}}"
    gathered, commands = gather(world(secret), ["hf-token"], model="org/m", offline=False)
    gather(world(), ["hf-token"], model="org/m", offline=False)

    assert gathered.hub == HubAccess(status="ok")
    assert [(model, token and token.reveal()) for model, token in request] == [
        ("org/m", "hf_thisMustStayHidden"),
        ("org/m", None),
    ]
    assert "hf_thisMustStayHidden" not in repr(commands)


@dataclass
class HubServer:
    """A simulated hub: its responses, and the requests (path, Authorization)."""

    url: str = ""
    code: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)
    mute: threading.Event | None = None


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """A fake hub at HF_ENDPOINT, without a proxy."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    for hub in serve():
        monkeypatch.setenv("HF_ENDPOINT", hub.url + "/")
        yield hub


@pytest.fixture
def other() -> Iterator[HubServer]:
    """Another host, as a target of redirects."""
    yield from serve()


def serve() -> Iterator[HubServer]:
    """Run a hub for one test."""
    state = HubServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.requests.append((self.path, self.headers["Authorization"]))
            if state.mute is not None:
                state.mute.wait(60)
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


GATED = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model org/m is restricted"}


@pytest.mark.parametrize(
    ("code", "headers", "token", "status", "text"),
    [
        (200, {}, TOKEN, "ok", "org/m is readable"),
        (200, {}, None, "ok", "org/m is readable without a token"),
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
def test_every_response_has_a_status(
    served: HubServer,
    code: int,
    headers: dict[str, str],
    token: Secret | None,
    status: str,
    text: str,
) -> None:
    """With the hub's message, if any."""
    served.code, served.headers = code, headers
    access = evidence.query_hub("org/m", token)

    assert (access.status, access.text) == (status, text)
    assert TOKEN.reveal() not in repr(access)


def test_the_token_travels_as_a_header_only(served: HubServer) -> None:
    """To the model's API page; without a token the header is missing."""
    evidence.query_hub("org/m", TOKEN)
    evidence.query_hub("org/a b?c", None)

    assert served.requests == [
        ("/api/models/org/m/revision/main", f"Bearer {TOKEN.reveal()}"),
        ("/api/models/org/a%20b%3Fc/revision/main", None),
    ]


def test_a_renamed_model_is_followed(served: HubServer) -> None:
    """On the same host, with the token: the hub redirects the old name."""
    served.code, served.headers = 307, {"Location": "/api/models/new/m"}
    evidence.query_hub("org/m", TOKEN)

    assert served.requests[1] == ("/api/models/new/m", f"Bearer {TOKEN.reveal()}")


def test_another_host_never_gets_the_token(served: HubServer, other: HubServer) -> None:
    """In a redirect from any server."""
    served.code, served.headers = (
        302,
        {"Location": f"{other.url.replace('127.0.0.1', 'localhost')}/elsewhere"},
    )
    access = evidence.query_hub("org/m", TOKEN)

    assert other.requests == [("/elsewhere", None)]
    assert access.status == "ok"


def test_netrc_is_ignored(
    served: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster's token is tested, not one from `~/.netrc`."""
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password other\n", encoding="utf-8")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    evidence.query_hub("org/m", TOKEN)
    evidence.query_hub("org/m", None)

    assert [authorization for _, authorization in served.requests] == [
        f"Bearer {TOKEN.reveal()}",
        None,
    ]


def test_an_unreachable_hub_is_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """An air-gapped machine is no fault."""
    port = free_port()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{port}")
    access = evidence.query_hub("org/m", TOKEN)

    assert (access.status, access.text) == ("offline", "127.0.0.1: ConnectionError")


def test_a_silent_hub_times_out(served: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the deadline."""
    served.mute = threading.Event()
    monkeypatch.setattr(evidence, "_HUB_TIMEOUT", 0.2)
    access = evidence.query_hub("org/m", TOKEN)

    assert (access.status, access.text) == ("offline", "127.0.0.1: ReadTimeout")


def test_a_redirect_loop_is_offline(served: HubServer) -> None:
    """It never ends."""
    served.code, served.headers = 302, {"Location": "/again"}

    assert evidence.query_hub("org/m", TOKEN).status == "offline"


@pytest.mark.parametrize(
    "where", ["huggingface.co", "http://", "http://[", "ftp://x", "http://a b"]
)
def test_an_invalid_endpoint(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is named, with its value."""
    monkeypatch.setenv("HF_ENDPOINT", where)
    access = evidence.query_hub("org/m", TOKEN)

    assert access.status == "offline"
    assert where in access.text


@pytest.mark.parametrize("token", ["hf_ünïcode", "hf_日本", "hf_with\nbreak"])
def test_an_invalid_token(served: HubServer, token: str) -> None:
    """It is rejected, and not shown."""
    access = evidence.query_hub("org/m", Secret(token))

    assert (access.status, token in access.text) == ("unauthorized", False)


def test_a_path_needs_no_hub(served: HubServer) -> None:
    """No request."""
    assert (evidence.query_hub("/models/m", TOKEN).status, served.requests) == ("not asked", [])
