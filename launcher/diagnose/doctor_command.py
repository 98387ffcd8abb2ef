"""`vlaunch doctor`."""

import secrets
import time
from collections.abc import Iterable, Sequence

import click

from launcher.app import options, refusal
from launcher.app.command import CommandContext, command
from launcher.app.selection import select_nodes
from launcher.app.session import Session
from launcher.core import untrusted
from launcher.core.domain import Answer, Node
from launcher.core.transport import Command
from launcher.diagnose import doctor_view, log_files
from launcher.diagnose.doctor import Diagnosis, diagnose
from launcher.tools.diagnosis import NodeReport, parse_report, query_diagnosis

_Parsed = tuple[dict[str, NodeReport], dict[str, str]]
_TIMEOUT = 240.0  # each part of the answer has a deadline of its own


@command(shows="people", flags=[options.JSON])
@click.option(
    "--since",
    type=options.Duration(),
    help="Read only logs of this last period, such as 30m.",
)
@click.option(
    "--log",
    "sources",
    multiple=True,
    metavar="FILE",
    help="Read a log, bundle or `-` instead of the nodes; repeatable.",
)
@click.argument("names", metavar="[NODE]...", nargs=-1)
def doctor(
    call: CommandContext, since: float | None, sources: tuple[str, ...], names: tuple[str, ...]
) -> int:
    """Find the likely cause of a failure in the logs of all nodes, and its fix.

    It compares the ends of the logs of containers, engines, Ray jobs and workers, the messages of
    Docker and the kernel, and the supervisor's records with known failures. An error that is not a
    known failure is shown as it is. Nothing changes. The exit code is 1 when a problem is found; a
    possible cause alone is none.

    With --log, it reads other text instead: output of `docker logs`, `docker compose logs`,
    `kubectl logs --prefix` or `journalctl`, a log file, or a bundle of `vlaunch collect`.
    """
    if sources:
        if names:
            raise click.UsageError("--log contacts no node: omit the node names")
        diagnosis = _diagnose_files(sources, since)
        doctor_view.print_diagnosis(diagnosis, as_json=call.as_json)
        return 1 if diagnosis.has_problem else 0
    nodes = select_nodes(call.inventory, names)
    with call.session(nodes=nodes, partial=True) as session:
        diagnosis = diagnose_nodes(session, nodes, since=since)
    doctor_view.print_diagnosis(diagnosis, as_json=call.as_json)
    return 1 if diagnosis.has_problem else 0


def _diagnose_files(sources: tuple[str, ...], since: float | None) -> Diagnosis:
    """Diagnose logs in files."""
    reports = log_files.read_logs(sources)
    lines = (line for report in reports.values() for log in report.logs for line in log.lines)
    # The inventory of these logs is unknown: one node that uses RDMA shows that all should.
    rdma = any("NET/IB : Using" in line for line in lines)
    return diagnose(reports, {}, rdma=rdma, now=time.time(), since=since, elsewhere=True)


def diagnose_nodes(
    session: Session, nodes: Sequence[Node], *, since: float | None = None
) -> Diagnosis:
    """Query the reached nodes, and diagnose their reports."""
    inventory, mark = session.inventory, f"@@{secrets.token_hex(12)}"
    session.wait("doctor", "reading the logs of all nodes")
    queries = [
        Command(
            node=node.name,
            argv=query_diagnosis(
                node.docker,
                mark=mark,
                cluster=inventory.cluster,
                state_dir=node.state_dir or "",
                hf_home=node.hf_home,
                since=since,
            ),
            timeout=_TIMEOUT,
        )
        for node in session.reached_of(nodes)
    ]
    reports, no_answer = _parse_reports(session.transport.run(queries), mark)
    unreached = {name: error.brief for name, error in session.missing.items()}
    missing = unreached | no_answer
    return diagnose(
        {node.name: reports[node.name] for node in nodes if node.name in reports},
        {node.name: missing[node.name] for node in nodes if node.name in missing},
        rdma=inventory.fabric != "ethernet",
        refused=refusal.load(inventory.cluster),
        now=time.time(),
        since=since,
    )


def _parse_reports(answers: Iterable[Answer], mark: str) -> _Parsed:
    """Parse all answers into reports by node, and reasons by node for missing ones."""
    reports, no_answer = dict[str, NodeReport](), dict[str, str]()
    for answer in answers:
        report = parse_report(answer.out, mark)
        if report.clock is None and not report.lines and not report.states:
            late = f"no answer within {answer.seconds:.0f} s"
            reason = late if answer.timed_out else "unexpected output"
            output = untrusted.excerpt(answer.tail, last=True)
            no_answer[answer.node] = f"{reason}: {output}".strip(": ")
        else:
            reports[answer.node] = report
    return reports, no_answer
