"""Commands in containers that query the agents (HTTP, with the image's curl)."""

from collections.abc import Sequence
from urllib.parse import urlencode

from launcher.agent.desired import Policy
from launcher.agent.state import SOCKET
from launcher.core.domain import Argv, Ports, long_options

# Streams the reply to the request on the first line of standard input, which must stay open.
_ARCHIVE = "PYTHONPATH=/opt/vlaunch/agent.pyz"
CHAT = ("env", _ARCHIVE, "python3", "-m", "vlaunch_agent.agent.health.chat")
# seconds for a reply of the agent: on its own, and when it queries Ray or vLLM
_SHORT, _LONG = 15.0, 50.0


def nodes(ports: Ports, peers: tuple[str, ...]) -> Argv:
    """Query Ray's node table, and which of `peers` (`ip:port`) the head cannot reach."""
    return _curl_agent("nodes", _LONG, dashboard=ports.dashboard, peers=",".join(peers))


def port_open(ip: str, port: int) -> Argv:
    """Test whether a TCP port accepts a connection; faster than any Ray client."""
    program = f"import socket; socket.create_connection(({ip!r}, {port}), 3).close()"
    return ("python3", "-c", program)


def jobs(ports: Ports, peers: tuple[str, ...] = ()) -> Argv:
    """Query submitted jobs, Ray's nodes, actors and placement groups, the servers, and which
    `peers` (`ip:port`) are unreachable.
    """
    return _curl_agent("jobs", _LONG, dashboard=ports.dashboard, peers=",".join(peers))


def servers() -> Argv:
    """Query the specs and statuses of servers, and the connected agents."""
    return _curl_agent("servers", _SHORT)


def drain_servers(nodes: Sequence[str]) -> Argv:
    """Take servers on nodes out of the fronts' rotation, and wait for their requests."""
    timeout = Policy().drain + _SHORT
    return _curl_agent("drain", timeout, "--request", "POST", nodes=",".join(nodes))


def submit_job(ports: Ports) -> Argv:
    """Submit a batch job described on standard input."""
    return _curl_agent("submit", _LONG, "--data-binary", "@-", dashboard=ports.dashboard)


def stop_job(ports: Ports, job: str, grace: float) -> Argv:
    """Stop a job, with `grace` seconds to shut down."""
    query = {"dashboard": ports.dashboard, "job": job, "grace": f"{grace:g}"}
    return _curl_agent("stop", grace + _LONG, "--request", "POST", **query)


def log_tail(host: str, port: int, name: str, offset: int, patience: float) -> Argv:
    """Query a server's log on this node from byte `offset` on, waiting up to `patience` seconds for
    new lines; on the head also the reply of `servers`.
    """
    query = {"name": name, "offset": offset, "patience": f"{patience:g}"}
    return _curl_agent("watch", _LONG, api=address(host, port), **query)


def address(host: str, port: int) -> str:
    """Format an API's address for queries."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def metrics(apis: Sequence[str], timeout: float) -> Argv:
    """Query the metrics of APIs (`host:port`) on a node; on the head also the servers."""
    return _curl_agent("counts", timeout + _SHORT, apis=",".join(apis), timeout=f"{timeout:g}")


def run_agent(
    command: Argv,
    *,
    node: str,
    head: str,
    port: int,
    metrics: int,
    lead: bool,
    private_shm: bool,
) -> Argv:
    """Run the agent as the init process of a node's container, with `command` (Ray, if any).

    The head's agent (`lead`) listens on `head`:`port` for the others, and serves its metrics at
    `head`:`metrics`. With `private_shm`, /dev/shm belongs to the container alone.
    """
    common = long_options(node=node, head=head, port=port)
    lead_options = ("--lead", *long_options(metrics_port=metrics)) if lead else ()
    shm_options = ("--private-shm",) if private_shm else ()
    return ("agent", *common, *lead_options, *shm_options, *(("--", *command) if command else ()))


def _curl_agent(path: str, timeout: float, /, *curl_options: str, **query: object) -> Argv:
    """Request a path from the agent of a container; `timeout` is in seconds."""
    parameters = urlencode({name: value for name, value in query.items() if value != ""}, safe=":,")
    return (
        *("curl", "-sS", "--fail-with-body", "--max-time", f"{timeout:g}"),
        *(
            *curl_options,
            "--unix-socket",
            SOCKET,
            f"http://agent/{path}{'?' if parameters else ''}{parameters}",
        ),
    )
