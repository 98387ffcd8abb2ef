"""The gates of `up`: their queries, deadlines and evidence.

`launcher/hosts/checks` and `launcher/tools` judge the answers.
"""

from collections.abc import Mapping, Sequence

from launcher.core.check import Finding, failed, passed, waiting, warned
from launcher.core.domain import Node
from launcher.core.errors import UnreadableAnswer
from launcher.core.plan import Gate, precomputed_gate
from launcher.core.sizes import format_count
from launcher.core.transport import Answers, Command
from launcher.hosts.checks import container
from launcher.tools import agent_queries, docker
from launcher.tools.host import HostFacts
from launcher.tools.site import Site, servers, serving_judges
from launcher.tools.site import ray_judges as ray_checks

_VERSIONS = (
    "import json, platform; from importlib.metadata import version; "
    'print(json.dumps({"ray": version("ray"), "python": platform.python_version()}))'
)


def memory_gate(site: Site) -> Gate:
    """Check for a place for secrets that is on no disk and survives a logout."""
    return precomputed_gate(
        "secrets-in-memory",
        "every node has an in-memory folder for secrets",
        lambda: [_judge_memory(node, site.facts[node.name]) for node in site.nodes],
    )


def _judge_memory(node: Node, facts: HostFacts) -> Finding:
    if facts.memory_dir:
        return passed(node, f"secrets are stored in {facts.memory_dir}")
    fix = (
        f"run `sudo loginctl enable-linger {facts.user}` on {node.name}, log in as root, or set"
        " `secrets_in: disk`"
    )
    evidence = facts.part_errors.get("memory", "")
    return failed(node, "has no in-memory folder for secrets", evidence=evidence, fix=fix)


def versions_gate(
    cluster: str, nodes: Sequence[Node], tag: str, ray_version: str, python_version: str
) -> Gate:
    """Check for the exact Ray and Python versions in the image, on nodes where it is new."""

    def ask(node: Node) -> Command:
        argv = docker.run_python(node.docker, tag, _VERSIONS, cluster=cluster, node=node.name)
        return Command(node=node.name, argv=argv, timeout=120)

    return Gate(
        id="ray-version",
        what="all nodes' images run the same Ray and Python",
        queries=tuple(ask(node) for node in nodes),
        judge=container.judge_versions(nodes, ray_version, python_version),
    )


def gpus_gate(cluster: str, nodes: Sequence[Node], image: str) -> Gate:
    """Check that Docker exposes the GPUs and CUDA starts, in the image itself."""

    def ask(node: Node) -> Command:
        argv = docker.list_gpus(node, image, cluster=cluster)
        return Command(node=node.name, argv=argv, timeout=120)

    return Gate(
        id="gpus-in-docker",
        what="Docker exposes the declared GPUs, and CUDA starts",
        queries=tuple(ask(node) for node in nodes),
        judge=container.judge_gpus(nodes),
    )


def head_gate(site: Site) -> Gate:
    """Check that the head's port answers (Ray's, else the agent's) before workers start."""
    node, off = site.head, site.inventory.ray.off
    ports = site.inventory.ports
    listens = agent_queries.port_open(node.ip, ports.group if off else ports.gcs)
    return Gate(
        id="head",
        what="the head's agent listens" if off else "the Ray head listens",
        queries=(_inspect_container(site, node), site.in_container(node, listens, timeout=20)),
        judge=ray_checks.judge_head(site.inventory),
        deadline=120,
        every=0.2,
        evidence=(_container_log(site, node),),
        explain=ray_checks.explain_logs,
    )


def drain_gate(site: Site, replaced: Sequence[Node]) -> Gate:
    """Wait until the requests in progress on some nodes' servers have ended; new ones wait in the
    front. Requests that take longer, and agents that cannot drain, stop nothing.
    """
    head = site.head

    def judge(answers: Answers) -> list[Finding]:
        try:
            requests = ray_checks.parse_payload(answers[head.name][-1]).get("requests")
        except UnreadableAnswer as error:
            text = f"requests in progress may fail: {error.message}"
        else:
            if not requests:
                return [passed(head, "no request is in progress")]
            text = f"requests that are still running, and will fail: {requests}"
        return [warned(head, text, fix="send failed requests again")]

    drain = agent_queries.drain_servers([node.name for node in replaced])
    return Gate(
        id="drain",
        what="the servers' requests have ended",
        queries=(site.in_container(head, drain, timeout=120),),
        judge=judge,
        progress_text="waiting for requests in progress",
    )


def agents_gate(site: Site, *, deadline: float) -> Gate:
    """Check that every node's agent is connected to the head's: servers need all of them."""
    node, port = site.head, site.inventory.ports.group

    def judge(answers: Answers) -> list[Finding]:
        try:
            state = servers.parse_servers(ray_checks.parse_payload(answers[node.name][-1]))
        except UnreadableAnswer as error:
            return [waiting(node, f"cannot list the connected agents: {error.message}")]
        return [_judge_agent(member, node, state.members, port) for member in site.nodes]

    return Gate(
        id="agents",
        what="all agents are connected to the head",
        queries=(servers.query_servers(site),),
        judge=judge,
        deadline=deadline,
        every=0.3,
        evidence=tuple(_container_log(site, member) for member in site.nodes),
        explain=ray_checks.explain_logs,
    )


def _judge_agent(node: Node, head: Node, members: Mapping[str, float], port: int) -> Finding:
    if members.get(node.name, serving_judges.SILENT) < serving_judges.SILENT:
        return passed(node, "its agent is connected to the head")
    fix = (
        f"allow TCP {port} from {node.name} to {head.name} ({head.ip}), then check `vlaunch logs"
        f" {node.name}`"
    )
    return waiting(node, "its agent is not connected to the head", fix=fix)


def cluster_gate(site: Site, restarts: Mapping[str, int], *, deadline: float, hold: float) -> Gate:
    """Check that exactly the declared nodes are in Ray, each under its address with its GPUs, for
    `hold` seconds.

    `restarts` is the restart count so far of unchanged containers, by node.
    """
    inventory = site.inventory
    peers = tuple(f"{member.ip}:{inventory.ports.node_manager}" for member in inventory.workers)
    node_table = site.in_container(site.head, agent_queries.nodes(inventory.ports, peers))
    return Gate(
        id="ray-nodes",
        what=(
            f"Ray has exactly {format_count(len(inventory.nodes), 'node')} with"
            f" {format_count(inventory.gpus, 'GPU')}"
        ),
        queries=(*(_inspect_container(site, member) for member in site.nodes), node_table),
        judge=ray_checks.judge_cluster(inventory, restarts),
        deadline=deadline,
        every=0.3,
        hold=hold,
        evidence=tuple(_container_log(site, member) for member in site.nodes),
        explain=ray_checks.explain_logs,
    )


def _inspect_container(site: Site, node: Node) -> Command:
    argv = docker.inspect(node.docker, site.container_name(node))
    return Command(node=node.name, argv=argv, timeout=20)


def _container_log(site: Site, node: Node) -> Command:
    argv = docker.logs(node.docker, site.container_name(node), tail=60)
    return Command(node=node.name, argv=argv, timeout=20)
