"""Node programs of the commands about models: requests to all nodes, and their answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from launcher.app.session import Session
from launcher.core.domain import Answer, Argv, Inventory, Node, fold
from launcher.core.errors import NodeError, RequestError, UnreadableAnswer, together
from launcher.core.transport import Command
from launcher.distribute import chain, members
from launcher.distribute.chain import Seen, Where
from launcher.tools import observe
from launcher.tools.site import Site

T = TypeVar("T")

_LOOK = 120.0  # seconds


def check_path(inventory: Inventory, model: str) -> None:
    """Raise RequestError for a path that containers would not see."""
    if not chain.is_path(model):
        return
    known = {node.hf_home for node in inventory.nodes} | {each.target for each in inventory.mounts}
    if any(model.startswith(f"{each.rstrip('/')}/") for each in known):
        return
    raise RequestError(
        f"{model} lies in no folder that the containers of {inventory.cluster} see",
        evidence=f"they see {', '.join(sorted(known))}",
        hint=f"add it to {inventory.path.name}: `mounts: [{{source: FOLDER, target: FOLDER}}]`, or"
        " name a path below one of these",
    )


class Programs:
    """The program of each reached node. It runs in a throw-away container of the cluster's image,
    so that files get the owner that containers have; without the image, in the node's own Python.
    """

    def __init__(self, session: Session, nodes: Sequence[Node] | None = None) -> None:
        self.session = session
        self.nodes = session.reached if nodes is None else session.reached_of(nodes)
        inventory = session.inventory
        asked = observe.commands(inventory, [inventory.image], self.nodes)
        facts, failed = observe.read(session.transport.run(asked))
        if failed:
            raise together(list(failed.values()))
        self.site = Site(inventory, facts)
        self._where = {node.name: self._choose(node) for node in self.nodes}

    def _choose(self, node: Node) -> Where:
        inventory = self.session.inventory
        if self.site.image(node, inventory.image) is not None:
            return chain.in_image(inventory, node)
        return chain.on_node(inventory)

    def where(self, node: Node) -> Where:
        """Return where a node's program runs."""
        return self._where[node.name]

    def command(
        self,
        node: Node,
        request: Mapping[str, Any],
        *,
        timeout: float = math.inf,
        before: Argv = (),
        talk: bool = False,
    ) -> Command:
        """Return the command that starts a node's program."""
        return members.command(
            node.name, self.where(node), request, timeout=timeout, before=before, talk=talk
        )

    def ask(
        self,
        request: Callable[[Node], Mapping[str, Any]],
        read: Callable[[Answer], T],
        *,
        nodes: Sequence[Node] | None = None,
        timeout: float = _LOOK,
        before: Mapping[str, Argv] | None = None,
    ) -> dict[str, T]:
        """Run the program of each node to its end; raises NodeError, every node's story told."""
        asked = [
            self.command(
                node, request(node), timeout=timeout, before=(before or {}).get(node.name, ())
            )
            for node in (self.nodes if nodes is None else nodes)
        ]
        found: dict[str, T] = {}
        failed: list[NodeError] = []
        for answer in self.session.transport.run(asked):
            try:
                found[answer.node] = read(answer)
            except UnreadableAnswer as error:
                failed.append(self._cannot(answer, error))
        if failed:
            raise together(failed)
        return {node.name: found[node.name] for node in self.nodes if node.name in found}

    def look(self, model: str = "", *, files: bool = False) -> dict[str, Seen]:
        """Ask every node for one model, or for all; paths are those that containers see."""
        seen = self.ask(
            lambda node: chain.look(self.where(node), node, model=model, files=files),
            chain.parse_look,
        )
        return {name: _named(each, model) for name, each in seen.items()}

    def _cannot(self, answer: Answer, error: UnreadableAnswer) -> NodeError:
        node = self.session.inventory.node(answer.node)
        text = error.message.removeprefix(f"{answer.node} ")
        evidence = error.evidence or answer.tail
        hint = ""
        if answer.code == 127 and self.where(node).argv[:1] == ("python3",):
            hint = "there is neither Python nor the cluster's image yet: run `vlaunch up`"
        return NodeError(answer.node, text, evidence=evidence, hint=hint)


def _named(seen: Seen, model: str) -> Seen:
    """Call a folder as it was asked for: a program without a container sees it elsewhere."""
    if not chain.is_path(model):
        return seen
    return replace(seen, models=tuple(replace(each, name=model) for each in seen.models))


def missing_told(session: Session) -> None:
    """Warn of nodes that could not be asked: what could not be asked is not known."""
    if session.missing:
        names = [node.name for node in session.inventory.nodes if node.name in session.missing]
        session.warn("model", f"{fold(names)} cannot be reached: what is there is not known")
