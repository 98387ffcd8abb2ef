"""Requests to `distribute/node/`, the program of one node in a copy of a model or an image, and its
answers.

It is sent on standard input, with its request and so with the certificate of the copy: none of it
is in a command line, and nothing stays on the node.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Final, Literal

from launcher.core import decode
from launcher.core.decode import Or, Text, Whole
from launcher.core.domain import Answer, Argv, Inventory, Mount, Node, Secret
from launcher.core.errors import UnreadableAnswer
from launcher.distribute.node import take
from launcher.distribute.node.files import File, Manifest
from launcher.distribute.node.look import folder
from launcher.tools import docker, zipapps

_BEGIN: Final = """
import base64, json, os, sys
sent = json.loads(sys.stdin.readline())
program = os.memfd_create("copy.pyz")
os.write(program, base64.b64decode(sent["program"]))
sys.path.insert(0, "/proc/self/fd/%d" % program)
from vlaunch_copy.distribute.node.main import main
sys.exit(main(sent["request"]))
"""
HERE: Final = take.HERE
# What a folder can be called; empty for a model without revisions.
_ONE_NAME: Final = r"(?!\.\.?$)[^/\x00]*"


@dataclass(frozen=True, kw_only=True)
class Said:
    """One thing that a node's program says; which fields it has depends on `event`."""

    event: Text
    have: Whole = 0
    received: Whole = 0
    sent: Whole = 0
    port: Whole = 0
    number: Whole = 0
    cpu: float = 0.0
    start: float = 0.0
    source: Text = ""
    root: Text = ""
    who: Text = ""
    why: Text = ""
    full: bool = False


@dataclass(frozen=True, kw_only=True)
class Revision:
    """One revision of a model on a node; a plain folder has one without a name.

    `why` says what is missing; empty when nothing speaks against its being whole. `used` is when a
    file was last read, in seconds since 1970, as well as the file system keeps it. `links` are
    pairs of a name in a snapshot and the file it stands for.
    """

    revision: Annotated[str, decode.matches(_ONE_NAME)]
    size: Whole
    count: Whole
    used: Whole
    why: Text
    files: tuple[tuple[str, Whole, int, str], ...] = ()
    links: tuple[tuple[str, str], ...] = ()

    @property
    def rows(self) -> tuple[File, ...]:
        """Its files, each once: two names in a snapshot may stand for the same blob."""
        return tuple({row[0]: File(*row) for row in self.files}.values())


@dataclass(frozen=True, kw_only=True)
class Model:
    """One model as it lies on a node, in a Hugging Face cache or in a plain folder.

    `copied` is whether a copy of ours was begun or ended there, `unfinished` are bytes of one that
    was interrupted, `left_over` those of downloads that run or were interrupted.
    """

    name: Text
    root: Text
    kind: Literal["hub", "plain"]
    refs: Mapping[str, Text]
    revisions: tuple[Revision, ...]
    copied: bool
    unfinished: Whole
    downloading: Whole
    left_over: Whole


@dataclass(frozen=True, kw_only=True)
class Seen:
    """Models of a node, and the free bytes of its disk."""

    models: tuple[Model, ...]
    free: Whole


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A revision as the hub lists it: its commit; each file's name, bytes and digest."""

    revision: Annotated[str, decode.matches("[0-9a-f]{40}")]
    files: tuple[tuple[str, Whole, str], ...]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Files of an image as `docker save` prints it; `layers` names its layers', in order."""

    files: tuple[tuple[str, Whole, int, str], ...]
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Command of a node's program, and the paths that it sees: a container's, or the node's own."""

    argv: Argv
    mounts: tuple[Mount, ...] = field(default=())

    def path(self, inside: str) -> str:
        """Return the program's path of one that containers use."""
        for mount in self.mounts:
            base = mount.target.rstrip("/")
            if inside == base or inside.startswith(base + "/"):
                return mount.source.rstrip("/") + inside[len(base) :]
        return inside


def on_node(inventory: Inventory) -> Where:
    """Run the program with the node's own Python."""
    return Where(argv=("python3", "-c", _BEGIN), mounts=inventory.mounts)


