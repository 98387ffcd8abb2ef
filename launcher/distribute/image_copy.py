"""`vlaunch image copy` and `vlaunch image pull`."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.selection import select_nodes
from launcher.app.session import Session
from launcher.core.domain import Answer, Argv, Node, fold
from launcher.core.errors import NodeError, UnreadableAnswer, combine_errors
from launcher.core.sizes import format_size
from launcher.core.transport import Command
from launcher.distribute import chain, image_store, members
from launcher.distribute import copy_session as copies
from launcher.distribute.chain import THIS_MACHINE, Exported
from launcher.distribute.copy_session import CopyLocation, CopyOptions
from launcher.distribute.image_plan import (
    ImagePlan,
    check_source,
    check_targets,
    plan_files,
    plan_image,
)
from launcher.distribute.image_store import SCRATCH, ImageStore
from launcher.distribute.model_copy import SOURCE, transfer_options
from launcher.tools import docker

_QUERY_TIMEOUT = 120.0  # seconds
_PULL_TIMEOUT = 3600.0  # seconds, as `up` waits
_EXPORT_TIMEOUT = 7200.0  # seconds; 50 GB at 7 MB/s
_DOCKER: Argv = ("docker",)  # this machine's


def _validate_scratch(_: click.Context, __: click.Parameter, value: str) -> str:
    if not value.startswith("/") or "\0" in value:
        raise click.BadParameter("should be the path of a folder on the nodes, such as /var/tmp")
    return value.rstrip("/") or "/"


def _transfer_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a transfer, and `--scratch`."""
    return click.option(
        "--scratch",
        default=SCRATCH,
        show_default=True,
        callback=_validate_scratch,
        metavar="FOLDER",
        help="Staging directory on each node.",
    )(transfer_options(function))


@command(
    flags=[options.DRY_RUN, options.LOCK_WAIT, options.JSON],
    short_help="Copy an image from a node or this machine to all nodes",
)
@click.argument("image", required=False)
@SOURCE
@click.option("--local", is_flag=True, help="Copy from this machine's Docker.")
@_transfer_options
def copy(
    call: CommandContext,
    image: str | None,
    source: str | None,
    local: bool,
    targets: tuple[str, ...],
    scratch: str,
    **limits: Any,
) -> None:
    """Copy IMAGE, by default the inventory's, from one Docker to those of all nodes, without a
    registry. Each node passes on what it receives, so all have it in about the time of one copy.

    Layers that all these nodes have are not sent. Every byte is verified on every node, Docker
    verifies every layer's digest, and at the end all images are compared with the source. A node
    that fails does not stop the others. After an interruption, the same command continues the copy.
    """
    if source and local:
        raise click.UsageError("--from and --local exclude each other")
    name = image or call.inventory.image
    target_nodes = select_nodes(call.inventory, targets)
    source_nodes = () if local else select_nodes(call.inventory, [source] if source else [])
    nodes = [node for node in call.inventory.nodes if node in target_nodes or node in source_nodes]
    with call.session(nodes=nodes) as session, call.locked(session) as locked:
        session.begin("look", f"Look for {name} on {fold([node.name for node in nodes])}")
        stores = query_stores(locked, nodes, scratch=scratch, local=local)
        plan = plan_image(
            name,
            stores,
            source=THIS_MACHINE if local else source or "",
            targets=[node.name for node in target_nodes],
        )
        if call.dry_run:
            _print_plan(plan)
        else:
            image_copy = _ImageCopy(locked, plan, stores, scratch=scratch)
            image_copy.run(CopyOptions(cached=True, **limits))


@command(
    flags=[options.DRY_RUN, options.LOCK_WAIT, options.JSON],
    short_help="Pull an image from its registry on one node, then copy it to all",
)
@click.argument("image", required=False)
@click.option(
    "--on", "fetcher", metavar="NODE", help="Node that pulls the image (default: the head)."
)
@_transfer_options
def pull(
    call: CommandContext,
    image: str | None,
    fetcher: str | None,
    targets: tuple[str, ...],
    scratch: str,
    **limits: Any,
) -> None:
    """Pull IMAGE, by default the inventory's, on one node with its Docker and its `docker login`;
    then copy it to the others as `vlaunch image copy` does.

    If the tag has moved to a new image, nodes with the old one get the new one.
    """
    name = image or call.inventory.image
    target_nodes = select_nodes(call.inventory, targets)
    (puller,) = select_nodes(call.inventory, [fetcher or call.inventory.head.name])
    nodes = [node for node in call.inventory.nodes if node in target_nodes or node is puller]
    with call.session(nodes=nodes) as session, call.locked(session) as locked:
        if call.dry_run:
            click.echo(f"{puller.name} would pull {name}")
            receivers = [node.name for node in nodes if node is not puller]
            click.echo(f"  {fold(receivers)} would get it")
            return
        pull_image(locked, puller, name)
        stores = query_stores(locked, nodes, scratch=scratch)
        names = [node.name for node in target_nodes]
        plan = plan_image(name, stores, source=puller.name, targets=names)
        _ImageCopy(locked, plan, stores, scratch=scratch).run(CopyOptions(cached=True, **limits))


