"""Update of the front after a change of the inventory or of the servers."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from ipaddress import ip_address

from launcher.app.session import Session
from launcher.core.domain import Inventory, Secret, fold
from launcher.core.errors import NodeError, UnreadableAnswer
from launcher.core.plan import Plan
from launcher.core.transport import run_by_node
from launcher.front import front_plan
from launcher.front.certificates import hide_key, make_self_signed
from launcher.front.configuration import FrontServer, front_servers
from launcher.front.front_plan import FrontFiles, FrontInputs, find_drift, front_container
from launcher.tools.host.node_probes import probe_nodes
from launcher.tools.site import Site, servers
from launcher.tools.site.ray_judges import parse_payload
from launcher.tools.site.servers import Server


def follow_servers(session: Session, *, verb: str) -> None:
    """Update a running front after a change of the servers; raises like `update_front`."""
    inventory = session.inventory
    if inventory.front is not None:
        nodes = tuple(n for n in inventory.nodes if n.head or n in inventory.front_nodes)
        facts = probe_nodes(replace(inventory, nodes=nodes), session.transport, [])
        update_front(session, Site(inventory, facts), verb=verb)


def update_front(
    session: Session,
    site: Site,
    *,
    verb: str,
    start: bool = False,
    dry_run: bool = False,
    certificate: Secret | None = None,
    server_key: Secret | None = None,
) -> Plan:
    """Bring the front in line with the inventory and the servers, and return the plan, which
    `dry_run` does not apply. Without `start`, only the configuration of a front that exists.

    `certificate` and `server_key` replace those on the nodes. Raises NodeError and GateError.
    """
    exists = any(front_container(site, node) for node in site.nodes)
    if not exists and (session.inventory.front is None or not start):
        return Plan(verb=verb, stages=())
    if not start and any(find_drift(site, node) for node in site.nodes):
        session.warn("front", "the front differs from the inventory: run `vlaunch up`")
        return Plan(verb=verb, stages=())
    files = read_files(session, site)
    if certificate is None and front_plan.needs_certificate(session.inventory, files):
        certificate = _self_signed(session, site, files, dry_run=dry_run)
    inputs = FrontInputs(
        servers=_query_servers(session, site, dry_run=dry_run),
        files=files,
        certificate=certificate,
        server_key=server_key,
    )
    plan = front_plan.plan_front(site, inputs, verb=verb, start=start)
    if not dry_run and plan.stages:
        for note in plan.notes:
            session.note("front", note)
        session.apply(plan)
    return plan


def read_files(session: Session, site: Site) -> dict[str, FrontFiles]:
    """Read the front's files by node; raises NodeError unless all nodes could be read."""
    answers = run_by_node(session.transport, front_plan.query_files(site))
    if failed := [items[0] for items in answers.values() if not items[0].ok]:
        names = fold([answer.node for answer in failed])
        raise NodeError(names, "cannot read the front's files", evidence=failed[0].tail)
    nodes = [node.name for node in session.inventory.front_nodes]
    return {node: front_plan.parse_files(answers[node]) for node in nodes}


def _self_signed(
    session: Session, site: Site, files: Mapping[str, FrontFiles], *, dry_run: bool
) -> Secret:
    """Return the certificate of a node that has a valid one, else a new one."""
    if source := front_plan.certificate_source(session.inventory, files):
        (answer,) = session.transport.run([front_plan.read_certificate(site, source)])
        if not answer.ok:
            text = "cannot read the front's certificate"
            raise NodeError(source.name, text, evidence=answer.tail)
        return hide_key(Secret(answer.out))
    if dry_run:
        return Secret("")
    if any(node.certificate for node in files.values()):
        text = "clients must trust the front's new certificate: `vlaunch front certificate`"
        session.warn("front", text)
    return make_self_signed(session.inventory)


def _query_servers(session: Session, site: Site, *, dry_run: bool) -> tuple[FrontServer, ...]:
    """Query the servers from the head's agent; a dry run needs no agent."""
    if not session.inventory.front_nodes or (dry_run and not site.head_runs):
        return ()
    (answer,) = session.transport.run([servers.query_servers(site)])
    try:
        listed = servers.parse_servers(parse_payload(answer)).servers
    except UnreadableAnswer as error:
        raise NodeError(
            site.head.name,
            "cannot list its servers, which the front needs",
            evidence=error.evidence or error.message,
            hint="run `vlaunch status`; then `vlaunch front reload`",
        ) from None
    for text in _unreachable_servers(session.inventory, listed):
        session.warn("front", text)
    return front_servers(session.inventory, listed)


def _unreachable_servers(inventory: Inventory, listed: Iterable[Server]) -> list[str]:
    """Describe servers on the loopback of a node that had the front when they were started."""
    fronts = [node.name for node in inventory.front_nodes]
    texts = []
    for server in listed:
        spec = server.desired
        if spec is None or not spec.only_host or not ip_address(spec.only_host).is_loopback:
            continue
        apis = {api.node for api in spec.apis}
        if others := [node for node in fronts if apis != {node}]:
            texts.append(
                f"{server.name} listens on {spec.only_host} only, where the front on"
                f" {fold(others)} cannot reach it: repeat its `vlaunch serve` with `--replace`"
            )
    return texts
