"""First queries of `serve`, `batch`, `chat` and `stop`: nodes, and the head's servers and jobs."""

from dataclasses import replace
from typing import Any

from launcher.app.session import Session
from launcher.core.errors import NodeError
from launcher.core.plan import Plan
from launcher.core.transport import Command, run_by_node
from launcher.tools import model as models
from launcher.tools.host.node_probes import probe_nodes
from launcher.tools.shipped.node_files import plan_files
from launcher.tools.site import Site, history, network_verdict, serving_judges
from launcher.tools.site.ray_judges import try_payload
from launcher.tools.site.snapshot import ClusterSnapshot


def query_cluster(
    session: Session, *, model: str = "", head_only: bool = False, planning: bool = False
) -> ClusterSnapshot:
    """Query every node (or `head_only`), the head's servers and Ray, and the files of a `model` if
    one is named.

    `ClusterSnapshot.payload` lacks what could not be queried, and then has an `error`: without
    `servers` the servers are unknown, without `jobs` Ray's jobs.
    """
    inventory, head = session.inventory, session.inventory.head
    scanned = replace(inventory, nodes=(head,)) if head_only else inventory
    facts = probe_nodes(scanned, session.transport, [inventory.image])
    site = Site(inventory, facts)
    jobs, history_query = list[Command](), None
    if site.head_runs:
        jobs = [serving_judges.query_jobs(site)]
        if planning:
            history_query = history.query_all_histories(site)
    queries = [
        *(*jobs, network_verdict.query_record(site)),
        *([history_query] if history_query else []),
        *(models.query_scans(site, model) if model else ()),
    ]
    answers = run_by_node(session.transport, queries)
    from_head = answers[head.name]
    return ClusterSnapshot(
        site=site,
        payload=try_payload(from_head.pop(0)) if jobs else {},
        network=network_verdict.parse_record(from_head.pop(0)),
        revisions=history.parse_all_histories(from_head.pop(0)) if history_query else (),
        models={node: models.parse_scan(rest[0]) for node, rest in answers.items() if rest},
    )


def update_and_query(
    session: Session, *, verb: str, dry_run: bool, **options: Any
) -> tuple[ClusterSnapshot, Plan]:
    """Query like `query_cluster`, after updating the node programs, which answer; return also the
    plan of the update, which a dry run only shows.
    """
    snapshot = query_cluster(session, **options)
    files = plan_files(snapshot.site, verb=verb)
    if files.steps and not dry_run:
        session.apply(files)
        snapshot = query_cluster(session, **options)
    return snapshot, files


def require_servers(session: Session, snapshot: ClusterSnapshot) -> None:
    """Raise NodeError if the head could not list its servers."""
    if "servers" not in snapshot.payload and "error" in snapshot.payload:
        raise head_error(session, snapshot)


def head_error(session: Session, snapshot: ClusterSnapshot) -> NodeError:
    """Return the error for a head that cannot be queried."""
    return NodeError(
        session.inventory.head.name,
        "cannot list its servers",
        evidence=str(snapshot.payload["error"]),
        hint="run `vlaunch status`; `vlaunch down` removes everything",
    )
