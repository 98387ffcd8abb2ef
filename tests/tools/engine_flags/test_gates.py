"""Gates that check arguments with the vLLM in a container: the command, and its judgement."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher.app.apply import apply
from launcher.core.check import Finding
from launcher.core.domain import Answer
from launcher.core.errors import RequestError
from launcher.core.events import Event
from launcher.core.plan import Gate, Plan, Stage
from launcher.core.transport import Command
from launcher.tools.engine_flags import gates, parser
from launcher.tools.site import Site
from tests.conftest import Load
from tests.fakes import FakeTransport

ARGV = ("vllm", "serve", "org/m", "--seed", "1")


@pytest.fixture
def gate(load: Load) -> Gate:
    site = Site(load())
    return gates.command_gate(site, site.nodes[1], ARGV, {"VLLM_B": "2", "A": "x y"})


def report(**changes: Any) -> Answer:
    data = {"mark": parser.MARK, "mistakes": [], "similar": {}, "vllm": "0.32.0", "ray": "2.60.0"}
    out = f'MARK = "{parser.MARK}"\n{json.dumps({**data, **changes})}\n'
    return Answer(node="gpu02", code=0, out=out)


def judge(gate: Gate, answer: Answer) -> dict[str, Finding]:
    return {finding.status: finding for finding in gate.judge({"gpu02": [answer]})}


def test_the_program_runs_in_the_container_of_the_process(gate: Gate) -> None:
    """With the server's variables, hidden GPUs, and a deadline on both sides."""
    (query,) = gate.queries
    words = query.argv

    assert query.node == "gpu02"
    assert words[:4] == ("docker", "exec", "--interactive", "vlaunch-c-gpu02")
    assert "60.0" in words
    start = words.index("env")
    assert words[start : start + 6] == (
        *("env", "A=x y", "CUDA_VISIBLE_DEVICES=", "VLLM_B=2"),
        *("python3", "-c"),
    )
    assert words[-4:] == ("serve", "org/m", "--seed", "1")
    assert (query.hold_stdin, query.timeout) == (True, 70.0)


def test_the_arguments_of_a_job_are_sent_as_they_are(load: Load) -> None:
    """To the head."""
    (query,) = gates.engine_gate(Site(load()), {"max_model_len": 8, "config": {"a": [1]}}).queries

    assert query.node == "gpu01"
    assert query.argv[-2] == "engine"
    assert json.loads(query.argv[-1]) == {"max_model_len": 8, "config": {"a": [1]}}


def test_valid_arguments_pass(gate: Gate) -> None:
    findings = judge(gate, report())

    assert findings.keys() == {"pass"}
    assert findings["pass"].text == "vLLM 0.32.0: the server's arguments are valid"


def test_mistakes_reject_the_request_in_the_words_of_vllm(gate: Gate) -> None:
    """An exit code of 2, as for every wrong request."""
    mistakes = ["unrecognized arguments: --max-nun-seqs 16", "argument --seed: invalid int value"]
    answer = report(mistakes=mistakes, similar={"--max-nun-seqs": "--max-num-seqs"})
    plan = Plan(verb="serve", stages=(Stage(id="preflight", title="Check", gates=(gate,)),))
    with pytest.raises(RequestError) as raised:
        list(apply(plan, FakeTransport(lambda _: answer)))

    error = raised.value
    assert error.message == "vLLM 0.32.0 rejects the arguments; nothing was changed"
    assert error.evidence.splitlines() == mistakes
    assert "`--max-nun-seqs`: did you mean `--max-num-seqs`?" in error.hint
    assert "`vlaunch exec -n gpu02 -- vllm serve --help=all`" in error.hint


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Answer(node="gpu02", code=124), "no result within 60s"),
        (Answer(node="gpu02", code=137), "no result within 60s"),
        (Answer(node="gpu02", code=-1, timed_out=True), "no result within 60s"),
        (Answer(node="gpu02", code=139, err="Segmentation fault"), "Segmentation fault"),
        (report(error="RuntimeError: no device"), "RuntimeError: no device"),
        (Answer(node="gpu02", code=0, out='{"mark": "vlaunch-engine-flags", "x": 1}'), "mistakes"),
    ],
)
def test_unchecked_arguments_stop_nothing(gate: Gate, answer: Answer, reason: str) -> None:
    """A slow node, or a vLLM that this program does not know, is a warning."""

    def run(command: Command) -> Answer:
        return answer

    plan = Plan(verb="serve", stages=(Stage(id="preflight", title="Check", gates=(gate,)),))
    events: list[Event] = list(apply(plan, FakeTransport(run)))

    (finding,) = [event for event in events if event.kind == "finding"]
    assert (finding.state, finding.node) == ("warn", "gpu02")
    assert "the arguments were not checked: " in finding.text
    assert reason in finding.text
    assert any("checking the arguments" in event.text for event in events)


def test_a_new_vllm_is_a_warning_and_named_beside_its_mistakes(gate: Gate) -> None:
    """A flag of vlaunch itself may be what it rejects."""
    newer = "vLLM 0.99.0 is newer than vlaunch was checked with"
    accepted = judge(gate, report(vllm="0.99.0"))
    rejected = judge(gate, report(vllm="0.99.0", mistakes=["unrecognized arguments: --x"]))

    assert newer in accepted["warn"].text
    assert accepted["pass"].text.startswith("vLLM 0.99.0: ")
    assert newer in rejected["fail"].fix


@pytest.mark.parametrize("error", ["", "ImportError: x"])
def test_a_vllm_that_cannot_work_is_rejected(gate: Gate, error: str) -> None:
    """Although it may not even check arguments."""
    findings = judge(gate, report(vllm="0.19.1", error=error))

    assert "vLLM 0.19.1 does not work with vlaunch" in findings["fail"].text
    assert "`image:`" in findings["fail"].fix
