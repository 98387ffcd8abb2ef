"""`vlaunch image copy` and `pull`: an image from one Docker to those of all nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from launcher.app import options
from launcher.app.choose import chosen
from launcher.app.command import Call, command
from launcher.app.session import Session
from launcher.core.domain import Answer, Argv, Node, fold
from launcher.core.errors import NodeError, UnreadableAnswer, together
from launcher.core.sizes import told
from launcher.core.transport import Command
from launcher.distribute import chain, image_store, members
from launcher.distribute import copying as copies
from launcher.distribute.chain import HERE, Exported
from launcher.distribute.copying import Options, Place
from launcher.distribute.image_plan import (
    ImagePlan,
    check_source,
    check_targets,
    plan_files,
    plan_image,
)
from launcher.distribute.image_store import SCRATCH, Store
from launcher.distribute.model_copy import SOURCE, transfer
from launcher.tools import docker

_LOOK = 120.0  # seconds
_PULL = 3600.0  # seconds, as `up` waits
_EXPORT = 7200.0  # seconds; 50 GB at 7 MB/s
_DOCKER: Argv = ("docker",)  # this machine's


def _scratch(_: click.Context, __: click.Parameter, value: str) -> str:
    if not value.startswith("/") or "\0" in value:
        raise click.BadParameter("should be the path of a folder on the nodes, such as /var/tmp")
    return value.rstrip("/") or "/"


def _transfer(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags of a transfer, and `scratch`."""
    return click.option(
        "--scratch",
        default=SCRATCH,
        show_default=True,
        callback=_scratch,
        metavar="FOLDER",
        help="Staging folder on each node.",
    )(transfer(function))


@command(
    flags=[options.DRY_RUN, options.LOCK_WAIT, options.JSON],
    short_help="Copy an image from a node or this machine to all nodes",
)
@click.argument("image", required=False)
@SOURCE
@click.option("--here", is_flag=True, help="Copy from this machine's Docker.")
@_transfer
def copy(
    call: Call,
    image: str | None,
    source: str | None,
    here: bool,
    targets: tuple[str, ...],
    scratch: str,
    **limits: Any,
) -> None:
    """Copy IMAGE, by default the inventory's, from one Docker to those of all nodes, without a
    registry. Each node passes on what it has received to the next one, so all have it in about the
    time of one copy.

    Layers that all these nodes have are not sent. Every byte is compared on every node, Docker
    compares every layer with its digest, and at the end all images are compared with the source's.
    A node that fails stops no other. After an interruption, the same command continues the copy.
    """
    if source and here:
        raise click.UsageError("--from names a node, --here is this machine: use one of them")
    name = image or call.inventory.image
    wanted = chosen(call.inventory, targets)
    givers = () if here else chosen(call.inventory, [source] if source else [])
    asked = [node for node in call.inventory.nodes if node in wanted or node in givers]
    with call.session(nodes=asked) as session, call.locked(session) as ours:
        session.begin("look", f"Look for {name} on {fold([node.name for node in asked])}")
        seen = look(ours, asked, scratch=scratch, here=here)
        plan = plan_image(
            name,
            seen,
            source=HERE if here else source or "",
            targets=[node.name for node in wanted],
        )
        if call.dry_run:
            _print(plan)
        else:
            _Copy(ours, plan, seen, scratch=scratch).run(Options(cached=True, **limits))


@command(
    flags=[options.DRY_RUN, options.LOCK_WAIT, options.JSON],
    short_help="Pull an image from its registry on one node, then copy it to all",
)
@click.argument("image", required=False)
@click.option("-n", "--node", "fetcher", metavar="NAME", help="The node that pulls (the head).")
@_transfer
def pull(
    call: Call,
    image: str | None,
    fetcher: str | None,
    targets: tuple[str, ...],
    scratch: str,
    **limits: Any,
) -> None:
    """Pull IMAGE, by default the inventory's, on one node with its Docker and its `docker login`;
    then copy it to the others as `vlaunch image copy` does.

    Where the tag means another image by now than what nodes have, they get the new one.
    """
    name = image or call.inventory.image
    wanted = chosen(call.inventory, targets)
    (node,) = chosen(call.inventory, [fetcher or call.inventory.head.name])
    asked = [each for each in call.inventory.nodes if each in wanted or each is node]
    with call.session(nodes=asked) as session, call.locked(session) as ours:
        if call.dry_run:
            click.echo(f"{node.name} would pull {name}")
            click.echo(f"  {fold([each.name for each in asked if each is not node])} would get it")
            return
        fetch(ours, node, name)
        seen = look(ours, asked, scratch=scratch)
        plan = plan_image(name, seen, source=node.name, targets=[each.name for each in wanted])
        _Copy(ours, plan, seen, scratch=scratch).run(Options(cached=True, **limits))


