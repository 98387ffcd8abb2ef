"""Which nodes, which server and which model a command means: what is named, or all nodes, the only
server and the inventory's model.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from launcher.agent.desired import Desired
from launcher.app.session import Session
from launcher.core.domain import Inventory, Node, fold
from launcher.core.errors import NodeError, RequestError, UnreadableAnswer, together
from launcher.tools import servers
from launcher.tools.ray_judges import read_payload
from launcher.tools.servers import Kept


def chosen(inventory: Inventory, names: Sequence[str]) -> tuple[Node, ...]:
    """Return the named nodes in inventory order, all when none is named; raises RequestError for a
    name that is not one.
    """
    known = [node.name for node in inventory.nodes]
    unknown = [name for name in names if name not in known]
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        raise RequestError(
            f"no node `{unknown[0]}` in {inventory.path.name}",
            evidence=f"nodes: {fold(known)}",
            hint=f"did you mean `{near[0]}`?" if near else "",
        )
    return tuple(node for node in inventory.nodes if not names or node.name in names)


def chosen_model(named: str | None, inventory: Inventory) -> str:
    """Return the named model, else the inventory's; raises RequestError when there is neither."""
    found = named or inventory.serve.model
    if found is None:
        raise RequestError(
            "no model is named", hint="add `--model MODEL`, or `serve: {model: …}` in the inventory"
        )
    return found


def kept(session: Session) -> Kept:
    """Ask the head for its servers; raises NodeError when it cannot say which there are."""
    (answer,) = session.transport.run([servers.ask(session.site)])
    try:
        return servers.read(read_payload(answer))
    except UnreadableAnswer as error:
        raise NodeError(
            session.inventory.head.name,
            "does not say which servers run",
            evidence=error.evidence or error.message,
            hint="run `vlaunch up`, which brings its container up to date",
        ) from None


def api(session: Session, found: Kept, name: str | None) -> tuple[Desired, Node]:
    """Return the server that is meant, as it is wanted, and the node that has its API, which is
    connected to; of several the first that answers, as the keeper says, and that is reached.

    Raises:
        RequestError: there is none, none of that name, or several and none was named; or it is
            being stopped.
        ConnectError: no such node can be reached.
    """
    server = servers.choose(found.running, name)
    wanted = server.desired
    if wanted is None:
        raise RequestError(f"{server.what} is being stopped", hint="look at `vlaunch status`")
    judged = server.observed.endpoints if server.observed else {}
    answer = [node for node, health in judged.items() if health.verdict in servers.GOOD]
    nodes = chosen(session.inventory, [each.node for each in wanted.apis])
    failed: list[NodeError] = []
    for node in sorted(nodes, key=lambda node: node.name not in answer):
        error = session.fleet.connect([node.name]).get(node.name)
        if error is None:
            return wanted, node
        failed.append(error)
    raise together(failed)
