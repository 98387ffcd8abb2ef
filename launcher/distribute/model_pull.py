"""`vlaunch model pull`."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from launcher.app import options
from launcher.app.command import CommandContext, command
from launcher.app.secrets import resolve
from launcher.app.selection import select_nodes
from launcher.app.session import Session
from launcher.core.domain import Answer, Inventory, Node, Secret, fold
from launcher.core.errors import NodeError, UnreadableAnswer, VlaunchError
from launcher.core.sizes import format_count, format_size
from launcher.distribute import chain, model_copy
from launcher.distribute.chain import ProgramEvent, Resolved
from launcher.distribute.copy_session import CopyOptions
from launcher.distribute.file_filter import (
    FileFilter,
    missing_bytes,
    nodes_with_files,
    select_files,
)
from launcher.distribute.model_copy import REVISION, start_programs, transfer_options
from launcher.distribute.model_plan import check_space, plan_copy
from launcher.distribute.model_programs import NodePrograms

_RESOLVE_TIMEOUT = 120.0  # seconds
_STALL_TIMEOUT = 300.0  # seconds without a byte; Hugging Face's client retries for a while
_REPORT_INTERVAL = 10.0
_MAIN = "main"
_HINTS = {
    "GatedRepoError": "request access on the model's page, and set a token that has it: `secrets:"
    " {HF_TOKEN: {env: HF_TOKEN}}`",
    "RepositoryNotFoundError": "check the name; a private model needs a token: `secrets:"
    " {HF_TOKEN: {env: HF_TOKEN}}`",
    "RevisionNotFoundError": "the model's page lists its branches and commits",
    "huggingface_hub": "run `vlaunch up`: the cluster's image includes it; or choose a node that"
    " has the image with `--on`",
}
_OFFLINE = (
    "check that the node reaches the hub (proxies and HF_ENDPOINT come from `env:` of the"
    " inventory), or download the model elsewhere and run `vlaunch model copy`"
)


@command(
    flags=[options.DRY_RUN, options.LOCK_WAIT, options.JSON],
    short_help="Download a model on one node, then copy it to all",
)
@click.argument("name", metavar="MODEL")
@click.option(
    "--on", "node", metavar="NODE", help="Node that downloads the model (default: the head)."
)
@REVISION
@click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Download only files like *.json; repeatable.",
)
@click.option(
    "--exclude", multiple=True, metavar="PATTERN", help="Skip files like these; repeatable."
)
@click.option(
    "--all-files",
    "every",
    is_flag=True,
    help="Download weights in other formats than safetensors too.",
)
@transfer_options
def pull(
    call: CommandContext,
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

    Only safetensors weights are downloaded by default. Files that a node has are copied from it
    instead. After an interruption, the same command continues with the incomplete files.
    """
    if name.startswith((".", "/", "~")):
        raise click.UsageError("a folder cannot be downloaded: see `vlaunch model copy --help`")
    inventory = call.inventory
    target_nodes = select_nodes(inventory, targets)
    fetcher = select_nodes(inventory, [node])[0] if node else _default_node(inventory, target_nodes)
    file_filter = FileFilter(include=include, exclude=exclude, every=every)
    members = (*target_nodes, fetcher)
    nodes = [member for member in inventory.nodes if member in members]
    with call.session(nodes=nodes) as session, call.locked(session) as locked:
        model_pull = _ModelPull(start_programs(locked, nodes, name), fetcher, name, revision)
        model_pull.run(target_nodes, file_filter, CopyOptions(**limits), dry_run=call.dry_run)


def download_model(session: Session, name: str, nodes: Sequence[Node], limits: CopyOptions) -> None:
    """Download a model on one of `nodes` and copy it to the others, as a part of another command;
    raises like `_ModelPull.run`.
    """
    fetcher = _default_node(session.inventory, nodes)
    model_pull = _ModelPull(start_programs(session, nodes, name), fetcher, name, "")
    model_pull.run(nodes, FileFilter(), limits, last=False)


def _default_node(inventory: Inventory, nodes: Sequence[Node]) -> Node:
    return inventory.head if inventory.head in nodes else nodes[0]


def _load_token(inventory: Inventory) -> Secret | None:
    """Fetch the Hugging Face token if the inventory names one; raises RequestError."""
    sources = {name: source for name, source in inventory.secrets.items() if name == "HF_TOKEN"}
    return resolve(sources, inventory.path.parent).get("HF_TOKEN")


def _download_error(node: str, name: str, why: str, evidence: str = "") -> NodeError:
    hint = next((hint for key, hint in _HINTS.items() if key in why), _OFFLINE)
    return NodeError(node, f"cannot download {name}", evidence=[why, evidence], hint=hint)


