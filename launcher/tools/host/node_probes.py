"""Probes of all nodes, and the conversion of their output to facts."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from launcher.core import redaction
from launcher.core.domain import Answer, Inventory, Node
from launcher.core.errors import ConnectError, NodeError, UnreadableAnswer, combine_errors
from launcher.core.transport import Command, Transport
from launcher.tools import compile_cache, host
from launcher.tools.host import host_output

# The survey has twice as many parts, each with its own deadline.
_TIMEOUT, _SURVEY_TIMEOUT = 120.0, 240.0
_LOOKED_UP = 32  # nodes whose names every node looks up, in parallel


def probe_commands(
    inventory: Inventory,
    images: Sequence[str],
    nodes: Sequence[Node] | None = None,
    *,
    survey: bool = False,
    clock: Callable[[], float] | None = None,
    compiled: bool = False,
    models: bool = False,
) -> list[Command]:
    """Return the probe of each node, which includes `images`, with `compiled` the size of the
    compile cache, and with `models` the unfinished models.

    With `survey`, the probe includes hardware and configuration; `clock` returns seconds since 1970
    and is called when a command is sent, to measure the skew of the node's clock.
    """
    addresses = tuple(node.ip for node in inventory.nodes[:_LOOKED_UP]) if survey else ()
    stdin = None if clock is None or not survey else _clock_stdin(clock)
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
                extra_script=(
                    (
                        compile_cache.query_script(node.cache_dir, inventory.cluster)
                        if compiled
                        else ""
                    )
                    + (host.unfinished_script(node.hf_home) if models else "")
                ),
            ),
            timeout=_SURVEY_TIMEOUT if survey else _TIMEOUT,
            stdin=stdin,
            shown_stdin="date +%s.%N" if stdin else "",
        )
        for node in (inventory.nodes if nodes is None else nodes)
    ]


def _clock_stdin(clock: Callable[[], float]) -> Callable[[], bytes]:
    def line() -> bytes:
        return f"{clock():.6f}\n".encode()

    return line


def parse_answers(
    answers: Iterable[Answer],
) -> tuple[dict[str, host.HostFacts], dict[str, NodeError]]:
    """Parse all answers into facts or errors by node."""
    facts: dict[str, host.HostFacts] = {}
    failed: dict[str, NodeError] = {}
    for answer in answers:
        try:
            facts[answer.node] = _parse_facts(answer)
        except NodeError as error:
            failed[answer.node] = error
    return facts, failed


def _parse_facts(answer: Answer) -> host.HostFacts:
    node = answer.node
    # A truncated output may end with the Ray token, which is not redacted yet.
    tail = replace(answer, out=host_output.evidence_without_token(answer.out)).tail
    if answer.timed_out:
        raise NodeError(
            node,
            f"did not report its state within {answer.seconds:.0f}s",
            evidence=tail,
            hint=f"find what hangs: `ssh {node} ps -ef`",
        )
    if answer.code == 255:
        raise ConnectError(
            node, "connection lost", evidence=tail, hint="run the same command again"
        )
    try:
        facts = host_output.parse_probe(answer.out)
    except UnreadableAnswer as error:
        raise NodeError(node, error.message, evidence=error.evidence or tail) from None
    redaction.add_secrets(facts.token)
    return facts


def probe_nodes(
    inventory: Inventory,
    transport: Transport,
    images: Sequence[str],
    *,
    survey: bool = False,
    clock: Callable[[], float] | None = None,
) -> dict[str, host.HostFacts]:
    """Probe all nodes; raises NodeError with the errors of all nodes that failed."""
    facts, failed = parse_answers(
        transport.run(probe_commands(inventory, images, survey=survey, clock=clock))
    )
    if failed:
        raise combine_errors(list(failed.values()))
    return facts
