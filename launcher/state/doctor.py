"""What is asked of nodes after a failure, one command a node, and how their answers become what
each told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.model import Answer, Node
from launcher.tools import diagnosis, untrusted
from launcher.tools.diagnosis_read import Told, read
from launcher.transport import Command

_TIMEOUT = 240.0  # each part of the answer has a deadline of its own


def query(
    cluster: str, nodes: Sequence[Node], mark: str, since: float | None = None
) -> list[Command]:
    """Return the question to each node; `mark` must be new, and `since` is how many seconds back
    its containers' logs go.
    """
    return [
        Command(
            node=node.name,
            argv=diagnosis.ask(
                node.docker,
                mark=mark,
                cluster=cluster,
                state_dir=node.state_dir or "",
                hf_home=node.hf_home,
                since=since,
            ),
            timeout=_TIMEOUT,
        )
        for node in nodes
    ]


def parse(answers: Iterable[Answer], mark: str) -> tuple[dict[str, Told], dict[str, str]]:
    """Read all answers: what each node told, and why one told nothing."""
    told: dict[str, Told] = {}
    silent: dict[str, str] = {}
    for answer in answers:
        said = read(answer.out, mark)
        if said.clock is None and not said.lines and not said.states:
            late = (
                f"no answer within {answer.seconds:.0f} s"
                if answer.timed_out
                else "it answered something else"
            )
            silent[answer.node] = f"{late}: {untrusted.shown(answer.tail, last=True)}".strip(": ")
        else:
            told[answer.node] = said
    return told, silent
