"""`vlaunch model pull`: download a model on one node, then copy it to the others."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from launcher.app import options
from launcher.app.choose import chosen
from launcher.app.command import Call, command
from launcher.app.secrets import resolve
from launcher.app.session import Session
from launcher.core.domain import Answer, Inventory, Node, Secret, fold
from launcher.core.errors import NodeError, UnreadableAnswer, VlaunchError
from launcher.core.sizes import told
from launcher.distribute import chain, model_copy
from launcher.distribute.chain import Resolved, Said
from launcher.distribute.copying import Options
from launcher.distribute.file_filter import FileFilter, choose, holders, missing
from launcher.distribute.model_copy import REVISION, look, transfer
from launcher.distribute.model_plan import check_room, plan_copy
from launcher.distribute.model_programs import Programs

_RESOLVE = 120.0  # seconds
_STALLED = 300.0  # seconds without a byte; Hugging Face's client retries for a while
_TELL = 10.0
_MAIN = "main"
_HINTS = {
    "GatedRepoError": "ask for access on the model's page, and give a token that has it:"
    " `secrets: {HF_TOKEN: {env: HF_TOKEN}}`",
    "RepositoryNotFoundError": "is the name right? A private model needs a token:"
    " `secrets: {HF_TOKEN: {env: HF_TOKEN}}`",
    "RevisionNotFoundError": "see the model's branches and commits on its page",
    "huggingface_hub": "the cluster's image brings it: run `vlaunch up`, or name a node that has"
    " the image with `--node`",
}
_OFFLINE = (
    "does that node reach the hub? Proxies and HF_ENDPOINT come from `env:` of the inventory; a"
    " model that is downloaded elsewhere is brought with `vlaunch model copy`"
)


@command(
    flags=[options.DRY_RUN, options.LOCK_WAIT, options.JSON],
    short_help="Download a model on one node, then copy it to all",
)
@click.argument("name", metavar="MODEL")
@click.option("-n", "--node", metavar="NAME", help="The node that downloads (the head).")
@REVISION
@click.option("--include", multiple=True, metavar="PATTERN", help="Only files like *.json.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="No files like these.")
@click.option("--all-files", "every", is_flag=True, help="Weights in other forms, too.")
@transfer
def pull(
    call: Call,
    name: str,
    node: str | None,
    targets: tuple[str, ...],
    revision: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    every: bool,
    **limits: Any,
) -> None:
    """Download MODEL from Hugging Face on one node, with the client and the token of the cluster
    (`secrets: {HF_TOKEN: …}`), then copy it from node to node.

    Only safetensors weights are downloaded unless you ask for others. Files that a node has are
    copied from it instead. After an interruption, the same command continues with the files that
    are incomplete.
    """
    if name.startswith((".", "/", "~")):
        raise click.UsageError("a folder is not downloaded: see `vlaunch model copy --help`")
    inventory = call.inventory
    wanted = chosen(inventory, targets)
    fetcher = chosen(inventory, [node])[0] if node else _default(inventory, wanted)
    files = FileFilter(include=include, exclude=exclude, every=every)
    asked = [each for each in inventory.nodes if each in wanted or each is fetcher]
    with call.session(nodes=asked) as session, call.locked(session) as ours:
        pulling = _Pull(look(ours, asked, name), fetcher, name, revision)
        pulling.run(wanted, files, Options(**limits), dry_run=call.dry_run)


def download(session: Session, name: str, nodes: Sequence[Node], given: Options) -> None:
    """Download a model on one of `nodes` and copy it to the others, as a part of another command.
    Raises what the command does.
    """
    fetcher = _default(session.inventory, nodes)
    pulling = _Pull(look(session, nodes, name), fetcher, name, "")
    pulling.run(nodes, FileFilter(), given, last=False)


def _default(inventory: Inventory, wanted: Sequence[Node]) -> Node:
    return inventory.head if inventory.head in wanted else wanted[0]


def _token(inventory: Inventory) -> Secret | None:
    """Fetch the token, where the inventory names one; raises RequestError."""
    source = {name: each for name, each in inventory.secrets.items() if name == "HF_TOKEN"}
    return resolve(source, inventory.path.parent).get("HF_TOKEN")


def _refused(node: str, name: str, why: str, evidence: str = "") -> NodeError:
    hint = next((hint for word, hint in _HINTS.items() if word in why), _OFFLINE)
    return NodeError(node, f"cannot download {name}", evidence=[why, evidence], hint=hint)


class _Pull:
    """A download on the node `fetcher`, and the copy that follows it."""

    def __init__(self, programs: Programs, fetcher: Node, name: str, revision: str) -> None:
        self._programs, self._session = programs, programs.session
        self._fetcher, self._name, self._revision = fetcher, name, revision
        self._token = _token(self._session.inventory)

    def run(
        self,
        wanted: Sequence[Node],
        files: FileFilter,
        given: Options,
        *,
        dry_run: bool = False,
        last: bool = True,
    ) -> None:
        """Download what no node has, and copy it; raises RequestError and what a copy does.
        `given` and `last` are those of `model_copy.bring`.
        """
        resolved = self._resolve()
        rows = choose(self._name, resolved, files)
        seen = self._programs.look(self._name, files=True)
        has = holders(self._name, resolved, rows, seen)
        if not has:
            check_room(seen, {node: missing(rows, each) for node, each in seen.items()})
            if dry_run:
                self._print(wanted, resolved, rows)
                return
            self._download(resolved, rows)
            seen = self._programs.look(self._name, files=True)
        source = self._fetcher.name if not has or self._fetcher.name in has else has[0]
        targets = [node.name for node in wanted]
        copying = plan_copy(
            self._name,
            seen,
            source=source,
            revision=resolved.revision,
            targets=targets,
            partial=not has,
        )
        ref = (f"refs/{self._ref(resolved)}", resolved.revision)
        copying = replace(copying, refs=tuple(sorted({*copying.refs, ref})))
        if dry_run:
            model_copy.print_plan(copying)
        else:
            model_copy.bring(self._programs, copying, given, last=last, verify=not has)

    def _ref(self, resolved: Resolved) -> str:
        return self._revision if self._revision not in ("", resolved.revision) else _MAIN

    def _resolve(self) -> Resolved:
        """Ask the hub, from the node that will download; raises NodeError."""
        node, programs = self._fetcher, self._programs
        programs.session.wait("look", f"{node.name} asks the hub for {self._name}")
        request = chain.resolve(
            self._name, revision=self._revision, env=node.env, token=self._token
        )
        command = programs.command(node, request, timeout=_RESOLVE)
        (answer,) = programs.session.transport.run([command])
        try:
            return chain.parse_resolved(answer)
        except UnreadableAnswer as error:
            why = chain.reason(error)
            raise _refused(node.name, self._name, why, error.evidence) from None

    def _print(
        self, wanted: Sequence[Node], resolved: Resolved, rows: Sequence[tuple[str, int, str]]
    ) -> None:

        size = told(sum({digest: size for _, size, digest in rows}.values()))
        click.echo(
            f"{self._name} ({resolved.revision[:12]}): {self._fetcher.name} would download {size}"
            f" in {len(rows)} files from Hugging Face"
        )
        if others := [node.name for node in wanted if node is not self._fetcher]:
            click.echo(f"  then {fold(others)} would get it from there")

    def _download(self, resolved: Resolved, rows: Sequence[tuple[str, int, str]]) -> None:
        """Download files, and show the progress; raises NodeError and LockError."""
        session, name, node = self._session, self._name, self._fetcher
        total = told(sum({digest: size for _, size, digest in rows}.values()))
        session.begin("download", f"Download {name}, {total}, on {node.name}")
        request = chain.download(
            name,
            hub=self._programs.where(node).path(f"{node.hf_home}/hub"),
            revision=resolved.revision,
            ref=self._ref(resolved),
            files=[row[0] for row in rows],
            env=node.env,
            token=self._token,
        )
        before = session.transport.record("model pull", {node.name: [f"downloading {name}"]})
        began = moved_at = told_at = time.monotonic()
        have = 0
        held = session.fleet.hold(
            self._programs.command(node, request, before=before.get(node.name, ()))
        )
        try:
            while (event := self._next(held)) is None or event.event != "downloaded":
                list(session.transport.run(()))  # raises when the lock is lost
                now = time.monotonic()
                if event is not None and event.have != have:
                    have, moved_at = event.have, now
                if now - moved_at > _STALLED:
                    raise _refused(node.name, name, f"no byte has come for {_STALLED:.0f}s")
                if now - told_at > _TELL:
                    told_at = now
                    session.wait("download", f"{told(have)} of {total}")
        finally:
            held.end()
        session.step(
            "download", f"{total} downloaded", node=node.name, seconds=time.monotonic() - began
        )

    def _next(self, held: Any) -> Said | None:
        """Return the next event of the download; raises NodeError when it failed."""
        message = held.next(1.0)
        if isinstance(message, Answer):
            why = "the download ended without a message"
            raise _refused(self._fetcher.name, self._name, why, message.tail)
        if message is None or message.error:
            return None
        try:
            event = chain.said(self._fetcher.name, message.text)
        except VlaunchError:
            return None  # printed by Hugging Face's client
        if event.event == "failed":
            raise _refused(self._fetcher.name, self._name, event.why)
        return event