class _ModelPull:
    """A download on the node `fetcher`, and the copy to the others."""

    def __init__(self, programs: NodePrograms, fetcher: Node, name: str, revision: str) -> None:
        self._programs, self._session = programs, programs.session
        self._fetcher, self._name, self._revision = fetcher, name, revision
        self._token = _load_token(self._session.inventory)

    def run(
        self,
        target_nodes: Sequence[Node],
        file_filter: FileFilter,
        options: CopyOptions,
        *,
        dry_run: bool = False,
        last: bool = True,
    ) -> None:
        """Download the files unless a node has them, and copy them; raises RequestError, and like
        `copy_model`, which takes `options` and `last`.
        """
        resolved = self._resolve_revision()
        rows = select_files(self._name, resolved, file_filter)
        stores = self._programs.scan_models(self._name, files=True)
        complete = nodes_with_files(self._name, resolved, rows, stores)
        if not complete:
            missing = {node: missing_bytes(rows, store) for node, store in stores.items()}
            check_space(stores, missing)
            if dry_run:
                self._print_download(target_nodes, resolved, rows)
                return
            self._download_files(resolved, rows)
            stores = self._programs.scan_models(self._name, files=True)
        fetcher = self._fetcher.name
        source = fetcher if not complete or fetcher in complete else complete[0]
        plan = plan_copy(
            self._name,
            stores,
            source=source,
            revision=resolved.revision,
            targets=[node.name for node in target_nodes],
            partial=not complete,
        )
        ref = (f"refs/{self._ref_name(resolved)}", resolved.revision)
        plan = replace(plan, refs=tuple(sorted({*plan.refs, ref})))
        if dry_run:
            model_copy.print_plan(plan)
        else:
            model_copy.copy_model(self._programs, plan, options, last=last, verify=not complete)

    def _ref_name(self, resolved: Resolved) -> str:
        return self._revision if self._revision not in ("", resolved.revision) else _MAIN

    def _resolve_revision(self) -> Resolved:
        """Query the hub from the node that will download; raises NodeError."""
        node, programs = self._fetcher, self._programs
        programs.session.wait("look", f"{node.name} is querying the hub for {self._name}")
        request = chain.resolve_request(
            self._name, revision=self._revision, env=node.env, token=self._token
        )
        command = programs.command(node, request, timeout=_RESOLVE_TIMEOUT)
        (answer,) = programs.session.transport.run([command])
        try:
            return chain.parse_resolved(answer)
        except UnreadableAnswer as error:
            why = chain.failure_reason(error)
            raise _download_error(node.name, self._name, why, error.evidence) from None

    def _print_download(
        self, nodes: Sequence[Node], resolved: Resolved, rows: Sequence[tuple[str, int, str]]
    ) -> None:
        size = format_size(sum({digest: size for _, size, digest in rows}.values()))
        click.echo(
            f"{self._name} ({resolved.revision[:12]}): {self._fetcher.name} would download {size}"
            f" in {format_count(len(rows), 'file')} from Hugging Face"
        )
        if others := [node.name for node in nodes if node is not self._fetcher]:
            click.echo(f"  then {fold(others)} would get it from there")

    def _download_files(self, resolved: Resolved, rows: Sequence[tuple[str, int, str]]) -> None:
        """Download files and show the progress; raises NodeError and LockError."""
        session, name, node = self._session, self._name, self._fetcher
        total = format_size(sum({digest: size for _, size, digest in rows}.values()))
        session.begin("download", f"Download {name}, {total}, on {node.name}")
        request = chain.download_request(
            name,
            hub=self._programs.runtime(node).translate_path(f"{node.hf_home}/hub"),
            revision=resolved.revision,
            ref=self._ref_name(resolved),
            files=[row[0] for row in rows],
            env=node.env,
            token=self._token,
        )
        before = session.transport.record("model pull", {node.name: [f"downloading {name}"]})
        began = progress_at = reported_at = time.monotonic()
        received = 0
        command = self._programs.command(node, request, preamble=before.get(node.name, ()))
        program = session.fleet.hold(command)
        try:
            while (event := self._next_event(program)) is None or event.event != "downloaded":
                list(session.transport.run(()))  # raises when the lock is lost
                now = time.monotonic()
                if event is not None and event.have != received:
                    received, progress_at = event.have, now
                if now - progress_at > _STALL_TIMEOUT:
                    why = f"no data received for {_STALL_TIMEOUT:.0f}s"
                    raise _download_error(node.name, name, why)
                if now - reported_at > _REPORT_INTERVAL:
                    reported_at = now
                    session.wait("download", f"{format_size(received)} of {total}")
        finally:
            program.end()
        seconds = time.monotonic() - began
        session.step("download", f"{total} downloaded", node=node.name, seconds=seconds)

    def _next_event(self, program: Any) -> ProgramEvent | None:
        """Return the next event of the download; raises NodeError when it failed."""
        message = program.next(1.0)
        if isinstance(message, Answer):
            why = "the download ended without a message"
            raise _download_error(self._fetcher.name, self._name, why, message.tail)
        if message is None or message.error:
            return None
        try:
            event = chain.parse_event(self._fetcher.name, message.text)
        except VlaunchError:
            return None  # printed by Hugging Face's client
        if event.event == "failed":
            raise _download_error(self._fetcher.name, self._name, event.why)
        return event
