"""`vlaunch init`: look at hosts and write their inventory, with the reason of every choice beside
it.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import click

from launcher.cli import options
from launcher.cli.command import Call, command
from launcher.errors import InventoryError, RequestError, VlaunchError
from launcher.events import Event
from launcher.model import Accelerator, Argv, Ssh
from launcher.ui.progress import Printer

if TYPE_CHECKING:
    from launcher.discovery.shape import Discovery


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
@click.option("--force", is_flag=True, help="Overwrite the file.")
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
    force: bool,
) -> int:
    """Look at hosts over SSH and write an inventory of them, with the reason of every choice beside
    it.

    The first HOST is the head. A HOST may be a range (gpu[01-16]) and say user@host:port;
    ~/.ssh/config is honoured. Hosts are only read. An existing file is never overwritten without
    --force.
    """
    from launcher.cli.look import look
    from launcher.discovery.asked import absolute, asked
    from launcher.discovery.discover import discover
    from launcher.discovery.shape import DOCKER, Wishes

    if output == "-" and call.as_json:
        raise click.UsageError(
            "`-o -` writes the inventory to standard output, which --json needs itself"
        )
    if not hosts:
        raise click.UsageError("name the hosts, the head first: vlaunch init gpu01 gpu02")
    path = Path(output or "inventory.yaml")
    if output != "-":
        _may_write(path, force=force)
    wishes = absolute(
        Wishes(
            cluster=cluster or "vllm",
            image=image,
            hf_home=hf_home,
            accelerator=accelerator,
            ssh=Ssh(user=user, port=port, identity=identity, jump=jump),
        ),
        Path.cwd(),
    )
    words = _words(docker)
    with call.printer() as to:
        with call.session(inventory=asked(hosts, wishes, words or DOCKER), to=to) as session:
            probed = look(session, wishes, words)
        data = _write(discover(probed, wishes), path, to, stdout=output == "-", force=force)
    click.echo(data, nl=False)  # after the display has gone
    return 0


def _words(docker: str | None) -> Argv | None:
    try:
        words = None if docker is None else tuple(shlex.split(docker))
    except ValueError as error:
        raise click.UsageError(f"--docker: {str(error).lower()}") from None
    if words == ():
        raise click.UsageError("--docker should be words, such as `sudo -n docker`")
    return words


def _may_write(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise RequestError(
            f"`{path}` is a directory", hint=f"name a file: `-o {path / 'inventory.yaml'}`"
        )
    if path.exists() and not force:
        raise RequestError(
            f"`{path}` exists already, and is not overwritten",
            hint="write elsewhere with `-o FILE`, or overwrite it with `--force`",
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
