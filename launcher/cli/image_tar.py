"""An image in a file of this machine, as `docker save` writes it: what a Docker that had it would
say of it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.cli import image_copying
from launcher.cli.session import Session
from launcher.errors import RequestError, UnreadableAnswer
from launcher.payload.chain.archive import Image
from launcher.tools import chain, docker_read, image_copy
from launcher.tools.image_store import Store

_EXPORT = 7200.0  # seconds


@dataclass(frozen=True, kw_only=True)
class Unpacked:
    """A file's image, whose blobs lie in the folder `root`; `store` is as if Docker had it."""

    root: str
    image: Image
    store: Store


def unpack(session: Session, path: Path, name: str, *, scratch: str) -> Unpacked:
    """Take the image out of a file, under a name that it shall have; raises RequestError."""
    path = path.resolve()
    there = path.stat()
    of = f"{path}:{there.st_size}:{there.st_mtime_ns}:{name}"
    seen = image_copying.look(session, (), scratch=scratch, here=True)[chain.HERE]
    root = f"{seen.folder}/{hashlib.sha256(of.encode()).hexdigest()[:16]}"
    session.begin("export", f"Take {name} out of {path}")
    session.wait("export", "reading", deadline=_EXPORT)
    request = image_copy.export(
        (), image=name, id_=of, root=root, top=seen.top, need=there.st_size, tar=str(path)
    )
    command = image_copying.program(session, chain.HERE, request, timeout=_EXPORT)
    answer = session.fleet.run_here(command)
    try:
        image = image_copy.parse_export(answer)
    except UnreadableAnswer as error:
        why = [image_copy.why(error), error.evidence]
        raise RequestError(
            f"{path} holds no image that can be read", evidence=[each for each in why if each]
        ) from None
    config = json.loads((Path(root) / image.config).read_text(encoding="utf-8"))
    # As `docker image inspect` says it (https://docs.docker.com/reference/api/engine/).
    said = {
        "Id": f"sha256:{image.config}",
        "RepoTags": [name if ":" in name.rpartition("/")[2] else f"{name}:latest"],
        "RootFS": {"Type": "layers", "Layers": config["rootfs"]["diff_ids"]},
        "Architecture": config.get("architecture", ""),
        "Config": config.get("config"),
        "Size": sum(each.size for each in image.layers),
    }
    images = docker_read.parse_images(json.dumps([said]))
    return Unpacked(root=root, image=image, store=replace(seen, images=images, trouble=""))


def drop(session: Session, unpacked: Unpacked) -> None:
    """Remove what was taken out."""
    request = image_copy.drop(unpacked.root, unpacked.store.top)
    session.fleet.run_here(image_copying.program(session, chain.HERE, request, timeout=600.0))
