"""Knowledge of a cluster. `Site`: its inventory, combined with the facts about its nodes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from launcher.core.domain import Argv, Inventory, Node
from launcher.core.transport import Command
from launcher.tools import docker
from launcher.tools.host import HostFacts


@dataclass(frozen=True, slots=True)
class Site:
    """Inventory and facts; `facts` has only probed nodes, and defaults are assumed for others."""

    inventory: Inventory
    facts: Mapping[str, HostFacts] = field(default_factory=dict)

    @property
    def head(self) -> Node:
        """Node whose container receives all queries that do not concern a single node."""
        return self.inventory.head

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, in inventory order."""
        return self.inventory.nodes

    @property
    def observed_nodes(self) -> tuple[Node, ...]:
        """Probed nodes, in inventory order."""
        return tuple(node for node in self.nodes if node.name in self.facts)

    @property
    def head_runs(self) -> bool:
        """True when the head's container runs and can be queried."""
        return self.running_container(self.head) is not None

    def facts_of(self, node: Node) -> HostFacts | None:
        """Return the facts of a node; `None` if it was not probed."""
        return self.facts.get(node.name)

    def container_name(self, node: Node) -> str:
        """Return the name of a node's container."""
        return f"vlaunch-{self.inventory.cluster}-{node.name}"

    def container(self, node: Node) -> docker.Container | None:
        """Return a node's container, running or not; `None` if there is none."""
        facts = self.facts_of(node)
        return facts.container(self.container_name(node)) if facts is not None else None

    def running_container(self, node: Node) -> docker.Container | None:
        """Return a node's container if it runs."""
        container = self.container(node)
        return container if container is not None and container.running else None

    def image(self, node: Node, name: str) -> docker.Image | None:
        """Return an image on a node; `None` if unknown."""
        facts = self.facts_of(node)
        return facts.images.get(name) if facts is not None else None

    def state_dir(self, node: Node) -> str:
        """Return the cluster's state directory on a node, in a default home without a probe."""
        return f"{self._of_all_clusters(node)}/{self.inventory.cluster}"

    def cache_dir(self, node: Node) -> str:
        """Return the directory of the cluster's compile caches on a node."""
        base = node.cache_dir or f"{self._of_all_clusters(node)}/cache"
        return f"{base}/{self.inventory.cluster}"

    def _of_all_clusters(self, node: Node) -> str:
        facts = self.facts_of(node)
        if facts is not None and facts.state_base:
            return facts.state_base
        assumed = "/root" if node.ssh.user in (None, "root") else f"/home/{node.ssh.user}"
        home = facts.home if facts is not None else assumed
        return node.state_dir or f"{home}/.vlaunch"

    def in_container(
        self,
        node: Node,
        argv: Argv,
        *,
        timeout: float = 60.0,
        stdin: Callable[[], bytes] | None = None,
        shown_stdin: str = "",
    ) -> Command:
        """Return a command in a node's container; `timeout` is in seconds."""
        name = self.container_name(node)
        return Command(
            node=node.name,
            argv=docker.exec_(node.docker, name, *argv, stdin=stdin is not None),
            timeout=timeout,
            stdin=stdin,
            shown_stdin=shown_stdin,
        )