def fetch(session: Session, node: Node, name: str) -> None:
    """Have a node pull an image; raises NodeError."""
    session.begin("pull", f"Pull {name} on {node.name}")
    session.wait("pull", "docker pull", deadline=_PULL)
    before = session.transport.record("image pull", {node.name: [f"pulling {name}"]})
    pulling = Command(
        node=node.name,
        argv=docker.pull(node.docker, name),
        timeout=_PULL,
        before=before[node.name],
    )
    (answer,) = session.transport.run([pulling])
    if not answer.ok:
        raise NodeError(
            node.name,
            f"cannot pull {name}",
            evidence=answer.tail,
            hint="try another node: `--node NAME`; or copy it from this machine: `vlaunch image"
            f" copy {name} --here`",
        )
    session.step("pull", "pulled", node=node.name, seconds=answer.seconds)


def everywhere(session: Session, name: str) -> None:
    """Copy an image that one node has to all, as a part of another command; raises what `vlaunch
    image copy` does.
    """
    nodes = session.inventory.nodes
    session.begin("look", f"Look for {name} on {fold([node.name for node in nodes])}")
    seen = look(session, nodes)
    copying = _Copy(session, plan_image(name, seen), seen)
    copying.run(Options(cached=True), last=False)


def look(
    session: Session, nodes: Sequence[Node], *, scratch: str = SCRATCH, here: bool = False
) -> dict[str, Store]:
    """Query Docker on every node, and on this machine, for its images; raises NodeError."""
    cluster = session.inventory.cluster

    def question(name: str, docker: Argv) -> Command:
        argv = image_store.ask(docker, cluster=cluster, node=_folder(name), scratch=scratch)
        return Command(node=name, argv=argv, timeout=_LOOK)

    answers = [session.fleet.run_here(question(HERE, _DOCKER))] if here else []
    answers += session.transport.run([question(node.name, node.docker) for node in nodes])
    stores: dict[str, Store] = {}
    failed = []
    for answer in answers:
        try:
            stores[answer.node] = image_store.parse(
                answer.out, cluster=cluster, node=_folder(answer.node), scratch=scratch
            )
        except UnreadableAnswer as error:
            evidence = answer.tail or error.evidence
            failed.append(NodeError(answer.node, error.message, evidence=evidence))
    if failed:
        raise together(failed)
    order = [HERE, *(node.name for node in nodes)]
    return {name: stores[name] for name in order if name in stores}


def _folder(name: str) -> str:
    return name.replace(" ", "-")


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count != 1)}"


def _print(plan: ImagePlan) -> None:
    """Print what would be done."""
    layers = len(plan.image.layers)
    click.echo(f"{plan.name}: {told(plan.image.size)} in {_layers(layers)}, from {plan.source}")
    before = plan.source
    for name in plan.lacking:
        click.echo(f"  {name} would get {_layers(layers - plan.has)}, from {before}")
        before = name
    for name in plan.unnamed:
        click.echo(f"  {name} has it under another name, and would get this one, too")
    if there := [name for name in plan.complete if name != plan.source]:
        click.echo(f"  {fold(there)} has it already")


