"""Node programs of the `vlaunch model` commands: requests to all nodes, and their answers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from launcher.app.session import Session
from launcher.core.domain import Answer, Argv, Inventory, Node, fold
from launcher.core.errors import NodeError, RequestError, UnreadableAnswer, combine_errors
from launcher.core.transport import Command
from launcher.distribute import chain, members
from launcher.distribute.chain import NodeModels, ProgramRuntime
from launcher.tools.host import node_probes
from launcher.tools.site import Site

T = TypeVar("T")

_SCAN_TIMEOUT = 120.0  # seconds


def check_path(inventory: Inventory, model: str) -> None:
    """Raise RequestError for a path outside the containers' mounts."""
    if not chain.is_path(model):
        return
    folders = {node.hf_home for node in inventory.nodes}
    folders |= {mount.target for mount in inventory.mounts}
    if any(model.startswith(f"{folder.rstrip('/')}/") for folder in folders):
        return
    raise RequestError(
        f"{model} is outside every path mounted into the containers of {inventory.cluster}",
        evidence=f"mounted: {', '.join(sorted(folders))}",
        hint=f"add it to {inventory.path.name}: `mounts: [{{source: FOLDER, target: FOLDER}}]`,"
        " or use a path below one of these",
    )


class NodePrograms:
    """The program of each reached node. It runs in a temporary container of the cluster's image,
    so that files get the containers' owner; without the image, in the node's own Python.
    """

    def __init__(self, session: Session, nodes: Sequence[Node] | None = None) -> None:
        self.session = session
        self.nodes = session.reached if nodes is None else session.reached_of(nodes)
        inventory = session.inventory
        commands = node_probes.probe_commands(inventory, [inventory.image], self.nodes)
        facts, failed = node_probes.parse_answers(session.transport.run(commands))
        if failed:
            raise combine_errors(list(failed.values()))
        self.site = Site(inventory, facts)
        self._runtimes = {node.name: self._choose_runtime(node) for node in self.nodes}

    def _choose_runtime(self, node: Node) -> ProgramRuntime:
        inventory = self.session.inventory
        if self.site.image(node, inventory.image) is not None:
            return chain.image_runtime(inventory, node)
        return chain.node_runtime(inventory)

    def runtime(self, node: Node) -> ProgramRuntime:
        """Return the runtime of a node's program."""
        return self._runtimes[node.name]

    def command(
        self,
        node: Node,
        request: Mapping[str, Any],
        *,
        timeout: float = math.inf,
        preamble: Argv = (),
        interactive: bool = False,
    ) -> Command:
        """Return the command that starts a node's program."""
        return members.program_command(
            node.name,
            self.runtime(node),
            request,
            timeout=timeout,
            preamble=preamble,
            interactive=interactive,
        )

    def run_all(
        self,
        request: Callable[[Node], Mapping[str, Any]],
        parse: Callable[[Answer], T],
        *,
        nodes: Sequence[Node] | None = None,
        timeout: float = _SCAN_TIMEOUT,
        preambles: Mapping[str, Argv] | None = None,
    ) -> dict[str, T]:
        """Run each node's program, and parse the answers; raises one NodeError for all failures."""
        commands = [
            self.command(
                node, request(node), timeout=timeout, preamble=(preambles or {}).get(node.name, ())
            )
            for node in (self.nodes if nodes is None else nodes)
        ]
        results: dict[str, T] = {}
        errors: list[NodeError] = []
        for answer in self.session.transport.run(commands):
            try:
                results[answer.node] = parse(answer)
            except UnreadableAnswer as error:
                errors.append(self._node_error(answer, error))
        if errors:
            raise combine_errors(errors)
        return {node.name: results[node.name] for node in self.nodes if node.name in results}

    def scan_models(self, model: str = "", *, files: bool = False) -> dict[str, NodeModels]:
        """Query every node for one model or for all; `model` may be a path in the containers."""
        stores = self.run_all(
            lambda node: chain.scan_request(self.runtime(node), node, model=model, files=files),
            chain.parse_models,
        )
        return {name: _restore_name(store, model) for name, store in stores.items()}

    def _node_error(self, answer: Answer, error: UnreadableAnswer) -> NodeError:
        node = self.session.inventory.node(answer.node)
        text = error.message.removeprefix(f"{answer.node} ")
        evidence = error.evidence or answer.tail
        hint = ""
        if answer.code == 127 and self.runtime(node).argv[:1] == ("python3",):
            hint = "run `vlaunch up`: the node has neither Python nor the cluster's image yet"
        return NodeError(answer.node, text, evidence=evidence, hint=hint)


def _restore_name(store: NodeModels, model: str) -> NodeModels:
    """Give a folder its path in the containers: a program without a container sees another one."""
    if not chain.is_path(model):
        return store
    return replace(store, models=tuple(replace(entry, name=model) for entry in store.models))


def warn_unreachable(session: Session) -> None:
    """Warn about unreachable nodes, whose models are unknown."""
    if session.missing:
        names = [node.name for node in session.inventory.nodes if node.name in session.missing]
        session.warn("model", f"{fold(names)} cannot be reached: models unknown")
