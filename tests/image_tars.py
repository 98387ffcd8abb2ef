"""Small images as Docker saves them: 20.10's format, and the OCI layout of 25 and newer."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence

NAME = "b:1"
LAYERS = (b"one" * 5000, b"two" * 70_000, b"one" * 5000, b"three")


def tar_of(files: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> bytes:
    """Pack files, and symbolic links, into a tar."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        for name, target in (links or {}).items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
    return out.getvalue()


def sha(data: bytes) -> str:
    """Return a blob's digest."""
    return hashlib.sha256(data).hexdigest()


def config_of(layers: Sequence[bytes]) -> bytes:
    """Return the configuration of an image with these layers."""
    diffs = [f"sha256:{sha(layer)}" for layer in layers]
    return json.dumps(
        {
            "architecture": "amd64",
            "config": {"Env": ["PATH=/bin"], "Cmd": ["sh"]},
            "rootfs": {"type": "layers", "diff_ids": diffs},
        }
    ).encode()


def classic(*, twice: bool = False) -> bytes:
    """Return an archive of Docker 20.10: a folder per layer, duplicates as links."""
    config = config_of(LAYERS)
    files = {f"id{at}/layer.tar": layer for at, layer in enumerate(LAYERS) if at != 2}
    files |= {f"{sha(config)}.json": config, "id0/VERSION": b"1.0"}
    rows = [
        {
            "Config": f"{sha(config)}.json",
            "RepoTags": [name],
            "Layers": [f"id{at}/layer.tar" for at in range(len(LAYERS))],
        }
        for name in (NAME, *(["other:1"] if twice else []))
    ]
    files["manifest.json"] = json.dumps(rows).encode()
    return tar_of(files, {"id2/layer.tar": "../id0/layer.tar"})


def modern() -> bytes:
    """Return an archive of Docker 25 and newer."""
    config = config_of(LAYERS)
    paths = [f"blobs/sha256/{sha(layer)}" for layer in LAYERS]
    files = {**dict(zip(paths, LAYERS, strict=True)), f"blobs/sha256/{sha(config)}": config}
    rows = [{"Config": f"blobs/sha256/{sha(config)}", "RepoTags": [NAME], "Layers": paths}]
    return tar_of({**files, "manifest.json": json.dumps(rows).encode(), "index.json": b"{}"})
