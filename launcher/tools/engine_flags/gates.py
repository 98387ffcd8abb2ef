"""Gates that check a server's or job's arguments with the vLLM in its container."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from launcher.core import decode, untrusted
from launcher.core.check import Finding, failed, passed, warned
from launcher.core.domain import Answer, Argv, Node
from launcher.core.errors import UnreadableAnswer
from launcher.core.plan import Gate
from launcher.core.transport import Answers, Command
from launcher.tools import docker
from launcher.tools.site import Site
from launcher.tools.supported_versions import judge_support

VISIBLE_DEVICES = {"nvidia": "CUDA_VISIBLE_DEVICES", "amd": "HIP_VISIBLE_DEVICES", "cpu": ""}

_DEADLINE = 60.0  # seconds; vLLM's imports take about six on an idle machine
_MARK = '{"mark": "vlaunch-engine-flags",'
_PARSER = Path(__file__).with_name("parser.py")
_LONGEST = 2**20  # characters of output
_MOST_LINES = 20  # of messages


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """Report of `parser.py`: vLLM's messages, an error that stopped it, similar names, versions."""

    mistakes: tuple[decode.Text, ...]
    warnings: Annotated[tuple[decode.Text, ...], decode.Default(())] = ()
    error: decode.Text = ""
    similar: Mapping[str, decode.Text]
    vllm: Annotated[str, decode.Default("")] = ""
    ray: Annotated[str, decode.Default("")] = ""


def command_gate(site: Site, node: Node, argv: Argv, env: Mapping[str, str]) -> Gate:
    """Check a command `vllm serve …` with the parser of `vllm serve`."""
    return _gate(site, node, ("serve", *argv[2:]), env, "the server's arguments are valid")


def engine_gate(site: Site, arguments: Mapping[str, Any]) -> Gate:
    """Check the arguments of a job's `vllm.LLM`."""
    words = ("engine", json.dumps(arguments))
    return _gate(site, site.head, words, {}, "the engine's arguments are valid")


def _gate(site: Site, node: Node, words: Argv, env: Mapping[str, str], what: str) -> Gate:
    """Return the gate that runs the program in a node's container, where GPUs are hidden."""
    hidden = VISIBLE_DEVICES[site.inventory.accelerator]
    variables = {**env, **({hidden: ""} if hidden else {})}
    assignments = (f"{name}={value}" for name, value in sorted(variables.items()))
    program = _PARSER.read_text(encoding="utf-8")
    argv = docker.with_deadline(("env", *assignments, "python3", "-c", program, *words), _DEADLINE)
    query = Command(
        node=node.name,
        argv=docker.exec_(node.docker, site.container_name(node), *argv, stdin=True),
        timeout=_DEADLINE + 10,
        hold_stdin=True,
    )
    return Gate(
        id="engine-flags",
        what=what,
        queries=(query,),
        judge=partial(_judge, node, what),
        progress_text="checking the arguments with vLLM's own parser",
        rejects_request=True,
    )


def _judge(node: Node, what: str, answers: Answers) -> Sequence[Finding]:
    """Judge the report; without one the arguments are unchecked, which stops nothing."""
    try:
        report = _parse_report(answers[node.name][0])
    except UnreadableAnswer as error:
        return [_unchecked(node, error.brief)]
    versions = judge_support(report.vllm, report.ray)
    doubtful = [finding for finding in versions if finding.status in ("warn", "fail")]
    doubtful += [_doubt(text) for text in report.warnings]
    if not report.mistakes:
        passes = passed("", f"vLLM {report.vllm}: {what}")
        return [*doubtful, _unchecked(node, report.error) if report.error else passes]
    hints = [
        *(f"`{name}`: did you mean `{known}`?" for name, known in report.similar.items()),
        *(finding.text for finding in doubtful if finding.status == "warn"),
        f"list vLLM's arguments: `vlaunch exec -n {node.name} -- vllm serve --help=all`",
    ]
    lines = [line for text in report.mistakes for line in text.splitlines()]
    rejected = failed(
        "",
        f"vLLM {report.vllm} rejects the arguments; nothing was changed",
        evidence="\n".join(lines[:_MOST_LINES]),
        fix="\n".join(hints),
    )
    return [*doubtful, rejected]


def _doubt(text: str) -> Finding:
    """Return a warning of the program, whose fix follows its last colon."""
    problem, _, fix = untrusted.single_line(text).rpartition(": ")
    return warned("", problem, fix=fix)


def _unchecked(node: Node, reason: str) -> Finding:
    text = f"the arguments were not checked: {untrusted.single_line(reason)}"
    return warned(node, text, fix=f"try `vlaunch exec -n {node.name} -- vllm serve --help`")


def _parse_report(answer: Answer) -> _Report:
    lines = [
        line for line in answer.out.splitlines() if line.startswith(_MARK) and len(line) <= _LONGEST
    ]
    if lines:
        return decode.parse_json(_Report, lines[-1], "the report")
    reason = f"exit code {answer.code}"
    if answer.timed_out or answer.code in (124, 137):
        reason = f"no result within {_DEADLINE:.0f}s"
    raise UnreadableAnswer(reason, evidence=answer.tail)
