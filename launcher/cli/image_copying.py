"""A copy of an image as a command runs it: it is taken out of one Docker, goes along a chain for
each set of missing layers, is given to every other Docker, and compared.
"""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from launcher.cli.model_copying import STREAMS
from launcher.cli.session import Session
from launcher.errors import NodeError, UnreadableAnswer, together
from launcher.model import Answer, Argv, Node, fold
from launcher.payload.chain.archive import Image
from launcher.plan import image_copying as plans
from launcher.plan import members
from launcher.plan.image_copying import Group, ImageCopying
from launcher.plan.members import Connections, Part
from launcher.sizes import told
from launcher.spread import spread
from launcher.tools import chain, docker, image_copy, image_store
from launcher.tools.image_store import SCRATCH, Store
from launcher.transport import Command

_LOOK = 120.0  # seconds
_EXPORT = 7200.0  # seconds; 50 GB at 7 MB/s
_DAY = 86400.0
_DOCKER: Argv = ("docker",)  # this machine's


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What a copy is besides asked: bytes a second of each node (0: as many as go), where what is
    on its way lies, and whether the copy is all that the command does.
    """

    rate: int = 0
    scratch: str = SCRATCH
    alone: bool = True


def look(
    session: Session, nodes: Sequence[Node], *, scratch: str = SCRATCH, here: bool = False
) -> dict[str, Store]:
    """Ask Docker on every node, and on this machine, for its images; raises NodeError."""
    cluster = session.inventory.cluster
    answers = list(
        session.transport.run(
            [
                Command(
                    node=node.name,
                    argv=image_store.ask(
                        node.docker, cluster=cluster, node=node.name, scratch=scratch
                    ),
                    timeout=_LOOK,
                )
                for node in nodes
            ]
        )
    )
    if here:
        argv = image_store.ask(_DOCKER, cluster=cluster, node=_folder(chain.HERE), scratch=scratch)
        answers.append(session.fleet.run_here(Command(node=chain.HERE, argv=argv, timeout=_LOOK)))
    found: dict[str, Store] = {}
    failed = []
    for answer in answers:
        try:
            found[answer.node] = image_store.parse(
                answer.out, cluster=cluster, node=_folder(answer.node), scratch=scratch
            )
        except UnreadableAnswer as error:
            failed.append(
                NodeError(answer.node, error.message, evidence=answer.tail or error.evidence)
            )
    if failed:
        raise together(failed)
    order = [chain.HERE, *(node.name for node in nodes)]
    return {name: found[name] for name in order if name in found}


def _folder(name: str) -> str:
    return name.replace(" ", "-")


def _layers(count: int) -> str:
    return f"{count} layer{'s' * (count != 1)}"


def print_plan(copying: ImageCopying) -> None:
    """Print what would be done."""
    layers = len(copying.image.layers)
    size = told(copying.image.size)
    click.echo(f"{copying.name}: {size} in {_layers(layers)}, from {copying.source}")
    for group in copying.groups:
        before = copying.source
        for name in group.targets:
            click.echo(f"  {name} gets {_layers(layers - group.has)} that it lacks from {before}")
            before = name
    for name in copying.unnamed:
        click.echo(f"  {name} has it under another name, and would call it so, too")
    if there := [name for name in copying.complete if name != copying.source]:
        click.echo(f"  {fold(there)} has it already")


def bring(
    session: Session, copying: ImageCopying, seen: Mapping[str, Store], wishes: Wishes
) -> None:
    """Bring an image where it lacks, and tell what came of it; raises NodeError for the nodes that
    do not have it then, and LockError.
    """
    if not copying.targets:
        there = fold([name for name in copying.complete if name != chain.HERE])
        text = f"{copying.name} is on {there} already; there was nothing to copy"
        session.done(text, stage="copy", data={"changed": 0})
        return
    _Bringing(session, copying, seen, wishes).run()


class _Bringing:
    def __init__(
        self, session: Session, copying: ImageCopying, seen: Mapping[str, Store], wishes: Wishes
    ) -> None:
        self._session, self._copying, self._seen = session, copying, seen
        self._wishes = wishes
        self._id = copying.image.identity[:16]
        self._failed: dict[str, str] = {}
        self._received: dict[str, int] = {}
        words = {name: [f"copying {copying.name}"] for name in copying.targets}
        self._before = dict(session.transport.record("image push", words))

    def run(self) -> None:
        copying, began = self._copying, time.monotonic()
        self._name()
        if copying.groups:
            image = self._export()
            plans.check_targets(copying, image, self._seen)
            for group in copying.groups:
                self._spread(image, group)
        self._compare()
        if copying.groups and not self._failed:  # else the same command goes on with it
            root, top = self._root(copying.source), self._top(copying.source)
            self._ask(copying.source, image_copy.drop(root, top))
        self._tell(time.monotonic() - began)

    def _name(self) -> None:
        """Give the image its name where it lies under other ones alone."""
        commands = [
            Command(
                node=name,
                argv=docker.tag(self._docker(name), id_, self._copying.names[0]),
                before=self._before.pop(name, ()),
            )
            for name, id_ in self._copying.unnamed.items()
        ]
        for answer in self._session.transport.run(commands):
            if not answer.ok:
                self._failed[answer.node] = answer.tail

    # --- the source

    def _export(self) -> Image:
        """Take the image out of the source's Docker."""
        copying, source = self._copying, self._copying.source
        session = self._session
        need = plans.check_export(copying, self._seen[source])
        what = f"{copying.name}, {told(copying.image.size)}"
        session.begin("export", f"Take {what}, out of the Docker of {source}")
        session.wait("export", "docker save", deadline=_EXPORT)
        request = image_copy.export(
            self._docker(source),
            image=copying.name,
            id_=copying.image.identity,
            root=self._root(source),
            top=self._top(source),
            need=need,
        )
        answer = self._ask(source, request, timeout=_EXPORT)
        try:
            image = image_copy.parse_export(answer)
        except UnreadableAnswer as error:
            hint = f"try it there: `docker save {copying.name} >/dev/null`"
            why = [image_copy.why(error), error.evidence]
            raise NodeError(source, "the image cannot be read", evidence=why, hint=hint) from None
        size = sum(each.size for each in image.layers)
        layers = _layers(len(image.layers))
        text = f"{layers}, {told(size)}, each with the digest that it should have"
        session.step("export", text, node=source, seconds=answer.seconds)
        return image

    def _ask(self, name: str, request: Mapping[str, Any], *, timeout: float = _LOOK) -> Answer:
        """Run a program to its end."""
        command = self._command(name, request, timeout=timeout)
        if name == chain.HERE:
            return self._session.fleet.run_here(command)
        (answer,) = self._session.transport.run([command])
        return answer

    # --- the chain

    def _spread(self, image: Image, group: Group) -> None:
        copying, session = self._copying, self._session
        manifest = plans.manifest(image, group.has)
        layers = len(image.layers) - group.has
        what = f"{copying.name}: {layers} of {_layers(len(image.layers))}, {told(manifest.bytes)}"
        session.begin("copy", f"Copy {what}, from {copying.source}")
        session.note("copy", f"order: {' → '.join((copying.source, *group.targets))}")
        parts = self._parts(image, group)
        came = session.show(spread(parts, self._connections(), total=manifest.bytes))
        self._failed.update(came.failed)
        for name in group.targets:
            each = came.members[name]
            self._received[name] = each.received
            if not each.failed:
                text = f"{told(each.received)} received, and given to Docker"
                session.step("copy", text, node=name, seconds=came.seconds)

    def _parts(self, image: Image, group: Group) -> list[Part]:
        from launcher.remote import certificate

        copying, inventory = self._copying, self._session.inventory
        common: dict[str, Any] = {
            "manifest": plans.manifest(image, group.has),
            "key": secrets.token_hex(32),
            "streams": STREAMS,
            "rate": self._wishes.rate,
            "cached": True,  # Docker reads it at once, and then it is removed
            "cipher": None if inventory.private else certificate.make(),
        }
        parts = []
        for name in (copying.source, *group.targets):
            here = name == chain.HERE
            source = name == copying.source
            load = image_copy.load(self._docker(name), image, copying.names, top=self._top(name))
            request = chain.copy(
                node=name,
                root=self._root(name),
                listen=None if here else (inventory.node(name).ip, inventory.ports.copy),
                source=source,
                load=None if source else load,
                **common,
            )
            command = self._command(name, request, timeout=_DAY, talk=True)
            host = "" if here else inventory.node(name).ip
            parts.append(Part(name=name, command=command, host=host, gives=here))
        return parts

    def _connections(self) -> Connections:
        session, source = self._session, self._copying.source

        def tunnel(name: str, port: int) -> int:
            return session.fleet.forward(name, session.inventory.node(name).ip, port).port

        def hold(command: Command) -> Any:
            here = command.node == source == chain.HERE
            return session.fleet.hold_here(command) if here else session.fleet.hold(command)

        def check() -> None:
            """Stop when the lock is lost."""
            list(session.transport.run(()))

        return Connections(hold=hold, tunnel=tunnel, check=check)

    # --- the end

    def _compare(self) -> None:
        """Compare what every Docker has now with the source's image."""
        done = [name for name in self._copying.targets if name not in self._failed]
        nodes = [self._session.inventory.node(name) for name in done]
        wanted = self._copying.image.identity
        for name, store in look(self._session, nodes, scratch=self._wishes.scratch).items():
            found = store.image(self._copying.name)
            if found is None or found.identity != wanted:
                self._failed[name] = "Docker took it, and has another image or none of this name"

    def _tell(self, seconds: float) -> None:
        copying = self._copying
        done = {name for name in copying.targets if name not in self._failed}
        there = [name for name in copying.order if name in done | {*copying.complete}]
        names = [name for name in there if name != chain.HERE]
        most = max(self._received.values(), default=0)
        text = f"{copying.name} is on {fold(names) or 'no node'}: at most {told(most)} for one"
        data = {
            "nodes": names,
            "failed": self._failed,
            "received": self._received,
            "changed": len(done),
        }
        state: Any = "failed" if self._failed else "ok"
        if self._wishes.alone:
            self._session.done(text, stage="copy", state=state, seconds=seconds, data=data)
        else:
            self._session.note("copy", text, state=state, data=data)
        if self._failed:
            raise together(
                [
                    NodeError(
                        name,
                        f"does not have {copying.name}",
                        evidence=why,
                        hint="the same command goes on where it was",
                    )
                    for name, why in self._failed.items()
                ],
                f"does not have {copying.name}",
            )

    # --- a node's own

    def _docker(self, name: str) -> Argv:
        return _DOCKER if name == chain.HERE else self._session.inventory.node(name).docker

    def _top(self, name: str) -> str:
        return self._seen[name].top

    def _root(self, name: str) -> str:
        return f"{self._seen[name].folder}/{self._id}"

    def _command(
        self, name: str, request: Mapping[str, Any], *, timeout: float, talk: bool = False
    ) -> Command:
        before = self._before.pop(name, ()) if talk else ()
        return program(self._session, name, request, timeout=timeout, before=before, talk=talk)


def program(
    session: Session,
    name: str,
    request: Mapping[str, Any],
    *,
    timeout: float,
    before: Argv = (),
    talk: bool = False,
) -> Command:
    """Return the command that runs the program of a node, or of this machine (`chain.HERE`): with
    their own Python, for it must reach Docker, and there may be no image yet.
    """
    where = chain.on_node(session.inventory)
    if name == chain.HERE:
        where = replace(where, argv=(sys.executable, *where.argv[1:]))
    return members.command(name, where, request, timeout=timeout, before=before, talk=talk)
