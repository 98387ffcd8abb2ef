"""Every command on hostile nodes: one of our exit codes, and printable output or valid JSON."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from launcher.app import audit
from launcher.batch import gather
from launcher.batch import watch as watch_batch
from launcher.core.domain import Answer
from launcher.core.transport import Command
from launcher.serving import watch
from tests import supervision
from tests.batch import batch_job
from tests.command_line import Cluster
from tests.diagnose.node_answers import NodeAnswers, set_answers, state
from tests.hostile import mutate, seeds
from tests.hostile.mutate import EVIL
from tests.hostile.test_answers import harmless

COMMANDS = (
    "status",
    "status --json",
    "up",
    "up --json",
    "up --dry-run",
    "check",
    "check --json",
    "check-nccl",
    "check-nccl --json",
    "jobs",
    "jobs --json",
    "exec -- hostname",
    "logs",
    "audit",
    "audit --json",
    "lock",
    "lock break --yes",
    "secrets list",
    "doctor",
    "doctor --json",
    "serve --model m --tp 2",
    "serve --model m --tp 2 --json",
    "stop",
    "chat hello",
    "batch job.yaml",
    "batch job.yaml --json",
    "jobs remove rows --yes",
    "init gpu01 gpu02 --output made.yaml",
    "status --verbose",
    "down --json --yes",
    "down --yes",
)


@pytest.fixture
def up(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A running cluster; waits cost no time."""
    ticks = itertools.count(step=5)
    for function in (watch.watch_start, watch_batch.watch_job, gather.gather):
        defaults = function.__kwdefaults__ or {}
        monkeypatch.setitem(defaults, "clock", lambda: float(next(ticks)))
        monkeypatch.setitem(defaults, "sleep", lambda _: None)
    batch_job.bring_up(cluster)
    cluster.world.jobs = [
        {
            "submission_id": "batch-rows-1",
            "status": "FAILED",
            "message": "",
            "metadata": {"vlaunch.batch": "rows"},
        },
    ]
    supervision.store_server(
        cluster.world,
        supervision.make_spec("embed", node="gpu02", backend="mp"),
        faults=[dataclasses.asdict(supervision.make_fault())],
    )
    entry = {
        "at": "2026-11-20T10:00:00Z",
        "who": "ops",
        "host": "here",
        "verb": "up",
        "command": "up",
        "node": "gpu01",
        "changes": ["a", "b"],
    }
    log = NodeAnswers(
        parts={
            "state": state("vlaunch-c-gpu01"),
            "log-1": "RuntimeError: connectFullMesh",
            "servers": "embed",
            "observed-1": json.dumps(seeds.servers()["servers"][1]["observed"]),
            "engine-1": "EngineCore encountered a fatal error.",
        },
        audit=audit.format_line(entry) + "\n",
    )
    set_answers(cluster, gpu01=log, gpu02=log)
    handler = cluster.world.answer

    def answer(command: Command) -> Answer | None:
        script = command.argv[3] if command.argv[:2] == ("sh", "-c") else ""
        if script == "lock-look":
            owner = (
                '{"pid": 7, "since": "2026-11-20T10:00:00Z", "who": "ops", "host": "here",'
                ' "command": "up"}'
            )
            return Answer(node=command.node, code=0, out=f"held {owner}")
        if script == "lock-break":
            return Answer(node=command.node, code=0, out="freed\n")
        if script == "probe":  # `init` does not know the cluster's name yet
            command = replace(command, argv=(*command.argv[:4], "c", *command.argv[5:]))
        return handler(command)

    cluster.world.answer = answer  # type: ignore[method-assign]
    return cluster


def evil(command: Command, answer: Answer) -> Answer:
    """Append terminal codes to every text of an answer, keeping its structure."""
    lines = answer.out.split("\n")
    spoiled = [
        json.dumps(_evil(data)) if (data := _json(line)) is not None else _marked(line)
        for line in lines
    ]
    return Answer(
        node=answer.node, code=answer.code, out="\n".join(spoiled), err=f"{answer.err}{EVIL}"
    )


def failed(command: Command, answer: Answer) -> Answer:
    """Fail with terminal codes in the output."""
    return Answer(node=answer.node, code=1, out=EVIL, err=f"{EVIL} permission denied {EVIL}")


