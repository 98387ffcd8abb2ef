"""`vlaunch check-nccl`: measure the network between the serving containers, or judge NCCL logs."""

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import click

from launcher import __version__
from launcher.app import findings_view as ui
from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.session import Session
from launcher.app.terminal import dump_json, say, show
from launcher.core.check import worst_status
from launcher.core.domain import LEVELS, Required, Secret
from launcher.core.errors import RequestError
from launcher.core.plan import Plan, Stage
from launcher.core.redaction import redact
from launcher.core.transport import run_by_node
from launcher.network import levels, nccl_log, network_view
from launcher.network import page as network_page
from launcher.network.network_shape import CheckOptions, CheckResult, Verdict
from launcher.network.network_shape import as_json as plain
from launcher.tools.host.node_probes import probe_nodes
from launcher.tools.site import Site
from launcher.tools.site import network_verdict as kept


@command(
    "check-nccl",
    shows="people",
    flags=[options.PAIR_TIMEOUT, options.LOCK_WAIT, options.STRICT, options.JSON],
)
@click.argument("more_logs", metavar="[LOG]...", nargs=-1)
@click.option(
    "--require",
    type=click.Choice(["auto", *LEVELS]),
    help="Required transport (default: the inventory's).",
)
@click.option(
    "--log",
    "logs",
    metavar="FILE…",
    multiple=True,
    help="Read NCCL or RCCL logs instead (`-`: standard input); contact no node.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write an HTML page with heat maps too.",
)
@click.option(
    "--ranks-per-node",
    type=click.IntRange(1),
    help="Number of ranks on each node (default: its GPUs).",
)
@click.option(
    "--deadline",
    type=options.Duration("10s"),
    help="Overall time limit (default: depends on the number of nodes).",
)
@options.EXPECT
def check_nccl(
    call: CommandContext,
    more_logs: tuple[str, ...],
    require: Required | None,
    logs: tuple[str, ...],
    html: Path | None,
    ranks_per_node: int | None,
    deadline: float | None,
    expect: Path | None,
) -> int:
    """Measure the network between every pair of nodes, and report the transport in use.

    It runs in the containers that will serve, with one rank per GPU: all_reduce over all ranks,
    then send and receive between every pair of nodes in both directions. `vlaunch serve` requires
    this result before it starts a model.
    """

    if logs:
        if html is not None:
            raise click.UsageError("--html needs measurements; a log has none")
        return _judge_logs(call, (*logs, *more_logs), require)
    from launcher.app import certificates
    from launcher.core import expectations_file

    if more_logs:
        raise click.UsageError("pass logs with --log, and the inventory with -i")
    inventory = call.inventory
    if len(inventory.nodes) == 1:
        raise RequestError(
            "a cluster of one node has no network between nodes",
            hint="to see the links inside a node, run `nvidia-smi topo -m`",
        )
    if html is not None:
        _require_writable(html)

    ask = CheckOptions(
        nonce=secrets.token_hex(4),
        certificate=Secret(certificates.make_certificate("vlaunch check-nccl")),
        require=require,
        ranks_per_node=ranks_per_node,
        deadline=deadline,
        pair_timeout=call.pair_timeout,
        expectations=expectations_file.load_for_user(expect),
    )
    with call.session() as session, call.locked(session) as ours:
        verdict = measure(ours, ask)
    _print_verdict(verdict, as_json=call.as_json)
    if html is not None:
        _write_page(verdict, inventory.cluster, html)
    warned = any(finding.status == "warn" for finding in verdict.findings)
    return options.exit_code(failed=not verdict.passed, warned=warned, strict=call.strict)


def measure(session: Session, ask: CheckOptions) -> Verdict:
    """Update the node programs, run the probes on all nodes at once, judge the results and save the
    verdict on the head.
    """
    from launcher.network import network_plan as plan

    began = time.monotonic()
    inventory = session.inventory
    facts = probe_nodes(
        inventory, session.transport, [inventory.image], survey=True, clock=time.time
    )
    site = Site(inventory, facts)
    session.apply(plan.plan_prepare(site))
    proof = CheckResult()
    gate = plan.network_gate(site, ask, proof)
    session.begin("network", "Check the network between the nodes")
    session.wait("network", gate.progress_text, deadline=plan.probe_deadline(inventory, ask))
    findings = gate.judge(run_by_node(session.transport, gate.queries))
    if any(finding.status == "wait" for finding in findings):
        session.wait("network", findings[0].text)
        gate.judge(run_by_node(session.transport, gate.queries))
    assert proof.verdict is not None  # noqa: S101 - the judge has just put it there
    session.step("network", "measured", seconds=time.monotonic() - began)
    if kept.incarnation(site):
        keep = Stage(
            id="verdict",
            title="Save the verdict",
            steps=(plan.record_verdict(site, proof, measured_at=timestamp()),),
        )
        session.apply(Plan(verb="check-nccl", stages=(keep,)))
    return proof.verdict


def timestamp() -> str:
    """Return the local time with its UTC offset."""
    return time.strftime("%Y-%m-%d %H:%M:%S%z")


def _print_verdict(verdict: Verdict, *, as_json: bool) -> None:
    if as_json:
        click.echo(dump_json(plain(verdict)))
    else:
        show(network_view.render(verdict))


def _require_writable(path: Path) -> None:
    """Raise RequestError if a file cannot be written, before the measurement takes a minute."""

    existed = path.exists()
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        hint = "choose a file in an existing, writable folder"
        raise RequestError(f"--html {path}: {error.strerror}", hint=hint) from None


def _write_page(verdict: Verdict, cluster: str, path: Path) -> None:
    page = network_page.render_page(
        verdict, cluster=cluster, measured_at=timestamp(), version=__version__
    )
    path.write_text(redact(page), encoding="utf-8")
    say(f"wrote {path}")


def _judge_logs(call: CommandContext, files: tuple[str, ...], requested: Required | None) -> int:
    _refuse_inventories(files)
    require = requested or "auto"
    if call.named is not None and requested is None:
        require = call.inventory.require
    readings = {name: nccl_log.parse_log(_read_blocks(name)) for name in dict.fromkeys(files)}
    findings = levels.judge_files(readings, require)
    status = worst_status(findings)
    if call.as_json:
        verdict = {
            **levels.as_json(nccl_log.merge_readings(readings.values())),
            "required": require,
            "passed": status != "fail",
            "findings": [asdict(finding) for finding in findings],
        }
        click.echo(dump_json(verdict))
    else:
        ui.print_findings(findings)
    return options.exit_code(failed=status == "fail", warned=status == "warn", strict=call.strict)


def _refuse_inventories(files: Sequence[str]) -> None:
    for name in files:
        if Path(name).suffix in (".yaml", ".yml"):
            raise click.UsageError(f"{name} is an inventory, not a log: pass it with `-i {name}`")


def _read_blocks(name: str) -> Iterator[bytes]:
    """Yield a file (`-`: standard input) block by block; raise RequestError if that fails."""

    try:
        with click.open_file(name, "rb") as file:
            while block := file.read(1 << 20):
                yield block
    except OSError as error:
        raise RequestError(
            f"{name}: {error.strerror}", hint="pass NCCL logs, or `-` for standard input"
        ) from None
