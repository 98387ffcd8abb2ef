"""Commands for the agents (HTTP, with the image's curl) and for the small programs that containers
mount under /opt/vlaunch, and the text of programs that are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlencode

from launcher.agent.state import SOCKET
from launcher.core.domain import Argv, Ports, options

_FOLDER = Path(__file__).parents[1] / "hosts" / "node"
# Streams the answer to the request on the first line of standard input, which must stay open
# meanwhile.
CHAT = ("env", "PYTHONPATH=/opt/vlaunch/agent.pyz", "python3", "-m", "vlaunch_agent.chat")
# seconds for an answer of the agent: of its own, and of what it asks Ray and vLLM for
_SHORT, _LONG = 15.0, 50.0


def source(name: str) -> str:
    """Return the program `launcher/hosts/node/NAME.py` as text, for `python3 -c`."""
    return (_FOLDER / f"{name}.py").read_text(encoding="utf-8")


def nodes(ports: Ports, peers: tuple[str, ...]) -> Argv:
    """Ask for Ray's node table, and which of `peers` (`ip:port`) the head cannot open."""
    return _ask("nodes", _LONG, dashboard=ports.dashboard, peers=",".join(peers))


def port_open(ip: str, port: int) -> Argv:
    """End with 0 exactly when a TCP port accepts a connection; cheaper than any client of Ray's."""
    program = f"import socket; socket.create_connection(({ip!r}, {port}), 3).close()"
    return ("python3", "-c", program)


def jobs(ports: Ports, peers: tuple[str, ...] = ()) -> Argv:
    """Ask for submitted jobs, Ray's nodes, actors and placement groups, the servers, and which
    `peers` (`ip:port`) are closed.
    """
    return _ask("jobs", _LONG, dashboard=ports.dashboard, peers=",".join(peers))


def servers() -> Argv:
    """Ask for the specs and statuses of servers, and which nodes' agents are connected."""
    return _ask("servers", _SHORT)


def submit(ports: Ports) -> Argv:
    """Submit a batch job described on standard input."""
    return _ask("submit", _LONG, "--data-binary", "@-", dashboard=ports.dashboard)


def stop(ports: Ports, job: str, grace: float) -> Argv:
    """Stop a job, politely for `grace` seconds."""
    query = {"dashboard": ports.dashboard, "job": job, "grace": f"{grace:g}"}
    return _ask("stop", grace + _LONG, "--request", "POST", **query)


def watch(host: str, port: int, name: str, offset: int, patience: float) -> Argv:
    """Ask what a server's log on this node gained since `offset` bytes, if need be after so many
    seconds; on the head also what `servers` says.
    """
    since = {"name": name, "offset": offset, "patience": f"{patience:g}"}
    return _ask("watch", _LONG, api=address(host, port), **since)


def address(host: str, port: int) -> str:
    """Return an API's address as queries name it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def metrics(apis: Sequence[str], timeout: float) -> Argv:
    """Ask what each API (`host:port`) on a node counts, and on the head for what `servers` says."""
    return _ask("counts", timeout + _SHORT, apis=",".join(apis), timeout=f"{timeout:g}")


def agent(
    command: Argv,
    *,
    node: str,
    head: str,
    port: int,
    metrics: int,
    lead: bool,
    private_shm: bool,
) -> Argv:
    """Be the first process of a node's container, and start `command` (Ray, or nothing) beside the
    servers' processes.

    The head's agent (`lead`) listens on `head`:`port` for the others, and serves its metrics at
    `head`:`metrics`. With `private_shm` nobody else uses /dev/shm.
    """
    where = options(node=node, head=head, port=port)
    own = ("--lead", *options(metrics_port=metrics)) if lead else ()
    shm = ("--private-shm",) if private_shm else ()
    return ("agent", *where, *own, *shm, *(("--", *command) if command else ()))


def _ask(path: str, patience: float, /, *curl: str, **query: object) -> Argv:
    """Ask the agent of a container for a path, for so many seconds, with options of curl's."""
    words = urlencode({name: value for name, value in query.items() if value != ""}, safe=":,")
    return (
        *("curl", "-sS", "--fail-with-body", "--max-time", f"{patience:g}"),
        *(*curl, "--unix-socket", SOCKET, f"http://agent/{path}{'?' if words else ''}{words}"),
    )