def late(command: Command, answer: Answer) -> Answer:
    """Time out."""
    return Answer(
        node=answer.node,
        code=124,
        out=answer.out[: len(answer.out) // 2] + EVIL,
        err=EVIL,
        timed_out=True,
    )


def gone(command: Command, answer: Answer) -> Answer:
    """Close the connection."""
    return Answer(node=answer.node, code=255, err=f"the connection was lost{EVIL}")


def _json(line: str) -> Any:
    try:
        data = json.loads(line)
    except ValueError:
        return None
    return data if isinstance(data, (dict, list)) else None


def _evil(data: Any) -> Any:
    if isinstance(data, dict):
        return {key: _evil(item) for key, item in data.items()}
    if isinstance(data, list):
        return [_evil(item) for item in data]
    # States, numbers and names stay: without them the launcher would not read the rest.
    return (
        data + EVIL
        if isinstance(data, str)
        and not re.fullmatch(r"[A-Z]*|[\d.]*|running|/?vlaunch-.*|open", data)
        else data
    )


def _marked(line: str) -> str:
    return line if not line or line.startswith("@@") else line + EVIL.replace("\n", " ")


class Shown:
    """A cluster without a repr: pytest would print all of it when a test fails."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster


@pytest.fixture
def shown(up: Cluster) -> Shown:
    return Shown(up)


def run_spoiled(cluster: Cluster, line: str, spoil: Callable[[Command, Answer], Answer]) -> None:
    """Run one command line; an exception fails the test."""
    good = cluster.world.answer

    def answer(command: Command) -> Answer | None:
        answer = good(command)
        return None if answer is None else spoil(command, answer)

    cluster.world.answer = answer  # type: ignore[method-assign]
    cluster.server_log = [
        f"chat a line{EVIL}".replace("\n", " "),
        json.dumps({"text": f"hi{EVIL}"}),
        json.dumps({"error": EVIL}),
    ]
    cluster.logs = {
        "gpu01": {"head": f"one{EVIL}".encode(errors="surrogatepass")},
        "gpu02": {"worker": b"\x9b2J\xff" * 50},
    }
    try:
        ran = cluster.run(*line.split(" "))
    except BaseException as error:
        raise AssertionError(f"`vlaunch {line}` raised {error!r}") from error
    finally:
        cluster.world.answer = good  # type: ignore[method-assign]
    assert ran.code in (0, 1, 2, 3, 124, 255), f"{line}: {ran.err}"
    harmless(ran.err, line)
    # In a pipe, the model's answer is data; see tests/serving/test_chat_command.py for terminals
    if not line.startswith("chat"):
        harmless(ran.out, line)
    output = ran.out + ran.err
    assert output.count("EVIL") == output.count("[red]EVIL")  # else it was rendered as markup
    if "--json" in line:
        for event in ran.out.splitlines():
            json.loads(event, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


@pytest.mark.parametrize("spoil", [evil, failed, late, gone], ids=lambda spoil: spoil.__name__)
def test_terminal_codes(up: Cluster, spoil: Callable[[Command, Answer], Answer]) -> None:
    """In host names, container names, errors, logs and tables: none acts on the terminal."""
    for line in COMMANDS:
        run_spoiled(up, line, spoil)


@mutate.examples(25)
@given(chance=mutate.chances)
def test_nearly_right_answers(shown: Shown, chance: random.Random) -> None:
    """Nearly right answers, from any node, to any command."""

    def spoil(command: Command, answer: Answer) -> Answer:
        if chance.random() < 0.6:
            return answer
        data = _json(answer.out)
        out = mutate.text(data, chance) if data is not None else mutate.lines(answer.out, chance)
        return Answer(
            node=answer.node,
            code=chance.choice((answer.code, answer.code, 0, 1)),
            out=out,
            err=answer.err,
        )

    run_spoiled(shown.cluster, chance.choice(COMMANDS), spoil)


def test_logs_longer_than_requested(up: Cluster) -> None:
    """A node that ignores `--tail 10` does not fill the screen; nor does one long line."""
    up.logs = {"gpu01": {"head": b"x\n" * 100_000}, "gpu02": {"worker": b"y" * 2_000_000}}
    up.server_log = ["chat z"] * 10_000
    lines = up.run("logs", "--tail", "10").out.splitlines()

    assert sorted({line[:15] for line in lines}) == [
        "gpu01/chat: z",
        "gpu01: x",
        "gpu02/chat: z",
        "gpu02: yyyyyyyy",
    ]
    assert len(lines) == 31
    assert max(map(len, lines)) < 2**21
