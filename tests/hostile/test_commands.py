"""Every command on hostile nodes: it ends with an exit code of ours, and what it prints is plain,
or valid JSON.
"""

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
from launcher.app.audit import AuditLine
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
    "secrets list",
    "doctor",
    "doctor --json",
    "serve --model m --tp 2",
    "serve --model m --tp 2 --json",
    "stop",
    "chat hello",
    "batch job.yaml",
    "batch job.yaml --json",
    "jobs --remove rows --yes",
    "init gpu01 gpu02 --output made.yaml",
    "status --verbose",
    "down --json --yes",
    "down --yes",
)


@pytest.fixture
def up(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster that is up; waits cost no time."""
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
    entry = AuditLine(
        at="2026-11-20T10:00:00Z",
        who="ops",
        host="here",
        verb="up",
        command="up",
        node="gpu01",
        changes=("a", "b"),
    )
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
        word = command.argv[3] if command.argv[:2] == ("sh", "-c") else ""
        if word == "lock-look":
            held = (
                '{"pid": 7, "since": "2026-11-20T10:00:00Z", "who": "ops", "host": "here",'
                ' "command": "up"}'
            )
            return Answer(node=command.node, code=0, out=f"held {held}")
        if word == "probe":  # `init` does not know the cluster's name yet
            command = replace(command, argv=(*command.argv[:4], "c", *command.argv[5:]))
        return handler(command)

    cluster.world.answer = answer  # type: ignore[method-assign]
    return cluster


def evil(command: Command, answer: Answer) -> Answer:
    """Put what draws on a terminal into every text of an answer, and leave its form as it is."""
    lines = answer.out.split("\n")
    told = [
        json.dumps(_evil(said)) if (said := _json(line)) is not None else _marked(line)
        for line in lines
    ]
    return Answer(
        node=answer.node, code=answer.code, out="\n".join(told), err=f"{answer.err}{EVIL}"
    )


def failed(command: Command, answer: Answer) -> Answer:
    """Fail with such words."""
    return Answer(node=answer.node, code=1, out=EVIL, err=f"{EVIL} permission denied {EVIL}")


def late(command: Command, answer: Answer) -> Answer:
    """Never come to an end."""
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
        said = json.loads(line)
    except ValueError:
        return None
    return said if isinstance(said, (dict, list)) else None


def _evil(said: Any) -> Any:
    if isinstance(said, dict):
        return {key: _evil(each) for key, each in said.items()}
    if isinstance(said, list):
        return [_evil(each) for each in said]
    # Words that stand for something keep it: else nobody would read on.
    return (
        said + EVIL
        if isinstance(said, str)
        and not re.fullmatch(r"[A-Z]*|[\d.]*|running|/?vlaunch-.*|open", said)
        else said
    )


def _marked(line: str) -> str:
    return line if not line or line.startswith("@@") else line + EVIL.replace("\n", " ")


class Shown:
    """A cluster that is not printed when a test fails: it is large."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster


@pytest.fixture
def shown(up: Cluster) -> Shown:
    return Shown(up)


def try_all(cluster: Cluster, words: str, spoil: Callable[[Command, Answer], Answer]) -> None:
    """Run one command line; whatever leaves `run` but an exit code fails the test."""
    good = cluster.world.answer

    def answer(command: Command) -> Answer | None:
        said = good(command)
        return None if said is None else spoil(command, said)

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
        ran = cluster.run(*words.split(" "))
    except BaseException as error:
        raise AssertionError(f"`vlaunch {words}` raised {error!r}") from error
    finally:
        cluster.world.answer = good  # type: ignore[method-assign]
    assert ran.code in (0, 1, 2, 3, 124, 255), f"{words}: {ran.err}"
    harmless(ran.err, words)
    # into a pipe, the model's words are data; see tests/serving/test_chat_command.py for terminals
    if not words.startswith("chat"):
        harmless(ran.out, words)
    said = ran.out + ran.err
    assert said.count("EVIL") == said.count("[red]EVIL")  # else it was taken for markup
    if "--json" in words:
        for line in ran.out.splitlines():
            json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


@pytest.mark.parametrize("spoil", [evil, failed, late, gone], ids=lambda each: each.__name__)
def test_words_that_draw(up: Cluster, spoil: Callable[[Command, Answer], Answer]) -> None:
    """In host names, container names, errors, logs, tables: nothing of it reaches the terminal as
    it was meant.
    """
    for words in COMMANDS:
        try_all(up, words, spoil)


@mutate.examples(25)
@given(chance=mutate.chances)
def test_answers_that_are_wrong_somewhere(shown: Shown, chance: random.Random) -> None:
    """Near the truth, of any node, on any command."""

    def spoil(command: Command, answer: Answer) -> Answer:
        if chance.random() < 0.6:
            return answer
        said = _json(answer.out)
        out = mutate.text(said, chance) if said is not None else mutate.lines(answer.out, chance)
        return Answer(
            node=answer.node,
            code=chance.choice((answer.code, answer.code, 0, 1)),
            out=out,
            err=answer.err,
        )

    try_all(shown.cluster, chance.choice(COMMANDS), spoil)


def test_logs_of_more_lines_than_were_asked_for(up: Cluster) -> None:
    """A node that is asked for the last ten does not fill the screen; nor does one line."""
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