def pull_image(session: Session, node: Node, name: str) -> None:
    """Have a node pull an image; raises NodeError."""
    session.begin("pull", f"Pull {name} on {node.name}")
    session.wait("pull", "docker pull", deadline=_PULL_TIMEOUT)
    before = session.transport.record("image pull", {node.name: [f"pulling {name}"]})
    command = Command(
        node=node.name,
        argv=docker.pull(node.docker, name),
        timeout=_PULL_TIMEOUT,
        preamble=before[node.name],
    )
    (answer,) = session.transport.run([command])
    if not answer.ok:
        raise NodeError(
            node.name,
            f"cannot pull {name}",
            evidence=answer.tail,
            hint="try another node with `--on NODE`, or copy it from this machine: `vlaunch"
            f" image copy {name} --local`",
        )
    session.step("pull", "pulled", node=node.name, seconds=answer.seconds)


def copy_to_all(session: Session, name: str) -> None:
    """Copy an image from one node to all, as a part of another command; raises like `copy`."""
    nodes = session.inventory.nodes
    session.begin("look", f"Look for {name} on {fold([node.name for node in nodes])}")
    stores = query_stores(session, nodes)
    image_copy = _ImageCopy(session, plan_image(name, stores), stores)
    image_copy.run(CopyOptions(cached=True), last=False)


def query_stores(
    session: Session, nodes: Sequence[Node], *, scratch: str = SCRATCH, local: bool = False
) -> dict[str, ImageStore]:
    """Query Docker on every node, and on this machine, for its images; raises NodeError."""
    cluster = session.inventory.cluster

    def query(name: str, docker: Argv) -> Command:
        folder = _folder_name(name)
        argv = image_store.query_argv(docker, cluster=cluster, node=folder, scratch=scratch)
        return Command(node=name, argv=argv, timeout=_QUERY_TIMEOUT)

    answers = [session.fleet.run_local(query(THIS_MACHINE, _DOCKER))] if local else []
    answers += session.transport.run([query(node.name, node.docker) for node in nodes])
    stores: dict[str, ImageStore] = {}
    errors = []
    for answer in answers:
        try:
            stores[answer.node] = image_store.parse_store(
                answer.out, cluster=cluster, node=_folder_name(answer.node), scratch=scratch
            )
        except UnreadableAnswer as error:
            evidence = answer.tail or error.evidence
            errors.append(NodeError(answer.node, error.message, evidence=evidence))
    if errors:
        raise combine_errors(errors)
    order = [THIS_MACHINE, *(node.name for node in nodes)]
    return {name: stores[name] for name in order if name in stores}


def _folder_name(name: str) -> str:
    return name.replace(" ", "-")


def _format_layers(count: int) -> str:
    return f"{count} layer{'s' * (count != 1)}"


def _print_plan(plan: ImagePlan) -> None:
    """Print a plan, for a dry run."""
    size, layers = format_size(plan.image.size), len(plan.image.layers)
    click.echo(f"{plan.name}: {size} in {_format_layers(layers)}, from {plan.source}")
    missing = _format_layers(layers - plan.common_layers)
    before = plan.source
    for name in plan.receivers:
        click.echo(f"  {name} would get {missing}, from {before}")
        before = name
    for name in plan.unnamed:
        click.echo(f"  {name} has it under another name, and would get this name, too")
    if complete := [name for name in plan.complete_nodes if name != plan.source]:
        click.echo(f"  {fold(complete)} has it already")


