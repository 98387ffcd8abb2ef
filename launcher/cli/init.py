"""`vlaunch init`: look at hosts and write their inventory, with the reason of every choice beside
it.
"""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli import options
from launcher.cli.command import Call, command
from launcher.errors import InventoryError, RequestError, VlaunchError
from launcher.events import Event
from launcher.model import Accelerator, Argv, Inventory, Ssh
from launcher.ui.progress import Printer

if TYPE_CHECKING:
    from launcher.discovery.shape import Discovery, Probed, Wishes


@command(inventory=False, flags=[options.JSON])
@click.argument("hosts", metavar="[HOST]...", nargs=-1)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="Where to write; `-` is standard output.  [default: ./inventory.yaml]",
)
@click.option("--user", help="Login name.")
@click.option("--port", type=click.IntRange(1, 65535), help="SSH port.")
@click.option("--identity", metavar="FILE", help="Private key on this machine.")
@click.option("--jump", metavar="[USER@]HOST[:PORT]", help="Host to go through.")
@click.option("--cluster", metavar="NAME", help="Name of the cluster.  [default: vllm]")
@click.option("--image", help="vLLM image.  [default: one that all hosts have, else vLLM's own]")
@click.option(
    "--hf-home", metavar="DIR", help="Hugging Face home on the hosts.  [default: where models are]"
)
@click.option(
    "--accelerator",
    type=click.Choice(["nvidia", "amd", "cpu"]),
    help="What the model runs on.  [default: found out]",
)
@click.option(
    "--docker",
    metavar="WORDS",
    help="How to call docker on the hosts.  [default: `docker`, else `sudo -n docker`]",
)
@click.option(
    "--beside",
    metavar="INVENTORY",
    multiple=True,
    help="Another cluster on these hosts: leave it its GPUs and ports. May be given again.",
)
@click.option("--force", is_flag=True, help="Overwrite the file.")
@click.option(
    "--update",
    is_flag=True,
    help="Only show what differs from the file by now; exit code 3 when something does.",
)
def init(
    call: Call,
    hosts: tuple[str, ...],
    output: str | None,
    user: str | None,
    port: int | None,
    identity: str | None,
    jump: str | None,
    cluster: str | None,
    image: str | None,
    hf_home: str | None,
    accelerator: Accelerator | None,
    docker: str | None,
    beside: tuple[str, ...],
    force: bool,
    update: bool,
) -> int:
    """Look at hosts over SSH and write an inventory of them, with the reason of every choice beside
    it.

    The first HOST is the head. A HOST may be a range (gpu[01-16]) and say user@host:port;
    ~/.ssh/config is honoured. Hosts are only read. An existing file is never overwritten without
    --force. --update looks at the file's hosts, and at HOSTs besides, and never writes: edit the
    file by hand, or write it anew with --force.
    """
    from launcher.cli.look import look
    from launcher.discovery.discover import discover
    from launcher.discovery.shape import DOCKER
    from launcher.inventory.load import load

    _check_options(hosts, output, force=force, update=update, as_json=call.as_json)
    path = Path(output or "inventory.yaml")
    known = load(path) if update else None
    if known is None and output != "-":
        _may_write(path, force=force)
    wishes = _wishes(
        known,
        cluster=cluster,
        image=image,
        hf_home=hf_home,
        accelerator=accelerator,
        ssh=Ssh(user=user, port=port, identity=identity, jump=jump),
        beside=tuple(load(Path(each)) for each in beside),
    )
    words = _words(docker)
    wishes, meant = _meant(known, hosts, wishes, words or DOCKER)
    with call.printer() as to:
        with call.session(inventory=meant, to=to) as session:
            probed = look(
                session, wishes, words, [node.name for node in known.nodes] if known else ()
            )
        if known is None:
            code, data = (
                0,
                _write(discover(probed, wishes), path, to, stdout=output == "-", force=force),
            )
        else:
            code, data = _show_drift(known, path, wishes, probed, to, as_json=call.as_json)
    click.echo(data, nl=False)  # after the display has gone
    return code


def _check_options(
    hosts: Sequence[str], output: str | None, *, force: bool, update: bool, as_json: bool
) -> None:
    """Raise UsageError for options that do not go together."""
    if output == "-" and (as_json or update):
        raise click.UsageError(
            "`-o -` writes the inventory to standard output, which --json and --update need"
            " themselves"
        )
    if update and force:
        raise click.UsageError(
            "--update only shows; to write the file anew, use --force without it"
        )
    if not hosts and not update:
        raise click.UsageError("name the hosts, the head first: vlaunch init gpu01 gpu02")


def _wishes(
    known: Inventory | None,
    *,
    cluster: str | None,
    image: str | None,
    hf_home: str | None,
    accelerator: Accelerator | None,
    ssh: Ssh,
    beside: tuple[Inventory, ...],
) -> Wishes:
    """Return what the flags say, and where they say nothing, what the file states."""
    from launcher.discovery.asked import absolute, unused
    from launcher.discovery.shape import Wishes

    stated = Wishes()
    if known is not None:
        stated = Wishes(
            cluster=known.cluster,
            image=known.image,
            hf_home=known.head.hf_home,
            accelerator=known.accelerator,
        )
    names = [other.cluster for other in beside]
    if cluster in names:
        raise RequestError(
            f"there is a cluster `{cluster}` already, beside which this one should live",
            hint="give it another name with `--cluster NAME`",
        )
    wishes = Wishes(
        cluster=cluster or unused(stated.cluster, names),
        image=image or stated.image,
        hf_home=hf_home or stated.hf_home,
        accelerator=accelerator or stated.accelerator,
        ssh=ssh,
        beside=beside,
    )
    return absolute(wishes, Path.cwd())


