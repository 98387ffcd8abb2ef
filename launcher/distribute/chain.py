"""Requests to the node program of model and image copies (`distribute/node/`), and its answers.

The program is sent on standard input with its request, which contains the certificate of the copy:
none of it is in a command line, and nothing stays on the node.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Final, Literal

from launcher.core import decode
from launcher.core.decode import Default, Integer, Text
from launcher.core.domain import Answer, Argv, Inventory, Mount, Node, Secret
from launcher.core.errors import UnreadableAnswer
from launcher.core.registry import Files
from launcher.distribute.node import fetcher
from launcher.distribute.node.files import CopyManifest, ManifestFile
from launcher.distribute.node.models import cache_folder
from launcher.tools import docker
from launcher.tools.shipped import zipapps

_BOOTSTRAP: Final = """
import base64, json, os, sys
sent = json.loads(sys.stdin.readline())
program = os.memfd_create("copy.pyz")
os.write(program, base64.b64decode(sent["program"]))
sys.path.insert(0, "/proc/self/fd/%d" % program)
from vlaunch_copy.distribute.node.main import main
sys.exit(main(sent["request"]))
"""
THIS_MACHINE: Final = fetcher.THIS_MACHINE
# Empty for a model without revisions.
_FOLDER_NAME: Final = r"(?!\.\.?$)[^/\x00]*"


@dataclass(frozen=True, kw_only=True)
class ProgramEvent:
    """One event of a node's program; `event` determines which other fields are set."""

    event: Text
    have: Integer = 0
    received: Integer = 0
    sent: Integer = 0
    port: Integer = 0
    number: Integer = 0
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

    `why` says what is missing; it is empty for a complete revision. `used` is when a file was last
    read, in seconds since 1970, as precisely as the file system records it. `links` are pairs of a
    name in a snapshot and the file it points to.
    """

    revision: Annotated[str, decode.matches(_FOLDER_NAME)]
    size: Integer
    count: Integer
    used: Integer
    why: Text
    files: tuple[tuple[str, Integer, int, str], ...] = ()
    links: tuple[tuple[str, str], ...] = ()

    @property
    def unique_files(self) -> tuple[ManifestFile, ...]:
        """The files without duplicates: two names in a snapshot may point to the same blob."""
        return tuple({row[0]: ManifestFile(*row) for row in self.files}.values())


@dataclass(frozen=True, kw_only=True)
class StoredModel:
    """A model on a node, in a Hugging Face cache or in a plain folder.

    `copied`: vlaunch has copied to this folder, completely or not. `unfinished` counts the bytes of
    an interrupted copy, `left_over` those of running or interrupted downloads.
    """

    name: Text
    root: Text
    kind: Literal["hub", "plain"]
    refs: Mapping[str, Text]
    revisions: tuple[Revision, ...]
    copied: bool
    unfinished: Integer
    downloading: Integer
    left_over: Integer


@dataclass(frozen=True, kw_only=True)
class NodeModels:
    """Models of a node, and the free bytes on its disk."""

    models: tuple[StoredModel, ...]
    free: Integer


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A revision as the hub lists it: the commit, and each file's name, bytes and digest."""

    revision: Annotated[str, decode.matches("[0-9a-f]{40}")]
    files: tuple[tuple[str, Integer, str], ...]


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Files of an image from `docker save`; `layers` names those of the layers, in order."""

    files: tuple[tuple[str, Integer, int, str], ...]
    layers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramRuntime:
    """Command that runs a node's program, and its view of paths: a container's or the node's."""

    argv: Argv
    mounts: tuple[Mount, ...] = field(default=())

    def translate_path(self, inside: str) -> str:
        """Translate a path of the cluster's containers into the program's."""
        for mount in self.mounts:
            base = mount.target.rstrip("/")
            if inside == base or inside.startswith(base + "/"):
                return mount.source.rstrip("/") + inside[len(base) :]
        return inside


def node_runtime(inventory: Inventory) -> ProgramRuntime:
    """Return the runtime of the node's own Python."""
    return ProgramRuntime(argv=("python3", "-c", _BOOTSTRAP), mounts=inventory.mounts)


