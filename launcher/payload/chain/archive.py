"""Container images as Docker saves and loads them: a tar that is taken apart into blobs, each named
by its digest, and put together again, if need be without layers that the other side has.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

_BLOCK = 2**20
_SMALL = 8 * 2**20  # bytes that JSON may have that tells of the others
_OCI = "application/vnd.oci.image."
_MANIFEST = _OCI + "manifest.v1+json"
_LAYER = _OCI + "layer.v1.tar"
# How packed layers begin: https://www.rfc-editor.org/rfc/rfc1952, rfc8878.
_PACKED = ((b"\x1f\x8b", "+gzip"), (b"\x28\xb5\x2f\xfd", "+zstd"))


class NotAnImage(ValueError):
    """What should be an image in a tar is none, or not whole."""


@dataclass(frozen=True)
class Layer:
    """One layer: SHA-256 and bytes of what travels, and the SHA-256 of the tar in it, which are the
    same where it is not packed.
    """

    digest: str
    size: int
    diff: str


@dataclass(frozen=True)
class Image:
    """An image without its layers' bytes: `config` is the name of its configuration's blob, with
    `config_size` bytes, `manifest` the text that lists it and the layers.
    """

    config: str
    config_size: int
    manifest: str
    layers: tuple[Layer, ...]

    @classmethod
    def read(cls, said: dict[str, Any]) -> Image:
        """Read what `as_json` wrote."""
        layers = tuple(Layer(*each) for each in said["layers"])
        return cls(said["config"], int(said["config_size"]), said["manifest"], layers)

    def as_json(self) -> dict[str, Any]:
        """Return it ready for `json.dumps`."""
        rows = [[each.digest, each.size, each.diff] for each in self.layers]
        about = {"config": self.config, "config_size": self.config_size}
        return {**about, "manifest": self.manifest, "layers": rows}


@dataclass(frozen=True)
class _Blob:
    digest: str
    size: int
    begin: bytes  # all of what may be JSON


def split(stream: IO[bytes], folder: str = "", name: str = "") -> Image:
    """Take an image apart. Its blobs lie in `folder` afterwards, under their digests; without one
    it is only read and compared.

    Args:
        stream: the tar, as `docker save` writes it.
        folder: where blobs go.
        name: which image, where there are several.

    Raises:
        NotAnImage: it is none, or a layer is not what its digest says.
        OSError: it could not be read or written.
    """
    there: dict[str, _Blob] = {}
    links: dict[str, str] = {}
    try:
        with tarfile.open(fileobj=stream, mode="r|*") as tar:
            for member in tar:
                path = posixpath.normpath(member.name)
                file = tar.extractfile(member) if member.isreg() else None
                if file is not None:
                    there[path] = _keep(file, folder)
                elif member.issym():
                    links[path] = posixpath.normpath(
                        posixpath.join(posixpath.dirname(path), member.linkname)
                    )
    except tarfile.TarError as error:
        raise NotAnImage(f"no image came, or not all of one: {error}") from None

    def at(path: str) -> _Blob:
        path = posixpath.normpath(path)
        return there[links.get(path, path)]

    try:
        image = _image(at, there.values(), name)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, NotAnImage):
            raise
        raise NotAnImage(f"this is not what `docker save` writes ({error!r:.200})") from None
    if folder:
        _drop_others(folder, {image.config, *(each.digest for each in image.layers)}, there)
    return image


def _keep(file: IO[bytes], folder: str) -> _Blob:
    """Read a file of the tar, and write it under its digest."""
    digest, size, begin = hashlib.sha256(), 0, bytearray()
    path = os.path.join(folder, "incoming")
    with open(path if folder else os.devnull, "wb") as out:
        while data := file.read(_BLOCK):
            digest.update(data)
            begin += data if bytes(begin[:1]) in (b"", b"{", b"[") and size < _SMALL else b""
            size += len(data)
            out.write(data)
    if folder:
        os.replace(path, os.path.join(folder, digest.hexdigest()))
    kept = begin if bytes(begin[:1]) in (b"{", b"[") and size <= _SMALL else begin[:4]
    return _Blob(digest.hexdigest(), size, bytes(kept))


def _drop_others(folder: str, kept: set[str], there: dict[str, _Blob]) -> None:
    for digest in {each.digest for each in there.values()} - kept:
        os.unlink(os.path.join(folder, digest))


def _image(at: Callable[[str], _Blob], blobs: Iterable[_Blob], name: str) -> Image:
    listed = json.loads(at("manifest.json").begin)
    several = [each for each in listed if name in (each.get("RepoTags") or ())]
    if len(listed) != 1 and len(several) != 1:
        tags = sorted(tag for each in listed for tag in each.get("RepoTags") or ())
        raise NotAnImage(f"it holds several images; say which one: {', '.join(tags)}")
    one = several[0] if several else listed[0]
    config = at(one["Config"])
    diffs = [_hex(each) for each in json.loads(config.begin)["rootfs"]["diff_ids"]]
    if len(diffs) != len(one["Layers"]):
        raise NotAnImage("it has not as many layers as its configuration says")
    layers: list[Layer] = []
    rows = []
    for number, diff in enumerate(diffs):
        path = one["Layers"][number]
        blob = at(path)
        media = next((each for begin, each in _PACKED if blob.begin.startswith(begin)), "")
        # What is packed has another digest than the tar in it; then its name says which.
        if blob.digest != (posixpath.basename(path) if media else diff):
            raise NotAnImage(f"layer {number + 1} is not what its digest {diff[:12]}… says")
        layers.append(Layer(blob.digest, blob.size, diff))
        rows.append(_row(_LAYER + media, blob))
    about = {"schemaVersion": 2, "mediaType": _MANIFEST}
    made = {**about, "config": _row(_OCI + "config.v1+json", config), "layers": rows}
    text = _published(config, layers, blobs) or json.dumps(made, separators=(",", ":"))
    return Image(config.digest, config.size, text, tuple(layers))


def _hex(digest: str) -> str:
    kind, _, text = digest.partition(":")
    if kind != "sha256" or len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise NotAnImage(f"{digest[:100]!r} is no SHA-256")
    return text


def _row(media: str, blob: _Blob) -> dict[str, Any]:
    return {"mediaType": media, "digest": f"sha256:{blob.digest}", "size": blob.size}


def _published(config: _Blob, layers: Sequence[Layer], blobs: Iterable[_Blob]) -> str:
    """Return the manifest that the image came with, so that its digest stays what it was; empty
    where the tar has none.
    """
    wanted = [f"sha256:{each}" for each in (config.digest, *(one.digest for one in layers))]
    for blob in blobs:
        if len(blob.begin) == blob.size and b'"layers"' in blob.begin:
            text = blob.begin.decode()
            said = json.loads(text)
            rows = [said.get("config"), *(said.get("layers") or ())]
            if [isinstance(each, dict) and each.get("digest") for each in rows] == wanted:
                return text
    return ""


def pack(
    image: Image, names: Sequence[str], here: Sequence[str], read: Callable[[str], Iterator[bytes]]
) -> Iterator[bytes]:
    """Return the tar that `docker load` makes an image of, in pieces.

    It has both lists of layers: Docker's classic store reads `manifest.json` and passes over layers
    that it has, containerd's reads `index.json` and passes over blobs that it has.

    Args:
        image: what is put together.
        names: what it is called then, `NAME:TAG` each.
        here: the blobs that are in the tar: the configuration, and layers that the other side
            lacks.
        read: returns a blob's bytes; it may take its time.
    """
    manifest = image.manifest.encode()
    digest = hashlib.sha256(manifest).hexdigest()
    media = json.loads(image.manifest).get("mediaType", _MANIFEST)
    row = {"mediaType": media, "digest": f"sha256:{digest}", "size": len(manifest)}
    index = {
        "schemaVersion": 2,
        "mediaType": _OCI + "index.v1+json",
        "manifests": [
            {**row, "annotations": {"io.containerd.image.name": full_name(each)}} for each in names
        ],
    }
    paths = [f"blobs/sha256/{each.digest}" for each in image.layers]
    config = f"blobs/sha256/{image.config}"
    listed = [{"Config": config, "RepoTags": list(names), "Layers": paths}]
    yield from _file("oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
    yield from _file("index.json", json.dumps(index).encode())
    yield from _file("manifest.json", json.dumps(listed).encode())
    yield from _file(f"blobs/sha256/{digest}", manifest)
    sizes = {each.digest: each.size for each in image.layers}
    for each in here:
        size = sizes.get(each, image.config_size)
        yield _head(f"blobs/sha256/{each}", size)
        yield from read(each)
        yield bytes(-size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def _file(name: str, data: bytes) -> Iterator[bytes]:
    yield _head(name, len(data))
    yield data + bytes(-len(data) % tarfile.BLOCKSIZE)


def _head(name: str, size: int) -> bytes:
    entry = tarfile.TarInfo(name)
    entry.size = size
    return entry.tobuf(tarfile.GNU_FORMAT)


def full_name(name: str) -> str:
    """Return an image's name with registry and tag, as containerd writes it
    (github.com/distribution/reference, `ParseNormalizedNamed`).
    """
    first, _, rest = name.partition("/")
    if not rest:
        name = f"docker.io/library/{name}"
    elif first != "localhost" and "." not in first and ":" not in first:
        name = f"docker.io/{name}"
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"
