"""Selection of nodes, server and model for a command: the named ones, or all nodes, the only server
and the inventory's model.
"""

from collections.abc import Sequence

from launcher.agent.desired import Desired
from launcher.app.session import Session
from launcher.core.domain import Inventory, Node, fold
from launcher.core.errors import NodeError, RequestError, UnreadableAnswer, combine_errors
from launcher.core.similar import find_similar
from launcher.tools.site import servers
from launcher.tools.site.ray_judges import parse_payload
from launcher.tools.site.servers import ServersState


def select_nodes(inventory: Inventory, names: Sequence[str]) -> tuple[Node, ...]:
    """Return the named nodes in inventory order (none: all); raise RequestError if unknown."""
    names_of_nodes = [node.name for node in inventory.nodes]
    unknown = [name for name in names if name not in names_of_nodes]
    if unknown:
        similar = find_similar(unknown[0], names_of_nodes)
        raise RequestError(
            f"no node `{unknown[0]}` in {inventory.path.name}",
            evidence=f"nodes: {fold(names_of_nodes)}",
            hint=f"did you mean `{similar}`?" if similar else "",
        )
    return tuple(node for node in inventory.nodes if not names or node.name in names)


def select_model(named: str | None, inventory: Inventory) -> str:
    """Return the named model, else the inventory's; raise RequestError if there is neither."""
    model = named or inventory.serve.model
    if model is None:
        raise RequestError(
            "no model given", hint="add `--model MODEL`, or `serve: {model: …}` in the inventory"
        )
    return model


def query_servers(session: Session) -> ServersState:
    """Query the head for its servers; raise NodeError if it cannot list them."""
    (answer,) = session.transport.run([servers.query_servers(session.site)])
    try:
        return servers.parse_servers(parse_payload(answer))
    except UnreadableAnswer as error:
        raise NodeError(
            session.inventory.head.name,
            "cannot list its servers",
            evidence=error.evidence or error.message,
            hint="run `vlaunch up`, which starts its container",
        ) from None


def select_server(
    session: Session, head_state: ServersState, name: str | None, fronts: Sequence[Node] = ()
) -> tuple[Desired, Node]:
    """Return the selected server's spec, and a connected node: one of `fronts`, or with its API; of
    several, a healthy one that is reached.

    Raises:
        RequestError: there is none, none of that name, or several and none was named; or it is
            being stopped.
        ConnectError: no such node can be reached.
    """
    server = servers.choose_server(head_state.running, name)
    spec = server.desired
    if spec is None:
        problem = servers.OTHER_VERSION if server.unreadable else "it is being stopped"
        raise RequestError(f"{server.label}: {problem}", hint="see `vlaunch status`")
    endpoints = server.observed.endpoints if server.observed else {}
    healthy = [node for node, health in endpoints.items() if health.verdict in servers.GOOD]
    apis = [process.node for process in spec.apis]
    nodes = fronts or select_nodes(session.inventory, apis)
    failed: list[NodeError] = []
    for node in sorted(nodes, key=lambda node: node.name not in healthy):
        error = session.fleet.connect([node.name]).get(node.name)
        if error is None:
            return spec, node
        failed.append(error)
    raise combine_errors(failed)