def image_runtime(inventory: Inventory, node: Node) -> ProgramRuntime:
    """Return the runtime of a temporary container: files in a Hugging Face cache must get the owner
    that containers have.
    """
    mounts = (Mount(source=node.hf_home, target=node.hf_home), *inventory.mounts)
    volumes = [arg for mount in mounts for arg in ("--volume", f"{mount.source}:{mount.target}")]
    argv = docker.run_throwaway(
        node.docker,
        inventory.image,
        "python3",
        "-c",
        _BOOTSTRAP,
        cluster=inventory.cluster,
        node=node.name,
        options=("--interactive", "--network", "host", *volumes),
    )
    return ProgramRuntime(argv=argv)


def program_files() -> Files:
    """Return the files of the node program, the package `vlaunch_copy`."""
    return zipapps.package_files("vlaunch_copy", "distribute/node/*.py", "core/tls.py")


@cache
def _encoded_program() -> str:
    return base64.b64encode(zipapps.pack(program_files(), compress=True)).decode()


def program_input(request: Mapping[str, Any]) -> bytes:
    """Return the program's first line of input: its own code and the request."""
    return json.dumps({"program": _encoded_program(), "request": request}).encode() + b"\n"


def scan_request(
    runtime: ProgramRuntime, node: Node, *, model: str = "", files: bool = False
) -> dict[str, Any]:
    """Request one model of a node, by name or path, or else all models; `files` lists their files
    as well.
    """
    hub, home = runtime.translate_path(f"{node.hf_home}/hub"), runtime.translate_path(node.hf_home)
    query: dict[str, Any]
    if not model:
        query = {"hub": hub, "beside": home}
    elif is_path(model):
        query = {"path": runtime.translate_path(model)}
    else:
        query = {"hub": hub, "name": model}
    space_path = runtime.translate_path(model) if is_path(model) else home
    return {"verb": "look", **query, "files": files, "room": space_path}


def is_path(model: str) -> bool:
    """True for a folder on the nodes, false for a Hugging Face name."""
    return model.startswith("/")


def model_root(runtime: ProgramRuntime, node: Node, model: str) -> str:
    """Return the folder of a model as the program sees it."""
    if is_path(model):
        return runtime.translate_path(model)
    return runtime.translate_path(f"{node.hf_home}/hub/{cache_folder(model)}")


