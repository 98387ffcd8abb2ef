"""What is asked of nodes before anything is decided: one command a node, and how all the answers
become facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from launcher.core import redaction
from launcher.core.domain import Answer, Inventory, Node
from launcher.core.errors import ConnectError, NodeError, UnreadableAnswer, together
from launcher.core.transport import Command, Transport
from launcher.tools import compile_cache, host, host_read

# The survey has twice as many parts, each with a deadline of its own.
_TIMEOUT, _SURVEY_TIMEOUT = 120.0, 240.0
_LOOKED_UP = 32  # nodes whose names every node looks up, all of them at once


def commands(
    inventory: Inventory,
    images: Sequence[str],
    nodes: Sequence[Node] | None = None,
    *,
    survey: bool = False,
    clock: Callable[[], float] | None = None,
    compiled: bool = False,
    models: bool = False,
) -> list[Command]:
    """Return the probe of each node; `images` are looked at besides the containers of the cluster,
    with `compiled`, how large what engines compiled there is, and, with `models`, which of them
    are not finished.

    With `survey` each node also tells what it is made of; `clock` gives seconds since 1970 and is
    read when a command is sent, so that the node's answer says how far its own clock is off.
    """
    addresses = tuple(node.ip for node in inventory.nodes[:_LOOKED_UP]) if survey else ()
    stdin = None if clock is None or not survey else _told(clock)
    return [
        Command(
            node=node.name,
            argv=host.probe(
                node.docker,
                cluster=inventory.cluster,
                state_dir=node.state_dir or "",
                hf_home=node.hf_home,
                accelerator=inventory.accelerator,
                images=tuple(dict.fromkeys(images)),
                addresses=addresses,
                survey=survey,
                more=(
                    (compile_cache.script(node.cache_dir, inventory.cluster) if compiled else "")
                    + (host.unfinished_script(node.hf_home) if models else "")
                ),
            ),
            timeout=_SURVEY_TIMEOUT if survey else _TIMEOUT,
            stdin=stdin,
            shown_stdin="date +%s.%N" if stdin else "",
        )
        for node in (inventory.nodes if nodes is None else nodes)
    ]


def _told(clock: Callable[[], float]) -> Callable[[], bytes]:
    def line() -> bytes:
        return f"{clock():.6f}\n".encode()

    return line


def read(answers: Iterable[Answer]) -> tuple[dict[str, host.HostFacts], dict[str, NodeError]]:
    """Read all answers: the facts of each node, or why there are none."""
    facts: dict[str, host.HostFacts] = {}
    failed: dict[str, NodeError] = {}
    for answer in answers:
        try:
            facts[answer.node] = _facts(answer)
        except NodeError as error:
            failed[answer.node] = error
    return facts, failed


def _facts(answer: Answer) -> host.HostFacts:
    node = answer.node
    # The end of an answer that was cut off may be the part with the Ray token, which nobody has
    # learned yet.
    tail = replace(answer, out=host_read.shown(answer.out)).tail
    if answer.timed_out:
        raise NodeError(
            node,
            f"did not tell its state within {answer.seconds:.0f}s",
            evidence=tail,
            hint=f"see what hangs there: `ssh {node} ps -ef`",
        )
    if answer.code == 255:
        raise ConnectError(
            node, "connection lost", evidence=tail, hint="run the same command again"
        )
    try:
        facts = host_read.parse_probe(answer.out)
    except UnreadableAnswer as error:
        raise NodeError(node, error.message, evidence=error.evidence or tail) from None
    redaction.learn(facts.token)
    return facts


def observe(
    inventory: Inventory,
    transport: Transport,
    images: Sequence[str],
    *,
    survey: bool = False,
    clock: Callable[[], float] | None = None,
) -> dict[str, host.HostFacts]:
    """Ask every node and read the answers; raises NodeError when one gave none, every node's story
    told.
    """
    facts, failed = read(transport.run(commands(inventory, images, survey=survey, clock=clock)))
    if failed:
        raise together(list(failed.values()))
    return facts