class _ImageCopy:
    """Copy of an image: an export, a copy of its files, and a comparison of the loaded images."""

    def __init__(
        self,
        session: Session,
        plan: ImagePlan,
        stores: Mapping[str, ImageStore],
        *,
        scratch: str = SCRATCH,
    ) -> None:
        self._session, self._plan, self._stores, self._scratch = session, plan, stores, scratch
        self._failed: dict[str, str] = {}
        self._received: dict[str, int] = {}

    def run(self, options: CopyOptions, *, last: bool = True) -> None:
        """Copy the image and show the result, as the command's if it is its `last` step; raises
        LockError, and NodeError for nodes without the image.
        """
        plan, began = self._plan, time.monotonic()
        if not plan.targets:
            names = [name for name in plan.complete_nodes if name != THIS_MACHINE]
            copies.report_unchanged(self._session, plan.name, names)
            return
        self._tag_images()
        if plan.receivers:
            self._copy_files(options)
        self._compare_images()
        if plan.receivers and not self._failed:  # else the same command resumes from the export
            root, top = self._location(plan.source).root, self._stores[plan.source].top
            self._run_program(plan.source, chain.drop_request(root, top), _QUERY_TIMEOUT)
        updated = {name for name in plan.targets if name not in self._failed}
        complete = updated | {*plan.complete_nodes} - {THIS_MACHINE}
        names = [name for name in plan.all_nodes if name in complete]
        data = {
            "nodes": names,
            "failed": self._failed,
            "received": self._received,
            "changed": len(updated),
        }
        size = format_size(max(self._received.values(), default=0))
        text = f"{plan.name} is on {fold(names) or 'no node'}: at most {size} sent to a node"
        seconds = time.monotonic() - began
        copies.report_result(self._session, plan.name, data, text=text, seconds=seconds, last=last)

    def _tag_images(self) -> None:
        """Tag the image on nodes that have it under other names."""
        plan, transport = self._plan, self._session.transport
        changes = {name: [f"naming {plan.name}"] for name in plan.unnamed}
        before = transport.record("image copy", changes)
        commands = [
            Command(
                node=name,
                argv=docker.tag(self._docker_argv(name), id_, plan.tagged_name),
                preamble=before[name],
            )
            for name, id_ in plan.unnamed.items()
        ]
        for answer in transport.run(commands):
            if not answer.ok:
                self._failed[answer.node] = answer.tail

    def _copy_files(self, options: CopyOptions) -> None:
        """Export the image, and copy its files; each target loads them into its Docker."""
        plan = self._plan
        copy_plan = plan_files(plan, self._export_image())
        check_targets(plan, copy_plan, self._stores)
        locations = {name: self._location(name) for name in (plan.source, *plan.receivers)}
        result = copies.run_copy(self._session, "image copy", copy_plan, locations, options)
        self._failed.update(result.failed)
        for name in plan.receivers:
            self._received[name] = result.members[name].received
            if name not in result.failed:
                text = f"{format_size(self._received[name])} received and loaded into Docker"
                self._session.step("copy", text, node=name, seconds=result.seconds)

    def _export_image(self) -> Exported:
        """Have the source's Docker save the image into files; raises NodeError."""
        plan, session = self._plan, self._session
        store = self._stores[plan.source]
        need = check_source(plan, store)
        subject = f"{plan.name}, {format_size(plan.image.size)}"
        session.begin("export", f"Export {subject}, from the Docker of {plan.source}")
        session.wait("export", "docker save", deadline=_EXPORT_TIMEOUT)
        request = chain.export_request(
            self._docker_argv(plan.source),
            image=plan.tagged_name,
            id_=plan.image.identity,
            root=self._location(plan.source).root,
            top=store.top,
            need=need,
        )
        answer = self._run_program(plan.source, request, _EXPORT_TIMEOUT)
        try:
            exported = chain.parse_exported(answer)
        except UnreadableAnswer as error:
            raise NodeError(
                plan.source,
                "the image cannot be exported",
                evidence=[chain.failure_reason(error), error.evidence],
                hint=f"try it there: `docker save {plan.name} >/dev/null`",
            ) from None
        size = format_size(sum(row[1] for row in exported.files))
        text = f"{_format_layers(len(exported.layers))}, {size}"
        session.step("export", text, node=plan.source, seconds=answer.seconds)
        return exported

    def _compare_images(self) -> None:
        """Compare the image in every target's Docker with the source's."""
        updated = [name for name in self._plan.targets if name not in self._failed]
        nodes = [self._session.inventory.node(name) for name in updated]
        for name, store in query_stores(self._session, nodes, scratch=self._scratch).items():
            image = store.find_image(self._plan.name)
            if image is None or image.identity != self._plan.image.identity:
                self._failed[name] = "Docker loaded another image, or none, under this name"

    def _run_program(self, name: str, request: Mapping[str, Any], timeout: float) -> Answer:
        """Run a node's program, and return its answer."""
        runtime = self._location(name).runtime
        command = members.program_command(name, runtime, request, timeout=timeout)
        if name == THIS_MACHINE:
            return self._session.fleet.run_local(command)
        (answer,) = self._session.transport.run([command])
        return answer

    def _docker_argv(self, name: str) -> Argv:
        return _DOCKER if name == THIS_MACHINE else self._session.inventory.node(name).docker

    def _location(self, name: str) -> CopyLocation:
        """Return a node's staging folder, and the runtime of its program: the node's own Python,
        because the program must reach Docker, and the node may have no image yet.
        """
        inventory, store = self._session.inventory, self._stores[name]
        choose_runtime = copies.local_runtime if name == THIS_MACHINE else chain.node_runtime
        return CopyLocation(
            runtime=choose_runtime(inventory),
            root=f"{store.folder}/{self._plan.image.identity[:16]}",
            load=chain.load_fields(self._docker_argv(name), top=store.top),
        )