def in_image(inventory: Inventory, node: Node) -> Where:
    """Run the program in a throw-away container: files of a Hugging Face cache belong to whoever
    containers are.
    """
    mounts = (Mount(source=node.hf_home, target=node.hf_home), *inventory.mounts)
    volumes = [word for each in mounts for word in ("--volume", f"{each.source}:{each.target}")]
    argv = docker.throw_away(
        node.docker,
        inventory.image,
        "python3",
        "-c",
        _BEGIN,
        cluster=inventory.cluster,
        node=node.name,
        options=("--interactive", "--network", "host", *volumes),
    )
    return Where(argv=argv)


@cache
def _program() -> str:
    return base64.b64encode(zipapps.pack(zipapps.copy(), compress=True)).decode()


def program(request: Mapping[str, Any]) -> bytes:
    """Return what the program reads first: itself, and its request."""
    return json.dumps({"program": _program(), "request": request}).encode() + b"\n"


def look(where: Where, node: Node, *, model: str = "", files: bool = False) -> dict[str, Any]:
    """Ask for one model of a node, by its name or its path, or for all that it has; with their
    `files` if need be.
    """
    hub, home = where.path(f"{node.hf_home}/hub"), where.path(node.hf_home)
    asked: dict[str, Any]
    if not model:
        asked = {"hub": hub, "beside": home}
    elif is_path(model):
        asked = {"path": where.path(model)}
    else:
        asked = {"hub": hub, "name": model}
    room = where.path(model) if is_path(model) else home
    return {"verb": "look", **asked, "files": files, "room": room}


def is_path(model: str) -> bool:
    """True for a folder of the nodes, false for a name of Hugging Face's."""
    return model.startswith("/")


def root(where: Where, node: Node, model: str) -> str:
    """Return the folder of a model as the program sees it."""
    if is_path(model):
        return where.path(model)
    return where.path(f"{node.hf_home}/hub/{folder(model)}")


