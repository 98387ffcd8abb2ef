"""What we say to the program of a node (`chain`) about an image besides its copy, and what it says:
taking it out of Docker, giving it to Docker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from launcher.errors import UnreadableAnswer
from launcher.model import Answer, Argv
from launcher.payload.chain.archive import Image, Layer
from launcher.tools import chain, decode
from launcher.tools.decode import Whole

_Digest = Annotated[str, decode.matches("[0-9a-f]{64}")]


@dataclass(frozen=True, kw_only=True)
class _Exported:
    config: _Digest
    config_size: Whole
    # not cut, as other texts are: its digest is the image's
    manifest: str
    layers: tuple[tuple[_Digest, Whole, _Digest], ...]


def export(docker: Argv, *, image: str, id_: str, root: str, top: str, need: int) -> dict[str, Any]:
    """Ask for an image's blobs to be put into a folder.

    Args:
        docker: what starts it.
        image: its name.
        id_: what tells it from any other; what was taken out of the same one before stays.
        root: the folder, which is below `top`, the login's own.
        top: see `root`.
        need: bytes that must be free there.
    """
    asked = {"verb": "export", "of": id_, "root": root, "top": top, "need": need, "name": image}
    return {**asked, "save": [*docker, "save", image]}


def load(docker: Argv, image: Image, names: Sequence[str], *, top: str) -> Mapping[str, Any]:
    """Return what makes a copy an image that is given to Docker, under these names, and removed
    then.
    """
    argv = [*docker, "load", "--quiet"]
    return {"load": argv, "image": image.as_json(), "names": list(names), "top": top}


def drop(root: str, top: str) -> dict[str, Any]:
    """Ask to remove a folder, and empty ones above it."""
    return {"verb": "drop", "root": root, "top": top}


def parse_export(answer: Answer) -> Image:
    """Read what an image consists of; raises UnreadableAnswer."""
    line = chain.last(answer, "exported")
    said = decode.read(_Exported, line, f"what {answer.node} says of the image")
    layers = tuple(Layer(*each) for each in said.layers)
    return Image(said.config, said.config_size, said.manifest, layers)


def why(error: UnreadableAnswer) -> str:
    """Return what a program said of its failure."""
    return error.message.partition("cannot do it: ")[2] or error.message
