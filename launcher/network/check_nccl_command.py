"""`vlaunch check-nccl`: prove the network between the containers that will serve, or read what a
log says of it.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import click

from launcher import __version__
from launcher.app import findings_view as ui
from launcher.app import options
from launcher.app.command import Call, command
from launcher.app.session import Session
from launcher.app.terminal import dump_json, say, show
from launcher.core.check import worst
from launcher.core.domain import LEVELS, Required, Secret
from launcher.core.errors import RequestError
from launcher.core.plan import Plan, Stage
from launcher.core.redaction import redact
from launcher.core.transport import by_node
from launcher.network import levels, nccl_log, network_view
from launcher.network import page as network_page
from launcher.network.network_shape import Ask, Proof, Verdict
from launcher.network.network_shape import as_json as plain
from launcher.tools import network_verdict as kept
from launcher.tools.observe import observe
from launcher.tools.site import Site


@command(
    "check-nccl",
    shows="people",
    flags=[options.PAIR_TIMEOUT, options.LOCK_WAIT, options.STRICT, options.JSON],
)
@click.argument("paths", metavar="[INVENTORY]", nargs=-1)
@click.option(
    "--require",
    type=click.Choice(["auto", *LEVELS]),
    help="The least that will do (default: the inventory's).",
)
@click.option(
    "--from-log",
    "logs",
    metavar="FILE…",
    multiple=True,
    help="Read NCCL or RCCL logs instead (`-`: standard input); touch no node.",
)
@click.option(
    "--html",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a page with heat maps, too.",
)
@click.option(
    "--ranks-per-node", type=click.IntRange(1), help="Ranks on each node (default: its GPUs)."
)
@click.option(
    "--deadline",
    type=click.FloatRange(10),
    help="Seconds until what has not finished is given up and named.",
)
@options.EXPECT
def check_nccl(
    call: Call,
    paths: tuple[str, ...],
    require: Required | None,
    logs: tuple[str, ...],
    html: Path | None,
    ranks_per_node: int | None,
    deadline: float | None,
    expect: Path | None,
) -> int:
    """Measure every pair of nodes in the containers that will serve, and say what they talk over.

    One rank per GPU: all_reduce over all of them, send and receive between every pair of nodes in
    both directions. The verdict is what `vlaunch serve` asks for before it starts a model.
    """

    if logs:
        if html is not None:
            raise click.UsageError("--html shows what was measured; a log alone has no figures")
        return _from_logs(call, (*logs, *paths), require)
    from launcher.app import issue_certificates
    from launcher.core import expectations_read

    if len(paths) > 1:
        raise click.UsageError(
            f"one inventory at a time, not {len(paths)}; logs are named after --from-log"
        )
    call = replace(call, path=paths[0] if paths else None)
    inventory = call.inventory
    if len(inventory.nodes) == 1:
        raise RequestError(
            "a cluster of one node has no network between nodes",
            hint="inside a node: `nvidia-smi topo -m`",
        )
    if html is not None:
        _writable(html)

    ask = Ask(
        nonce=secrets.token_hex(4),
        certificate=Secret(issue_certificates.make("vlaunch check-nccl")),
        require=require,
        ranks_per_node=ranks_per_node,
        deadline=deadline,
        pair_timeout=call.pair_timeout,
        known=expectations_read.load_for_user(expect),
    )
    with call.session() as session, call.locked(session) as ours:
        verdict = measure(ours, ask)
    _show(verdict, as_json=call.as_json)
    if html is not None:
        _page(verdict, inventory.cluster, html)
    warned = any(finding.status == "warn" for finding in verdict.findings)
    return options.exit_code(failed=not verdict.passed, warned=warned, strict=call.strict)


def measure(session: Session, ask: Ask) -> Verdict:
    """Bring the helper files up to date, run the probes on all nodes at once, judge, and keep the
    verdict on the head.
    """
    from launcher.network import network_plan as plan

    began = time.monotonic()
    inventory = session.inventory
    facts = observe(inventory, session.transport, [inventory.image], survey=True, clock=time.time)
    site = Site(inventory, facts)
    session.apply(plan.prepare(site))
    proof = Proof()
    gate = plan.gate(site, ask, proof)
    session.begin("network", "Prove the network between the nodes")
    session.wait("network", gate.doing, deadline=plan.deadline(inventory, ask))
    findings = gate.judge(by_node(session.transport, gate.ask))
    if any(finding.status == "wait" for finding in findings):
        session.wait("network", findings[0].text)
        gate.judge(by_node(session.transport, gate.ask))
    assert proof.verdict is not None  # noqa: S101 - the judge has just put it there
    session.step("network", "measured", seconds=time.monotonic() - began)
    if kept.incarnation(site):
        keep = Stage(
            id="verdict",
            title="Keep the verdict",
            steps=(plan.record(site, proof, measured_at=now()),),
        )
        session.apply(Plan(verb="check-nccl", stages=(keep,)))
    return proof.verdict


def now() -> str:
    """Return the time as people and machines read it."""
    return time.strftime("%Y-%m-%d %H:%M:%S%z")


def _show(verdict: Verdict, *, as_json: bool) -> None:
    if as_json:
        click.echo(dump_json(plain(verdict)))
    else:
        show(network_view.render(verdict))


def _writable(path: Path) -> None:
    """Raise RequestError when a file cannot be written: to be known before the measuring, which
    takes a minute.
    """

    existed = path.exists()
    try:
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        hint = "name a file in a folder that is there and may be written"
        raise RequestError(f"--html {path}: {error.strerror}", hint=hint) from None


def _page(verdict: Verdict, cluster: str, path: Path) -> None:
    page = network_page.page(verdict, cluster=cluster, measured_at=now(), version=__version__)
    path.write_text(redact(page), encoding="utf-8")
    say(f"wrote {path}")


def _from_logs(call: Call, files: tuple[str, ...], requested: Required | None) -> int:
    _refuse_inventories(files)
    require = requested or "auto"
    if call.named is not None and requested is None:
        require = call.inventory.require
    readings = {name: nccl_log.read(_blocks(name)) for name in dict.fromkeys(files)}
    findings = levels.judge_files(readings, require)
    status = worst(findings)
    if call.as_json:
        verdict = {
            **levels.as_json(nccl_log.merge(readings.values())),
            "required": require,
            "passed": status != "fail",
            "findings": [asdict(finding) for finding in findings],
        }
        click.echo(dump_json(verdict))
    else:
        ui.show(findings)
    return options.exit_code(failed=status == "fail", warned=status == "warn", strict=call.strict)


def _refuse_inventories(files: Sequence[str]) -> None:
    for name in files:
        if Path(name).suffix in (".yaml", ".yml"):
            raise click.UsageError(f"{name} is no log but an inventory: name it with `-i {name}`")


def _blocks(name: str) -> Iterator[bytes]:
    """Read a file (`-`: standard input) block by block; raises RequestError when it cannot be
    read.
    """

    try:
        with click.open_file(name, "rb") as file:
            while block := file.read(1 << 20):
                yield block
    except OSError as error:
        raise RequestError(
            f"{name}: {error.strerror}", hint="name logs of NCCL, or `-` for standard input"
        ) from None