def copy(
    *,
    node: str,
    root: str,
    manifest: Manifest,
    certificate: str,
    encrypt: bool,
    streams: int,
    listen: tuple[str, int] | None,
    source: bool = False,
    alone: bool = False,
    compare: bool = False,
    cached: bool = False,
    rate: int = 0,
    label: str = "",
    links: Sequence[Sequence[str]] = (),
    refs: Sequence[Sequence[str]] = (),
    load: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Ask a node to take part in a copy.

    Args:
        node: its name.
        root: the folder that the files are below.
        manifest: which files.
        certificate: what only those who take part have, PEM with its private key.
        encrypt: also encrypt the bytes of the files.
        streams: connections to the node before it.
        listen: address and port to serve at; None for who only gives.
        source: it has the files.
        alone: no node fetches from it: it reads the files and records their digests.
        compare: believe nothing that was written down of it: read and compare what is there.
        cached: leave what is read and written in the page cache: it is about to be read again.
        rate: bytes a second that it sends at most; 0: as many as go.
        label: what the copy is written down as; for a source nothing is when it is empty.
        links, refs: see `distribute/node/place.py`.
        load: what makes the files an image; see `load`.
    """
    return {
        "verb": "copy",
        "node": node,
        "root": root,
        "manifest": manifest.as_json(),
        "certificate": certificate,
        "encrypt": encrypt,
        "streams": streams,
        "source": source,
        "alone": alone,
        "compare": compare,
        "cached": cached,
        "rate": rate,
        "label": label,
        "links": [list(each) for each in links],
        "refs": [list(each) for each in refs],
        **({"listen": list(listen)} if listen is not None else {}),
        **(load or {}),
    }


def load(docker: Argv, *, top: str) -> dict[str, Any]:
    """Ask a target to give the files to Docker, and to remove them then, with empty folders up to
    `top`.
    """
    return {"load": [*docker, "load", "--quiet"], "top": top}


def export(docker: Argv, *, image: str, id_: str, root: str, top: str, need: int) -> dict[str, Any]:
    """Ask for an image's files in a folder.

    Args:
        docker: the command that starts Docker's.
        image: its name.
        id_: its identity; a complete export of the same one is reused.
        root: the folder, which is below `top`, the login's own.
        top: see `root`.
        need: bytes that must be free there.
    """
    asked = {"verb": "export", "of": id_, "root": root, "top": top, "need": need}
    return {**asked, "save": [*docker, "save", image]}


def drop(root: str, top: str) -> dict[str, Any]:
    """Ask to remove a folder, and empty ones above it up to `top`."""
    return {"verb": "drop", "root": root, "top": top}


def resolve(
    name: str, *, revision: str, env: Mapping[str, str], token: Secret | None
) -> dict[str, Any]:
    """Ask what a hub has of a model; raises nothing."""
    asked = {"verb": "resolve", "name": name, "revision": revision, "env": dict(env)}
    return {**asked, "token": token.reveal() if token is not None else ""}


def download(
    name: str,
    *,
    hub: str,
    revision: str,
    ref: str,
    files: Sequence[str],
    env: Mapping[str, str],
    token: Secret | None,
) -> dict[str, Any]:
    """Ask to download files of a commit into a cache, where `ref` points to it afterwards."""
    asked = resolve(name, revision=revision, env=env, token=token)
    return {**asked, "verb": "download", "hub": hub, "ref": ref, "files": list(files)}


def remove(*roots: str) -> dict[str, Any]:
    """Ask to remove folders."""
    return {"verb": "remove", "roots": list(roots)}


def before(peers: Sequence[tuple[str, str, int]]) -> str:
    """Order from whom to fetch: name, address and port, the nearest first."""
    return json.dumps({"order": "before", "peers": [list(each) for each in peers]})


def give(host: str, port: int) -> str:
    """Order to bring everything to a node that cannot reach us."""
    return json.dumps({"order": "give", "host": host, "port": port})


def doubt(number: int) -> str:
    """Order to read a chunk again: somebody has got other bytes."""
    return json.dumps({"order": "doubt", "number": number})


def simply(order: Literal["go", "finish"]) -> str:
    """Order what needs no more words."""
    return json.dumps({"order": order})


def said(node: str, line: str) -> Said:
    """Read a line of a program; raises UnreadableAnswer."""
    return decode.read(Said, line, f"what {node} says of the copy")


@dataclass(frozen=True, kw_only=True)
class _Result:
    event: Text
    why: Annotated[Text, Or("")] = ""
    bytes: Annotated[Whole, Or(0)] = 0


def parse_look(answer: Answer) -> Seen:
    """Read what a node has; raises UnreadableAnswer."""
    return decode.read(Seen, last(answer, "seen"), f"what {answer.node} says of its models")


def parse_resolved(answer: Answer) -> Resolved:
    """Read what a hub has; raises UnreadableAnswer."""
    line = last(answer, "resolved")
    return decode.read(Resolved, line, f"what {answer.node} heard of the model")


def parse_exported(answer: Answer) -> Exported:
    """Read the files of an image; raises UnreadableAnswer."""
    line = last(answer, "exported")
    return decode.read(Exported, line, f"what {answer.node} says of the image")


def parse_removed(answer: Answer) -> int:
    """Return the bytes that were freed; raises UnreadableAnswer."""
    line = last(answer, "removed")
    return decode.read(_Result, line, f"what {answer.node} says of its model").bytes


def reason(error: UnreadableAnswer) -> str:
    """Return what a program said of its failure."""
    return error.message.partition("cannot do it: ")[2] or error.message


def last(answer: Answer, event: str) -> str:
    """Return the last line, which has the result; raises UnreadableAnswer with what is known of
    why there is none.
    """
    line = answer.out.strip().rpartition("\n")[2]
    try:
        result = decode.read(_Result, line, f"the answer of {answer.node}")
    except UnreadableAnswer:
        raise UnreadableAnswer(
            f"{answer.node} cannot say what it has", evidence=answer.tail or "(it said nothing)"
        ) from None
    if result.event != event:
        raise UnreadableAnswer(f"{answer.node} cannot do it: {result.why or result.event}")
    return line
