"""What is asked of nodes before anything is decided: one command a node, and how all the answers become facts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from launcher.errors import ConnectError, NodeError, UnreadableAnswer
from launcher.model import Answer, Inventory, Node
from launcher.tools import host
from launcher.transport import Command, Transport


def commands(inventory: Inventory, images: Sequence[str], nodes: Sequence[Node] | None = None) -> list[Command]:
    """Return the probe of each node; `images` are looked at besides the containers of the cluster."""
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
            ),
            timeout=60,
        )
        for node in (inventory.nodes if nodes is None else nodes)
    ]


def read(answers: Iterable[Answer]) -> dict[str, host.HostFacts]:
    """Read all answers; raises NodeError for the first node that gave none that can be read."""
    facts = {}
    for answer in answers:
        if answer.timed_out:
            raise NodeError(answer.node, f"did not tell its state within {answer.seconds:.0f}s", evidence=answer.tail,
                            hint=f"see what hangs there: `ssh {answer.node} ps -ef`")  # fmt: skip
        if answer.code == 255:
            raise ConnectError(answer.node, "connection lost", evidence=answer.tail, hint="run the same command again")
        try:
            facts[answer.node] = host.parse_probe(answer.out)
        except UnreadableAnswer as error:
            raise NodeError(answer.node, error.message, evidence=error.evidence or answer.tail) from None
    return facts


def observe(inventory: Inventory, transport: Transport, images: Sequence[str]) -> dict[str, host.HostFacts]:
    """Ask every node and read the answers."""
    return read(transport.run(commands(inventory, images)))
