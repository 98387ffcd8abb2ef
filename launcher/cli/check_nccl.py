"""`vlaunch check-nccl`: prove the network between the containers that will serve, or read what a
log says of it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from launcher.cli import options
from launcher.ui import json_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from launcher.checks.network import Verdict
    from launcher.checks.shape import Finding
    from launcher.cli.session import Session
    from launcher.plan.verdict import Ask

Require = Literal["auto", "any", "rdma", "gdrdma"]


@click.command("check-nccl")
@click.argument("paths", metavar="[INVENTORY]", nargs=-1)
@options.reaching
@options.as_json
@click.option(
    "--require",
    type=click.Choice(["auto", "any", "rdma", "gdrdma"]),
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
@click.option(
    "--pair-timeout",
    type=click.FloatRange(1),
    default=20.0,
    show_default=True,
    help="Seconds for one pair of nodes.",
)
@click.option(
    "--expect",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Your figures of GPUs and NICs (YAML).",
)
@options.strict
@options.lock_wait
def check_nccl(
    paths: tuple[str, ...],
    inventory: str | None,
    accept_new_host_keys: bool,
    verbose: bool,
    as_json: bool,
    require: Require | None,
    logs: tuple[str, ...],
    html: Path | None,
    ranks_per_node: int | None,
    deadline: float | None,
    pair_timeout: float,
    expect: Path | None,
    strict: bool,
    lock_wait: int,
) -> int:
    """Measure every pair of nodes in the containers that will serve, and say what they talk over.

    One rank per GPU: all_reduce over all of them, send and receive between every pair of nodes in
    both directions. The verdict is what `vlaunch serve` asks for before it starts a model.
    """
    from launcher.errors import RequestError

    if logs:
        if html is not None:
            raise click.UsageError("--html shows what was measured; a log alone has no figures")
        return _from_logs((*logs, *paths), inventory, require, as_json=as_json, strict=strict)
    from launcher.cli import expected, session
    from launcher.cli.locked import locked
    from launcher.plan.verdict import Ask
    from launcher.ui.progress import printer

    if len(paths) > 1:
        raise click.UsageError(
            f"one inventory at a time, not {len(paths)}; logs are named after --from-log"
        )
    wanted = session.read(paths[0] if paths else None, inventory)
    if len(wanted.nodes) == 1:
        raise RequestError(
            "a cluster of one node has no network between nodes",
            hint="inside a node: `nvidia-smi topo -m`",
        )
    if html is not None:
        _writable(html)
    import secrets

    ask = Ask(
        nonce=secrets.token_hex(4),
        require=require,
        ranks_per_node=ranks_per_node,
        deadline=deadline,
        pair_timeout=pair_timeout,
        known=expected.load(expect),
    )
    with (
        printer(quiet=as_json) as to,
        session.reach(
            wanted, to, accept_new_host_keys=accept_new_host_keys, verbose=verbose
        ) as reached,
        locked(reached, wait=lock_wait) as ours,
    ):
        verdict = measure(ours, ask)
    _show(verdict, as_json=as_json)
    if html is not None:
        _page(verdict, wanted.cluster, html)
    warned = any(each.status == "warn" for each in verdict.findings)
    return options.exit_code(failed=not verdict.passed, warned=warned, strict=strict)


def measure(session: Session, ask: Ask) -> Verdict:
    """Bring the helper files up to date, run the probes on all nodes at once, judge, and keep the
    verdict on the head.
    """
    from launcher import apply as runner
    from launcher.events import Event
    from launcher.plan import network as plan
    from launcher.plan import verdict as kept
    from launcher.plan.observe import observe
    from launcher.plan.shape import Plan, Stage
    from launcher.plan.verdict import Proof
    from launcher.ui.progress import show_all

    began = time.monotonic()
    inventory, to = session.inventory, session.to
    facts = observe(inventory, session.transport, [inventory.image], survey=True, clock=time.time)
    show_all(runner.apply(plan.prepare(inventory, facts), session.transport), to)
    proof = Proof()
    gate = plan.gate(inventory, facts, ask, proof)
    to.show(
        Event(
            kind="stage",
            stage="network",
            text="Prove the network between the nodes",
            state="running",
        )
    )
    to.show(
        Event(
            kind="wait",
            stage="network",
            text=gate.doing,
            state="running",
            deadline=plan.deadline(inventory, ask),
        )
    )
    findings = gate.judge(runner.ask(session.transport, gate))
    if any(each.status == "wait" for each in findings):
        to.show(Event(kind="wait", stage="network", text=findings[0].text, state="running"))
        gate.judge(runner.ask(session.transport, gate))
    assert proof.verdict is not None  # noqa: S101 - the judge has just put it there
    to.show(
        Event(
            kind="step",
            stage="network",
            text="measured",
            state="ok",
            seconds=time.monotonic() - began,
        )
    )
    if kept.incarnation(inventory, facts):
        keep = Stage(
            id="verdict",
            title="Keep the verdict",
            steps=(kept.record(inventory, facts, proof, taken=now()),),
        )
        show_all(runner.apply(Plan(verb="check-nccl", stages=(keep,)), session.transport), to)
    return proof.verdict


def now() -> str:
    """Return the time as people and machines read it."""
    return time.strftime("%Y-%m-%d %H:%M:%S%z")


def _show(verdict: Verdict, *, as_json: bool) -> None:
    from launcher.plan.verdict import as_json as plain
    from launcher.ui import network
    from launcher.ui.status import console

    if as_json:
        click.echo(json_line.dumps(plain(verdict)))
    else:
        console().print(network.render(verdict))


def _writable(path: Path) -> None:
    """Raise RequestError when a file cannot be written: to be known before the measuring, which
    takes a minute.
    """
    from launcher.errors import RequestError

    there = path.exists()
    try:
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        hint = "name a file in a folder that is there and may be written"
        raise RequestError(f"--html {path}: {error.strerror}", hint=hint) from None


def _page(verdict: Verdict, cluster: str, path: Path) -> None:
    from launcher import __version__
    from launcher.redaction import redact
    from launcher.ui import network_page

    page = network_page.page(verdict, cluster=cluster, taken=now(), version=__version__)
    path.write_text(redact(page), encoding="utf-8")
    click.echo(f"wrote {path}", err=True)


def _from_logs(
    files: tuple[str, ...],
    inventory: str | None,
    asked: Require | None,
    *,
    as_json: bool,
    strict: bool,
) -> int:
    _refuse_inventories(files)
    from launcher.checks import levels
    from launcher.checks.shape import worst
    from launcher.tools import nccl
    from launcher.ui import findings as ui

    require = asked or "auto"
    if inventory is not None and asked is None:
        from launcher.cli import session

        require = session.read(None, inventory).require
    readings = {name: nccl.read(_blocks(name)) for name in dict.fromkeys(files)}
    found = levels.judge_files(readings, require)
    status = worst(found)
    if as_json:
        said = {
            **levels.as_json(nccl.merge(readings.values())),
            "required": require,
            "passed": status != "fail",
            "findings": [_plain(each) for each in found],
        }
        click.echo(json_line.dumps(said))
    else:
        ui.show(found)
    return options.exit_code(failed=status == "fail", warned=status == "warn", strict=strict)


def _plain(finding: Finding) -> dict[str, str]:
    """Return a finding ready for JSON."""
    return {
        "status": finding.status,
        "node": finding.node,
        "text": finding.text,
        "evidence": finding.evidence,
        "fix": finding.fix,
    }


def _refuse_inventories(files: Sequence[str]) -> None:
    for name in files:
        if Path(name).suffix in (".yaml", ".yml"):
            raise click.UsageError(f"{name} is no log but an inventory: name it with `-i {name}`")


def _blocks(name: str) -> Iterator[bytes]:
    """Read a file (`-`: standard input) block by block; raises RequestError when it cannot be
    read.
    """
    from launcher.errors import RequestError

    try:
        with click.open_file(name, "rb") as file:
            while block := file.read(1 << 20):
                yield block
    except OSError as error:
        raise RequestError(
            f"{name}: {error.strerror}", hint="name logs of NCCL, or `-` for standard input"
        ) from None
