"""`vlaunch chat`: queries, nodes and output."""

from __future__ import annotations

import json

import pytest

from launcher.agent.desired import ProcessSpec
from launcher.core.errors import ConnectError
from tests import supervision
from tests.command_line import Cluster


@pytest.fixture
def serving(cluster: Cluster) -> Cluster:
    """A cluster with a model that answers in two chunks."""
    assert cluster.run("up").code == 0
    supervision.store_server(cluster.world, supervision.make_spec())
    cluster.server_log = ['{"text": "Hel"}', '{"text": "lo"}']
    cluster.commands.clear()
    return cluster


def test_only_the_models_text_is_printed(serving: Cluster) -> None:
    """As it arrives; complaints appear only in errors."""
    ran = serving.run("chat", "hi")

    assert (ran.code, ran.out, ran.err) == (0, "Hello\n", "")


def test_a_server_that_another_version_wrote(up: Cluster) -> None:
    """It is not used, and does not count as stopped."""
    row = {"name": "chat", "desired": {"version": 99}, "observed": None, "age": 1.0}
    up.world.responses["servers"] = supervision.head_report(row)
    ran = up.run("chat", "hi")

    assert ran.code == 2
    assert "error: server `chat`: its files are damaged, or of another version" in ran.err


def test_the_messages_are_sent_on_an_open_input(serving: Cluster) -> None:
    """Its end makes the head cancel the request, so that the GPUs stop."""
    serving.run("chat", "two\nlines")
    (command,) = serving.followed

    assert command.stdin is not None
    messages = [{"role": "user", "content": "two\nlines"}]
    assert json.loads(command.stdin())["messages"] == messages
    assert command.stdin().count(b"\n") == 1
    assert command.stdin().endswith(b"\n")
    assert command.hold_stdin
    assert "--interactive" in command.argv


def test_the_server_is_queried_on_its_apis_node(serving: Cluster) -> None:
    """Of several servers the named one, in that node's container, at its port."""
    supervision.store_server(
        serving.world,
        supervision.make_spec("embed", node="gpu02", backend="mp", port=8001, host="10.0.0.12"),
    )

    assert serving.run("chat", "--server", "embed", "hi").out == "Hello\n"
    (command,) = serving.followed
    assert (command.node, command.argv[3]) == ("gpu02", "vlaunch-c-gpu02")
    assert command.stdin is not None
    request = json.loads(command.stdin())
    assert (request["api_host"], request["api"]) == ("10.0.0.12", 8001)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "2 servers are running: `default`, `embed`"),
        (["--server", "x"], "no server `x` is running\n  running: `default`, `embed`"),
    ],
)
def test_an_ambiguous_server(serving: Cluster, args: list[str], message: str) -> None:
    """No query is sent."""
    supervision.store_server(serving.world, supervision.make_spec("embed", port=8001))
    ran = serving.run("chat", *args, "hi")

    assert (ran.code, ran.out, serving.followed) == (2, "", [])
    assert message in ran.err


def test_without_a_server_chat_fails(cluster: Cluster) -> None:
    """Neither before `up`, nor before `serve`."""
    assert "gpu01: cannot list its servers" in cluster.run("chat", "hi").err
    assert cluster.run("up").code == 0
    ran = cluster.run("chat", "hi")

    assert (ran.code, cluster.followed) == (2, [])
    assert (
        "no server is running on this cluster\n\nhint: start one: `vlaunch serve --model MODEL`"
        in ran.err
    )


def test_a_server_on_an_unreachable_node(serving: Cluster) -> None:
    """The node is contacted only if it is needed."""
    supervision.store_server(serving.world, supervision.make_spec(node="gpu02"))
    serving.missing["gpu02"] = ConnectError("gpu02", "cannot be reached: timed out")
    ran = serving.run("chat", "hi")

    assert (ran.code, serving.followed) == (1, [])
    assert "gpu02: cannot be reached: timed out" in ran.err


