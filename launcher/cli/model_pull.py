"""`vlaunch model pull`: one node downloads a model, and passes on to the others each file that is
there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from launcher.cli import options
from launcher.cli.choose import chosen
from launcher.cli.command import Call, command
from launcher.cli.model_push import how, look
from launcher.errors import NodeError, UnreadableAnswer, VlaunchError
from launcher.model import Answer, Inventory, Node, Secret

if TYPE_CHECKING:
    from launcher.cli.model_programs import Programs
    from launcher.cli.session import Session
    from launcher.plan.copying import Copying
    from launcher.plan.fetching import Wish
    from launcher.tools.chain import Resolved, Seen

_RESOLVE = 120.0  # seconds
_STALLED = 300.0  # seconds without a byte; Hugging Face's client tries again for a while
_TELL = 10.0
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
    " model that is downloaded elsewhere is brought with `vlaunch model push`"
)


@command(
    flags=[options.DRY_RUN, options.LOCK_WAIT, options.JSON],
    short_help="download a model on one node, and bring it to all",
)
@click.argument("name", metavar="MODEL")
@click.option("-n", "--node", metavar="NAME", help="The node that downloads (the head).")
@click.option(
    "--to",
    "targets",
    multiple=True,
    metavar="NODE",
    help="Only to this node (may be given several times).",
)
@click.option("--revision", default="", help="A commit, or the name of one (main).")
@click.option("--include", multiple=True, metavar="PATTERN", help="Only files like *.json.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="No files like these.")
@click.option("--all-files", "every", is_flag=True, help="Weights in other forms, too.")
@how
def pull(
    call: Call,
    name: str,
    node: str | None,
    targets: tuple[str, ...],
    revision: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    every: bool,
    **wishes: Any,
) -> None:
    """Download MODEL from Hugging Face on one node, with the client and the token of the cluster
    (`secrets: {HF_TOKEN: …}`), and bring it to all nodes while it comes.

    Weights come in safetensors alone, unless others are asked for. What a node has already is not
    downloaded. After Ctrl-C, or whatever else went wrong, the same command goes on: with the files
    that were not whole.
    """
    from launcher.plan.fetching import Wish

    if name.startswith((".", "/", "~")):
        raise click.UsageError("a folder is not downloaded: see `vlaunch model push --help`")
    inventory = call.inventory
    wanted = chosen(inventory, targets)
    fetcher = chosen(inventory, [node])[0] if node else _default(inventory, wanted)
    token = _token(inventory)
    asked = [each for each in inventory.nodes if each in wanted or each is fetcher]
    with call.session(nodes=asked) as session, call.locked(session) as ours:
        programs = look(ours, asked, name)
        found = _resolve(programs, fetcher, name, revision, token)
        wish = Wish(include=include, exclude=exclude, every=every)
        job = _Job(programs, fetcher, name, revision, token, wanted)
        job.run(found, wish, dry_run=call.dry_run, wishes=wishes)


def download(session: Session, name: str, nodes: Sequence[Node], wishes: Mapping[str, Any]) -> None:
    """Bring a model that no node has all of to some nodes, for a command that goes on then; one of
    them downloads it. `wishes` are those of `model_copying.copy`. Raises what the command does.
    """
    from launcher.plan.fetching import Wish

    fetcher, token = _default(session.inventory, nodes), _token(session.inventory)
    programs = look(session, nodes, name)
    found = _resolve(programs, fetcher, name, "", token)
    job = _Job(programs, fetcher, name, "", token, nodes)
    job.run(found, Wish(), wishes=wishes, last=False)


def _default(inventory: Inventory, wanted: Sequence[Node]) -> Node:
    return inventory.head if inventory.head in wanted else wanted[0]


def _token(inventory: Inventory) -> Secret | None:
    """Fetch the token, where the inventory names one; raises RequestError."""
    from launcher.remote.secrets import resolve

    source = {name: each for name, each in inventory.secrets.items() if name == "HF_TOKEN"}
    return resolve(source, inventory.path.parent).get("HF_TOKEN")


def _resolve(
    programs: Programs, node: Node, name: str, revision: str, token: Secret | None
) -> Resolved:
    """Ask the hub, from the node that will download; raises NodeError."""
    from launcher.tools import chain

    programs.session.wait("look", f"{node.name} asks the hub for {name}")
    request = chain.resolve(name, revision=revision, env=node.env, token=token)
    answers = programs.session.transport.run([programs.command(node, request, timeout=_RESOLVE)])
    (answer,) = list(answers)
    try:
        return chain.parse_resolved(answer)
    except UnreadableAnswer as error:
        why = error.message.partition("cannot do it: ")[2] or error.message
        raise _refused(node.name, name, why, error.evidence) from None


def _refused(node: str, name: str, why: str, evidence: str = "") -> NodeError:
    hint = next((hint for word, hint in _HINTS.items() if word in why), _OFFLINE)
    return NodeError(node, f"cannot download {name}", evidence=[why, evidence], hint=hint)


class _Job:
    """One download, and the copy that goes along with it."""

    def __init__(
        self,
        programs: Programs,
        fetcher: Node,
        name: str,
        revision: str,
        token: Secret | None,
        wanted: Sequence[Node],
    ) -> None:
        self._programs, self._session = programs, programs.session
        self._fetcher, self._name, self._revision = fetcher, name, revision
        self._token, self._wanted = token, wanted
        self._held: Any = None
        self._have, self._moved_at, self._told_at = 0, time.monotonic(), 0.0
        self._downloaded = False
        self._total = 0

    def run(
        self,
        found: Resolved,
        wish: Wish,
        *,
        dry_run: bool = False,
        wishes: Mapping[str, Any] | None = None,
        last: bool = True,
    ) -> None:
        """Do what is missing; raises RequestError and what a copy does. `wishes` and `last` are
        those of `model_copying.copy`.
        """
        from launcher.cli import model_copying
        from launcher.plan.fetching import choose

        rows = choose(self._name, found, wish)
        seen = self._programs.look(self._name, files=True)
        copying = self._planned(found, rows, seen)
        fetches = not copying.complete
        if dry_run:
            if fetches:
                click.echo(f"{self._fetcher.name} would download from Hugging Face")
            model_copying.print_plan(copying)
        elif fetches:
            self._fetch(copying, [row[0] for row in rows], wishes or {}, last=last)
        elif copying.targets:
            model_copying.copy(self._programs, copying, wishes or {}, last=last)
        elif last:
            model_copying.nothing(self._session, copying)

    def _planned(
        self, found: Resolved, rows: Sequence[tuple[str, int, str]], seen: dict[str, Seen]
    ) -> Copying:
        """Plan a copy from a node that has all that is wanted, or else a download."""
        from launcher.plan.copying import plan_copy
        from launcher.plan.fetching import check_room, plan_fetch

        targets = [node.name for node in self._wanted]
        has = _with_all(self._name, found, rows, seen)
        if has:
            first = self._fetcher.name if self._fetcher.name in has else has[0]
            copying = plan_copy(
                self._name, seen, source=first, revision=found.revision, targets=targets
            )
            return replace(copying, refs=_refs(copying, self._revision))
        copying = plan_fetch(
            self._name,
            found,
            rows,
            source=self._fetcher.name,
            targets=[node.name for node in self._programs.nodes],
            revision=self._revision,
        )
        for node, each in seen.items():
            check_room(self._name, each, node, copying)
        return copying

    def _fetch(
        self, copying: Copying, files: Sequence[str], wishes: Mapping[str, Any], *, last: bool
    ) -> None:
        from launcher.cli import model_copying
        from launcher.tools import chain

        node = self._fetcher
        where = self._programs.where(node)
        request = chain.download(
            self._name,
            hub=where.path(f"{node.hf_home}/hub"),
            revision=copying.revision,
            files=files,
            env=node.env,
            token=self._token,
        )
        self._total = copying.manifest.bytes
        self._moved_at = time.monotonic()
        self._held = self._session.fleet.hold(self._programs.command(node, request))
        try:
            model_copying.copy(self._programs, copying, wishes, also=self._check, last=last)
        finally:
            self._held.end()

    def _check(self) -> None:
        """Hear how far the download is; raises NodeError when it has failed or stands still."""
        while not self._downloaded and (said := self._held.next(0)) is not None:
            self._take(said)
        now = time.monotonic()
        if not self._downloaded and now - self._moved_at > _STALLED:
            why = f"no byte has come for {_STALLED:.0f}s"
            raise _refused(self._fetcher.name, self._name, why)
        if not self._downloaded and now - self._told_at > _TELL:
            from launcher.sizes import told

            self._told_at = now
            text = f"downloading: {told(self._have)} of {told(self._total)}"
            data = {"bytes": self._have, "total": self._total}
            self._session.note("download", text, node=self._fetcher.name, data=data)

    def _take(self, said: Any) -> None:
        from launcher.tools import chain

        name = self._fetcher.name
        if isinstance(said, Answer):
            raise _refused(name, self._name, "the download ended without a word", said.tail)
        if said.error:
            return
        try:
            event = chain.said(name, said.text)
        except VlaunchError:
            return  # what the client prints by itself
        if event.event == "failed":
            raise _refused(name, self._name, event.why)
        if event.event == "downloaded":
            self._downloaded = True
            self._session.note("download", "downloaded", node=name, state="ok")
        elif event.have != self._have:
            self._have, self._moved_at = event.have, time.monotonic()


def _with_all(
    name: str, found: Resolved, rows: Sequence[tuple[str, int, str]], seen: dict[str, Seen]
) -> list[str]:
    """Return the nodes that have all wanted files of a revision, by their names and sizes."""
    wanted = {(f"blobs/{digest}", size) for _, size, digest in rows}
    there = []
    for node, each in seen.items():
        for model in each.models:
            for one in model.revisions:
                files = {(row.name, row.size) for row in one.rows}
                whole = wanted <= files and not one.why and not model.unfinished
                if one.revision == found.revision and whole:
                    there.append(node)
    return there


def _refs(copying: Copying, revision: str) -> tuple[tuple[str, str], ...]:
    """Return under which names a revision is found: as it was asked for."""
    name = revision if revision and revision != copying.revision else "main"
    return tuple(sorted({*copying.refs, (f"refs/{name}", copying.revision)}))
