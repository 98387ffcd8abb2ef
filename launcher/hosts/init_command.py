"""`vlaunch init`: scan hosts and write their inventory, with the reason for each choice."""

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.progress import Printer
from launcher.app.session import Session
from launcher.core.domain import Accelerator, Argv, ClusterSettings, Node, NodeSettings, Ssh, fold
from launcher.core.errors import (
    InventoryError,
    RequestError,
    UnreadableAnswer,
    VlaunchError,
    combine_errors,
)
from launcher.core.events import Event
from launcher.core.transport import Command
from launcher.hosts.discovery import local_assets
from launcher.hosts.discovery.discover import discover
from launcher.hosts.discovery.inventory_writer import format_inventory
from launcher.hosts.discovery.shape import DOCKER, HF_HOME, Discovery, InitOptions, ScannedHost
from launcher.tools import compile_cache, host
from launcher.tools.host import node_probes

_SUDO: Argv = ("sudo", "-n", "docker")


@command(inventory=False, flags=[options.JSON])
@click.argument("hosts", metavar="[HOST]...", nargs=-1)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    help="File to write, or `-` for standard output.  [default: ./inventory.yaml]",
)
@options.inventory_option(Ssh, "user")
@options.inventory_option(Ssh, "port")
@click.option("--identity", metavar="FILE", help="SSH private key on this machine.")
@options.inventory_option(Ssh, "jump", metavar="[USER@]HOST[:PORT]")
@options.inventory_option(ClusterSettings, "cluster", default="vllm", metavar="NAME")
@options.inventory_option(
    ClusterSettings, "image", default="one that all hosts have, else vLLM's own"
)
@options.inventory_option(
    NodeSettings, "hf_home", "--hf-home", default="where models are", metavar="DIR"
)
@options.inventory_option(ClusterSettings, "accelerator", default="detected")
@click.option(
    "--docker",
    metavar="WORDS",
    help="Docker command on the hosts.  [default: `docker`, else `sudo -n docker`]",
)
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def init(
    call: CommandContext,
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
    """Scan hosts over SSH and write an inventory; its comments explain every choice.

    The first HOST is the head. A HOST can be a range (gpu[01-16]) or user@host:port; ~/.ssh/config
    applies. Nothing changes on the hosts. An existing file is kept unless --force is given.
    """
    from launcher.hosts.discovery.host_arguments import parse_hosts

    if output == "-" and call.as_json:
        raise click.UsageError("`-o -` and --json both write to standard output")
    if not hosts:
        raise click.UsageError("name the hosts, the head first: vlaunch init gpu01 gpu02")
    path = Path(output or "inventory.yaml")
    if output != "-":
        _check_output_path(path, force=force)
    # Absolute, so that the inventory may be anywhere.
    key = str(Path.cwd() / Path(identity).expanduser()) if identity else None
    wishes = InitOptions(
        cluster=cluster or "vllm",
        image=image,
        hf_home=hf_home,
        accelerator=accelerator,
        ssh=Ssh(user=user, port=port, identity=key, jump=jump),
    )
    docker_argv = _parse_docker(docker)
    with call.printer() as printer:
        with call.session(
            inventory=parse_hosts(hosts, wishes, docker_argv or DOCKER), printer=printer
        ) as session:
            scanned = _scan_hosts(session, wishes, docker_argv)
        data = _write_inventory(
            discover(scanned, wishes), path, printer, stdout=output == "-", force=force
        )
    click.echo(data, nl=False)  # after the progress display
    return 0


def _scan_hosts(session: Session, wishes: InitOptions, docker: Argv | None) -> list[ScannedHost]:
    """Query every host; repeat with sudo if the SSH user may not use Docker and `docker` is None.

    Raises NodeError with the errors of all hosts.
    """
    from launcher.hosts.discovery.host_arguments import ssh_overrides

    nodes = session.inventory.nodes
    session.begin("look", "Scan the hosts")
    started = time.monotonic()
    answers = _query_hosts(session, nodes, {node.name: node.docker for node in nodes}, wishes)
    if docker is None:
        answers |= _query_with_sudo(session, answers, wishes)
    seconds = time.monotonic() - started
    node_names = fold([node.name for node in nodes])
    session.step("look", "seen", node=node_names, seconds=seconds)
    return [replace(answers[node.name], ssh=ssh_overrides(node.ssh, wishes.ssh)) for node in nodes]


def _query_with_sudo(
    session: Session, answers: Mapping[str, ScannedHost], wishes: InitOptions
) -> dict[str, ScannedHost]:
    """Repeat denied queries with sudo; return the hosts where it helps or times out."""
    denied = [
        node
        for node in session.inventory.nodes
        if node.docker == DOCKER and _is_docker_denied(answers[node.name])
    ]
    if not denied:
        return {}
    retried = _query_hosts(session, denied, {node.name: _SUDO for node in denied}, wishes)
    return {
        name: scanned
        for name, scanned in retried.items()
        if scanned.facts.docker_version is not None or "docker" in scanned.facts.timed_out_parts
    }


def _is_docker_denied(host: ScannedHost) -> bool:
    return "permission denied" in host.facts.part_errors.get("docker", "").lower()


def _query_hosts(
    session: Session, nodes: Sequence[Node], docker: Mapping[str, Argv], wishes: InitOptions
) -> dict[str, ScannedHost]:
    """Run the probe and the asset scan on hosts; raises NodeError with the errors of all hosts."""
    commands = []
    for node in nodes:
        argv = host.probe(
            docker[node.name],
            cluster=wishes.cluster,
            state_dir="",
            hf_home=wishes.hf_home or HF_HOME,
            accelerator=wishes.accelerator or "nvidia",
            images=(),
            survey=True,
            extra_script=compile_cache.query_script(None, wishes.cluster)
            + local_assets.probe_script(),
        )
        commands.append(Command(node=node.name, argv=argv, timeout=240))
    answers = {answer.node: answer for answer in session.transport.run(commands)}
    facts, failures = node_probes.parse_answers(answers.values())
    if failures:
        raise combine_errors(list(failures.values()))
    scanned = {}
    for node in nodes:
        try:
            assets = local_assets.parse_local_assets(answers[node.name].out)
        except UnreadableAnswer:
            assets = local_assets.LocalAssets()  # choices work without it
        scanned[node.name] = ScannedHost(
            host=node.host, facts=facts[node.name], assets=assets, docker=docker[node.name]
        )
    return scanned


def _parse_docker(docker: str | None) -> Argv | None:
    try:
        argv = None if docker is None else tuple(shlex.split(docker))
    except ValueError as error:
        raise click.UsageError(f"--docker: {str(error).lower()}") from None
    if argv == ():
        raise click.UsageError("--docker should be a command, such as `sudo -n docker`")
    return argv


def _check_output_path(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise RequestError(
            f"`{path}` is a directory", hint=f"name a file: `-o {path / 'inventory.yaml'}`"
        )
    if path.exists() and not force:
        raise RequestError(
            f"`{path}` already exists",
            hint="write elsewhere with `-o FILE`, or overwrite it with `--force`",
        )
    if not path.parent.is_dir():
        raise RequestError(
            f"`{path.parent}` is not a directory",
            hint=f"create its folder: `mkdir -p {path.parent}`",
        )


def _write_inventory(
    discovery: Discovery, path: Path, printer: Printer, *, stdout: bool, force: bool
) -> str:
    """Write the file and return an empty string, or return the text for standard output."""
    from launcher.inventory.load import loads

    text = format_inventory(discovery)
    try:
        loads(text, path)
    except InventoryError as error:
        message = "the scan gave no valid inventory; nothing was written"
        raise VlaunchError(
            message,
            evidence=error.mistakes,
            hint="write the inventory by hand: `vlaunch schema` describes every key",
        ) from None
    for warning in discovery.warnings:
        printer.show(Event(kind="warning", stage="look", text=warning, state="warn"))
    hosts = f"{len(discovery.nodes)} host{'s' * (len(discovery.nodes) > 1)}"
    summary = f"cluster {discovery.cluster}, {hosts}, {discovery.accelerator}, {discovery.fabric}"
    if stdout:
        printer.show(Event(kind="done", text=summary, state="ok"))
        return text
    _replace_file(path, text, force=force)
    data = {"path": str(path), "hosts": len(discovery.nodes), "warnings": len(discovery.warnings)}
    printer.show(Event(kind="done", text=f"wrote {path}: {summary}", state="ok", data=data))
    inventory_option = "" if path == Path("inventory.yaml") else f" -i {shlex.quote(str(path))}"
    printer.show(
        Event(kind="note", text=(f"next: review it, then run `vlaunch check{inventory_option}`"))
    )
    return ""


def _replace_file(path: Path, text: str, *, force: bool) -> None:
    """Write the file atomically; without `force`, never replace one created meanwhile."""
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        if force:
            temporary.replace(target)
        else:
            try:
                target.hardlink_to(temporary)
            except FileExistsError:
                _check_output_path(path, force=False)
                raise
            except OSError:  # a file system without hard links
                temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