@pytest.mark.parametrize(
    ("healthy", "down", "queried"),
    [
        (["gpu01", "gpu02"], "", "gpu01"),
        (["gpu02"], "", "gpu02"),
        ([], "", "gpu01"),
        ([], "gpu02", "gpu01"),
    ],
)
def test_the_first_reachable_endpoint_is_queried(
    serving: Cluster, healthy: list[str], down: str, queried: str
) -> None:
    """An unreachable endpoint does not block the others."""
    processes = tuple(
        ProcessSpec(node=node, argv=("vllm", "serve"), replicas=(at, 1))
        for at, node in enumerate(("gpu01", "gpu02"))
    )
    endpoints = {
        node: {"verdict": "answering" if node in healthy else "quiet"}
        for node in ("gpu01", "gpu02")
    }
    spec = supervision.make_spec(backend="mp", processes=processes, replicas=2)
    supervision.store_server(serving.world, spec, endpoints=endpoints)
    if down:
        serving.missing[down] = ConnectError(down, "cannot be reached: timed out")

    assert serving.run("chat", "hi").out == "Hello\n"
    assert [command.node for command in serving.followed] == [queried]


def test_only_the_head_is_needed(serving: Cluster) -> None:
    """An unreachable worker does not block a query."""
    serving.missing["gpu02"] = ConnectError("gpu02", "cannot be reached: timed out")

    assert serving.run("chat", "hi").out == "Hello\n"
    assert {command.node for command in serving.commands} == {"gpu01"}


@pytest.mark.parametrize(
    ("named", "queried"),
    [
        ([], ("gpu02", "/var/lib/vlaunch/.front/servers.sock")),
        (["--server", "default.2"], ("gpu01", "127.0.0.1")),
    ],
)
def test_a_server_behind_a_front(cluster: Cluster, named: list[str], queried: object) -> None:
    """It is queried through the front, which chooses the replica, unless a replica is named."""
    cluster.write(f"{cluster.path.read_text()}front: {{node: gpu02, tls: off}}\n")
    assert cluster.run("up").code == 0
    for name, port in (("default", 8000), ("default.2", 8001)):
        supervision.store_server(
            cluster.world, supervision.make_spec(name, port=port, host="127.0.0.1")
        )
    cluster.server_log = ['{"text": "Hello"}']

    assert cluster.run("chat", *named, "hi").out == "Hello\n"
    (command,) = cluster.followed
    assert command.stdin is not None
    request = json.loads(command.stdin())
    assert (command.node, request["api_host"]) == queried
    assert request.get("headers") == (None if named else {"x-vlaunch-server": "default"})


REFUSED = {"status": 404, "error": "Not Found", "task": "embedding", "model": "served-as"}


@pytest.mark.parametrize("task", ["", "embedding"])
def test_a_model_without_chat_has_a_curl_hint(serving: Cluster, task: str) -> None:
    """With its address and served name, and without a key if none is needed. Standard output stays
    empty.
    """
    supervision.store_server(serving.world, supervision.make_spec(), task=task)
    serving.server_log = [json.dumps(REFUSED)]
    ran = serving.run("chat", "hi")

    assert (ran.code, ran.out) == (2, "")
    assert "org/m does not support chat: it returns an embedding" in ran.err
    assert (
        "hint: send a request: `curl http://10.0.0.11:8000/v1/embeddings -H 'Content-Type:"
        ' application/json\' -d \'{"model": "served-as", "input": "Say hello."}\'`' in ran.err
    )


def test_a_model_on_its_nodes_loopback_needs_a_tunnel(serving: Cluster) -> None:
    """The command alone would query this machine."""
    supervision.store_server(serving.world, supervision.make_spec(host="127.0.0.1"), task="rerank")
    serving.server_log = [json.dumps({**REFUSED, "task": "rerank"})]
    ran = serving.run("chat", "hi")

    assert "curl http://127.0.0.1:8000/rerank" in ran.err
    assert "hint: run `vlaunch tunnel` first" in ran.err


def test_a_model_of_an_unknown_task(serving: Cluster) -> None:
    """The hint has no curl line that could not work."""
    serving.server_log = [json.dumps({**REFUSED, "task": "health"})]
    ran = serving.run("chat", "hi")

    assert ran.code == 2
    assert "org/m supports neither chat nor any other request that vlaunch sends" in ran.err
    assert "curl" not in ran.err


@pytest.mark.parametrize("task", ["", "chat", "poetry", 7, None])
def test_other_refusals_are_reported_unchanged(serving: Cluster, task: object) -> None:
    """With their status."""
    serving.server_log = [json.dumps({"status": 400, "error": "too long", "task": task})]
    ran = serving.run("chat", "hi")

    assert (ran.code, "org/m rejected the request (HTTP 400)" in ran.err) == (1, True)