def _meant(
    known: Inventory | None, hosts: Sequence[str], wishes: Wishes, docker: Argv
) -> tuple[Wishes, Inventory]:
    """Return whom to look at, as an inventory: the hosts that are named, and the nodes of the file;
    and the wishes, which take the login of these.
    """
    from launcher.discovery.asked import asked

    if known is None:
        return wishes, asked(hosts, wishes, docker)
    return _with_known(known, asked(hosts, wishes, docker) if hosts else None, wishes)


def _words(docker: str | None) -> Argv | None:
    try:
        words = None if docker is None else tuple(shlex.split(docker))
    except ValueError as error:
        raise click.UsageError(f"--docker: {str(error).lower()}") from None
    if words == ():
        raise click.UsageError("--docker should be words, such as `sudo -n docker`")
    return words


def _with_known(
    known: Inventory, new: Inventory | None, wishes: Wishes
) -> tuple[Wishes, Inventory]:
    """Put the nodes of an inventory and new hosts together; what the nodes say of logins in common
    is said once.
    """

    there = {node.host.lower() for node in known.nodes} | {
        node.name.lower() for node in known.nodes
    }
    more = tuple(
        replace(node, ip=f"198.19.{at // 250}.{at % 250 + 1}", head=False)
        for at, node in enumerate(new.nodes if new else ())
        if node.host.lower() not in there
    )
    logins = [node.ssh for node in known.nodes]
    common = max(logins, key=logins.count)
    return replace(wishes, ssh=common), replace(known, nodes=(*known.nodes, *more))


def _may_write(path: Path, *, force: bool) -> None:

    if path.is_dir():
        raise RequestError(
            f"`{path}` is a directory", hint=f"name a file: `-o {path / 'inventory.yaml'}`"
        )
    if path.exists() and not force:
        raise RequestError(
            f"`{path}` exists already, and is not overwritten",
            hint=(
                "see what has changed with `--update`, write elsewhere with `-o FILE`, or overwrite"
                " it with `--force`"
            ),
        )
    if not path.parent.is_dir():
        raise RequestError(
            f"`{path.parent}` is no directory, so nothing can be written there",
            hint=f"mkdir -p {path.parent}",
        )


def _write(found: Discovery, path: Path, to: Printer, *, stdout: bool, force: bool) -> str:
    """Write the file and return nothing for standard output, or the other way round."""
    from launcher.discovery.written import write
    from launcher.inventory.load import loads

    text = write(found)
    try:
        loads(text, path)
    except InventoryError as error:
        told = "what was found does not make an inventory that can be used; nothing was written"
        raise VlaunchError(
            told,
            evidence=error.mistakes,
            hint="write it by hand, starting from inventory/example.yaml",
        ) from None
    for warning in found.warnings:
        to.show(Event(kind="warning", stage="look", text=warning, state="warn"))
    what = f"cluster {found.cluster}, {len(found.nodes)} hosts, {found.accelerator}, {found.fabric}"
    if stdout:
        to.show(Event(kind="done", text=what, state="ok"))
        return text
    _replace(path, text, force=force)
    data = {"path": str(path), "hosts": len(found.nodes), "warnings": len(found.warnings)}
    to.show(Event(kind="done", text=f"wrote {path}: {what}", state="ok", data=data))
    where = "" if path == Path("inventory.yaml") else f" -i {shlex.quote(str(path))}"
    to.show(Event(kind="note", text=f"next: read it, then `vlaunch check{where}`"))
    return ""


def _replace(path: Path, text: str, *, force: bool) -> None:
    """Write all of it or nothing; without `force`, a file that has come in between stays."""
    target = path.resolve()
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        if force:
            part.replace(target)
        else:
            try:
                target.hardlink_to(part)
            except FileExistsError:
                _may_write(path, force=False)
                raise
            except OSError:  # a file system without hard links
                part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _show_drift(
    known: Inventory,
    path: Path,
    wishes: Wishes,
    probed: Sequence[Probed],
    to: Printer,
    *,
    as_json: bool,
) -> tuple[int, str]:
    """Show what differs; return the exit code, and the difference of the files for standard
    output.
    """
    from launcher.discovery.discover import discover
    from launcher.discovery.drift import drift

    found: Discovery | None = None
    try:
        found = discover(probed, wishes)
        warnings = found.warnings
    # what the inventory states can be compared with the hosts all the same
    except RequestError as error:
        warnings = (f"{error.message}: {'; '.join(error.evidence.splitlines())}",)
    for warning in warnings:
        to.show(Event(kind="warning", stage="look", text=warning, state="warn"))
    lines = drift(known, probed, found)
    for line in lines:
        to.show(Event(kind="finding", stage="drift", text=line, state="warn"))
    if found and not lines:
        to.show(
            Event(kind="done", text=f"{path} states what is there", state="ok", data={"drift": 0})
        )
        return 0, ""
    diff = _difference(path, found) if found else ""
    text = (
        f"{path} differs from what is there in {len(lines)} place{'s' if len(lines) != 1 else ''};"
        " nothing was written"
    )
    to.show(
        Event(
            kind="done",
            text=text,
            state="warn",
            data={"drift": len(lines), **({"diff": diff} if as_json else {})},
        )
    )
    return 3, "" if as_json else diff


def _difference(path: Path, found: Discovery) -> str:
    """Return how the file would change if it were written now."""
    from launcher.discovery.written import write

    before, after = path.read_text(encoding="utf-8").splitlines(), write(found).splitlines()
    compared = difflib.unified_diff(
        before, after, str(path), "as it would be written now", lineterm=""
    )
    return "".join(f"{line}\n" for line in compared)