class _Copy:
    """A copy of an image: its export, the copy of its files, and a comparison of all Dockers."""

    def __init__(
        self,
        session: Session,
        plan: ImagePlan,
        seen: Mapping[str, Store],
        *,
        scratch: str = SCRATCH,
    ) -> None:
        self._session, self._plan, self._seen, self._scratch = session, plan, seen, scratch
        self._failed: dict[str, str] = {}
        self._received: dict[str, int] = {}

    def run(self, given: Options, *, last: bool = True) -> None:
        """Copy, and show the result; raises NodeError for nodes that do not have it, and LockError.
        `last`: whether the command ends with it.
        """
        plan, began = self._plan, time.monotonic()
        if not plan.targets:
            names = [name for name in plan.complete if name != HERE]
            copies.nothing(self._session, plan.name, names)
            return
        self._tag()
        if plan.lacking:
            self._files(given)
        self._compare()
        if plan.lacking and not self._failed:  # else the same command continues with it
            place = self._place(plan.source)
            self._ask(plan.source, chain.drop(place.root, self._seen[plan.source].top), _LOOK)
        done = {name for name in plan.targets if name not in self._failed}
        there = done | {*plan.complete} - {HERE}
        names = [name for name in plan.order if name in there]
        data = {
            "nodes": names,
            "failed": self._failed,
            "received": self._received,
            "changed": len(done),
        }
        most = max(self._received.values(), default=0)
        text = f"{plan.name} is on {fold(names) or 'no node'}: at most {told(most)} for one"
        seconds = time.monotonic() - began
        copies.report(self._session, plan.name, data, text=text, seconds=seconds, last=last)

    def _tag(self) -> None:
        """Give the image its name where Docker has it under other ones."""
        plan, transport = self._plan, self._session.transport
        changes = {name: [f"naming {plan.name}"] for name in plan.unnamed}
        before = transport.record("image copy", changes)
        commands = [
            Command(
                node=name,
                argv=docker.tag(self._docker(name), id_, plan.tagged),
                before=before[name],
            )
            for name, id_ in plan.unnamed.items()
        ]
        for answer in transport.run(commands):
            if not answer.ok:
                self._failed[answer.node] = answer.tail

    def _files(self, given: Options) -> None:
        """Export the image, and copy its files, which each target gives to its Docker."""
        plan = self._plan
        copying = plan_files(plan, self._export())
        check_targets(plan, copying, self._seen)
        places = {name: self._place(name) for name in (plan.source, *plan.lacking)}
        came = copies.run(self._session, "image copy", copying, places, given)
        self._failed.update(came.failed)
        for name in plan.lacking:
            self._received[name] = came.members[name].received
            if name not in came.failed:
                text = f"{told(self._received[name])} received, and given to Docker"
                self._session.step("copy", text, node=name, seconds=came.seconds)

    def _export(self) -> Exported:
        """Have the source's Docker save the image into files; raises NodeError."""
        plan, session = self._plan, self._session
        store = self._seen[plan.source]
        need = check_source(plan, store)
        what = f"{plan.name}, {told(plan.image.size)}"
        session.begin("export", f"Export {what}, from the Docker of {plan.source}")
        session.wait("export", "docker save", deadline=_EXPORT)
        request = chain.export(
            self._docker(plan.source),
            image=plan.tagged,
            id_=plan.image.identity,
            root=self._place(plan.source).root,
            top=store.top,
            need=need,
        )
        answer = self._ask(plan.source, request, _EXPORT)
        try:
            exported = chain.parse_exported(answer)
        except UnreadableAnswer as error:
            raise NodeError(
                plan.source,
                "the image cannot be exported",
                evidence=[chain.reason(error), error.evidence],
                hint=f"try it there: `docker save {plan.name} >/dev/null`",
            ) from None
        size = told(sum(row[1] for row in exported.files))
        text = f"{_layers(len(exported.layers))}, {size}"
        session.step("export", text, node=plan.source, seconds=answer.seconds)
        return exported

    def _compare(self) -> None:
        """Compare what every Docker has now with the source's image."""
        done = [name for name in self._plan.targets if name not in self._failed]
        nodes = [self._session.inventory.node(name) for name in done]
        for name, store in look(self._session, nodes, scratch=self._scratch).items():
            found = store.image(self._plan.name)
            if found is None or found.identity != self._plan.image.identity:
                self._failed[name] = "Docker took it, and has another image or none of this name"

    def _ask(self, name: str, request: Mapping[str, Any], timeout: float) -> Answer:
        """Run a node's program to its end."""
        command = members.command(name, self._place(name).where, request, timeout=timeout)
        if name == HERE:
            return self._session.fleet.run_here(command)
        (answer,) = self._session.transport.run([command])
        return answer

    def _docker(self, name: str) -> Argv:

        return _DOCKER if name == HERE else self._session.inventory.node(name).docker

    def _place(self, name: str) -> Place:
        """Return where files are staged. The node's own Python runs the program, for it must reach
        Docker, and there may be no image yet.
        """
        inventory, store = self._session.inventory, self._seen[name]
        return Place(
            where=copies.on_here(inventory) if name == HERE else chain.on_node(inventory),
            root=f"{store.folder}/{self._plan.image.identity[:16]}",
            load=chain.load(self._docker(name), top=store.top),
        )