def copy_request(
    *,
    node: str,
    root: str,
    manifest: CopyManifest,
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
    """Request a node's part in a copy.

    Args:
        node: its name.
        root: the folder of the files.
        manifest: the files to copy.
        certificate: the secret of all members, PEM with its private key.
        encrypt: also encrypt the bytes of the files.
        streams: connections to the node before it.
        listen: address and port to serve at; None for a node that only pushes.
        source: the node has the files.
        alone: no node fetches from it: it reads the files and records their digests.
        compare: ignore earlier records: read and compare all existing files.
        cached: leave the files in the page cache, because they are about to be read.
        rate: bytes per second that it sends at most; 0: unlimited.
        label: name of the copy's record; a source without one writes none.
        links, refs: see `install_files` in `distribute/node/place.py`.
        load: fields that turn the files into an image; see `load_fields`.
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
        "links": [list(pair) for pair in links],
        "refs": [list(pair) for pair in refs],
        **({"listen": list(listen)} if listen is not None else {}),
        **(load or {}),
    }


def load_fields(docker: Argv, *, top: str) -> dict[str, Any]:
    """Have a target load the files into Docker, then remove them and empty folders up to `top`."""
    return {"load": [*docker, "load", "--quiet"], "top": top}


def export_request(
    docker: Argv, *, image: str, id_: str, root: str, top: str, need: int
) -> dict[str, Any]:
    """Request an export of an image into a folder.

    Args:
        docker: the Docker command.
        image: its name.
        id_: its identity; a complete export of the same one is reused.
        root: the folder, below `top`.
        top: a folder that belongs to the SSH user alone.
        need: bytes that must be free.
    """
    request = {"verb": "export", "of": id_, "root": root, "top": top, "need": need}
    return {**request, "save": [*docker, "save", image]}


def drop_request(root: str, top: str) -> dict[str, Any]:
    """Request to remove a folder, and empty ones above it up to `top`."""
    return {"verb": "drop", "root": root, "top": top}


def resolve_request(
    name: str, *, revision: str, env: Mapping[str, str], token: Secret | None
) -> dict[str, Any]:
    """Request the commit and the files of a model from the hub."""
    request = {"verb": "resolve", "name": name, "revision": revision, "env": dict(env)}
    return {**request, "token": token.reveal() if token is not None else ""}


def download_request(
    name: str,
    *,
    hub: str,
    revision: str,
    ref: str,
    files: Sequence[str],
    env: Mapping[str, str],
    token: Secret | None,
) -> dict[str, Any]:
    """Request a download of a commit's files into a cache, with `ref` pointing to the commit."""
    request = resolve_request(name, revision=revision, env=env, token=token)
    return {**request, "verb": "download", "hub": hub, "ref": ref, "files": list(files)}


def remove_request(*roots: str) -> dict[str, Any]:
    """Request to remove folders."""
    return {"verb": "remove", "roots": list(roots)}


def peers_order(peers: Sequence[tuple[str, str, int]]) -> str:
    """Order to fetch from these peers: name, address and port, nearest first."""
    return json.dumps({"order": "before", "peers": [list(peer) for peer in peers]})


def give_order(host: str, port: int) -> str:
    """Order to push all files to a node that cannot connect to this one."""
    return json.dumps({"order": "give", "host": host, "port": port})


def recheck_order(number: int) -> str:
    """Order to read a chunk again, because another node received wrong bytes."""
    return json.dumps({"order": "doubt", "number": number})


def simple_order(order: Literal["go", "finish"]) -> str:
    """Return an order without arguments."""
    return json.dumps({"order": order})


def parse_event(node: str, line: str) -> ProgramEvent:
    """Parse a line of a program's output; raises UnreadableAnswer."""
    return decode.parse_json(ProgramEvent, line, f"the status of the copy on {node}")


@dataclass(frozen=True, kw_only=True)
class _Result:
    event: Text
    why: Annotated[Text, Default("")] = ""
    bytes: Annotated[Integer, Default(0)] = 0


def parse_models(answer: Answer) -> NodeModels:
    """Parse a node's models; raises UnreadableAnswer."""
    line = result_line(answer, "seen")
    return decode.parse_json(NodeModels, line, f"the list of models on {answer.node}")


def parse_resolved(answer: Answer) -> Resolved:
    """Parse a resolved revision; raises UnreadableAnswer."""
    line = result_line(answer, "resolved")
    return decode.parse_json(Resolved, line, f"the hub's reply to {answer.node}")


def parse_exported(answer: Answer) -> Exported:
    """Parse an exported image; raises UnreadableAnswer."""
    line = result_line(answer, "exported")
    return decode.parse_json(Exported, line, f"the description of the image on {answer.node}")


def parse_removed(answer: Answer) -> int:
    """Parse the number of freed bytes; raises UnreadableAnswer."""
    line = result_line(answer, "removed")
    return decode.parse_json(_Result, line, f"the reply of {answer.node}").bytes


def failure_reason(error: UnreadableAnswer) -> str:
    """Return a program's own reason for its failure."""
    return error.message.partition("cannot do it: ")[2] or error.message


def result_line(answer: Answer, event: str) -> str:
    """Return the last line of output, the result; raises UnreadableAnswer with the program's
    reason.
    """
    line = answer.out.strip().rpartition("\n")[2]
    try:
        result = decode.parse_json(_Result, line, f"the answer of {answer.node}")
    except UnreadableAnswer:
        raise UnreadableAnswer(
            f"{answer.node} sent no valid reply", evidence=answer.tail or "(no output)"
        ) from None
    if result.event != event:
        raise UnreadableAnswer(f"{answer.node} cannot do it: {result.why or result.event}")
    return line
