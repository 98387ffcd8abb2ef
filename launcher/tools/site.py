"""An inventory and what was seen of its nodes, as one value: what most decisions ask first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from launcher.core.domain import Argv, Inventory, Node
from launcher.core.transport import Command
from launcher.tools import docker
from launcher.tools.host import HostFacts


@dataclass(frozen=True, slots=True)
class Site:
    """An inventory and what was seen of its nodes.

    `facts` has only the nodes that were looked at; without any, what can be is assumed.
    """

    inventory: Inventory
    facts: Mapping[str, HostFacts] = field(default_factory=dict)

    @property
    def head(self) -> Node:
        """The node whose container is asked and told everything but what concerns one node."""
        return self.inventory.head

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, in inventory order."""
        return self.inventory.nodes

    @property
    def seen(self) -> tuple[Node, ...]:
        """The nodes that were looked at, in inventory order."""
        return tuple(node for node in self.nodes if node.name in self.facts)

    @property
    def head_runs(self) -> bool:
        """True when the head's container runs, so that it can be asked."""
        return self.running(self.head) is not None

    def facts_of(self, node: Node) -> HostFacts | None:
        """Return what was seen of a node; `None` where nobody looked."""
        return self.facts.get(node.name)

    def container_name(self, node: Node) -> str:
        """Return the name of a node's container."""
        return f"vlaunch-{self.inventory.cluster}-{node.name}"

    def container(self, node: Node) -> docker.Container | None:
        """Return a node's container, whether it runs or not; `None` where none was seen."""
        facts = self.facts_of(node)
        return facts.container(self.container_name(node)) if facts is not None else None

    def running(self, node: Node) -> docker.Container | None:
        """Return a node's container if it runs."""
        there = self.container(node)
        return there if there is not None and there.running else None

    def image(self, node: Node, name: str) -> docker.Image | None:
        """Return an image of a node; `None` where it was not seen."""
        facts = self.facts_of(node)
        return facts.images.get(name) if facts is not None else None

    def state_dir(self, node: Node) -> str:
        """Return the directory on a node that holds the cluster's small files; the home is assumed
        when nobody was asked.
        """
        return f"{self._of_all_clusters(node)}/{self.inventory.cluster}"

    def cache_dir(self, node: Node) -> str:
        """Return the directory on a node that holds what the cluster's engines compile there."""
        base = node.cache_dir or f"{self._of_all_clusters(node)}/cache"
        return f"{base}/{self.inventory.cluster}"

    def _of_all_clusters(self, node: Node) -> str:
        facts = self.facts_of(node)
        assumed = "/root" if node.ssh.user in (None, "root") else f"/home/{node.ssh.user}"
        home = facts.home if facts is not None else assumed
        return node.state_dir or f"{home}/.vlaunch"

    def inside(
        self,
        node: Node,
        argv: Argv,
        *,
        timeout: float = 60.0,
        stdin: Callable[[], bytes] | None = None,
        shown_stdin: str = "",
    ) -> Command:
        """Run something in a node's container; `timeout` is in seconds."""
        name = self.container_name(node)
        return Command(
            node=node.name,
            argv=docker.exec_(node.docker, name, *argv, stdin=stdin is not None),
            timeout=timeout,
            stdin=stdin,
            shown_stdin=shown_stdin,
        )
