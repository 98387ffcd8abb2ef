"""Image for lab hosts with simulated GPUs: the lab image plus the plugins they need.

vLLM's CPU build needs a platform plugin under Ray, which `vlaunch up` adds only with
`accelerator: cpu`. This image includes it, and a label that marks it as an image without GPUs.
"""

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

from launcher.lab import gpu_claim, image, plugin
from launcher.lab.gpu_models import PLAINLY

NAME = f"vllm-practice-gpus:{image.VLLM}"
LABEL = "vlaunch.practice"
_CLAIM = "vlaunch_gpu_claim"
_CLAIM_INFO = {
    "METADATA": f"Metadata-Version: 2.1\nName: {_CLAIM}\nVersion: 1.0\n",
    "entry_points.txt": f"[vllm.general_plugins]\n{_CLAIM} = {_CLAIM}:register\n",
}
# vLLM needs these on a CPU; an inventory from `vlaunch init` does not set them.
_ENV = (
    "HF_HUB_OFFLINE=1",
    "OMP_NUM_THREADS=1",
    "VLLM_CPU_KVCACHE_SPACE=1",
    "VLLM_CPU_OMP_THREADS_BIND=nobind",
)


def ensure(cache: Path, base: Path) -> Path:
    """Return an archive with the upper layer only, for a Docker that has the image in `base`."""
    layer = _layer()
    key = hashlib.sha256(layer + "".join(_ENV).encode() + base.name.encode()).hexdigest()[:12]
    archive = cache / f"gpus-{key}.tar"
    with image.cache_lock(cache):
        if not archive.exists():
            for old in cache.glob("gpus-*.tar"):
                old.unlink()
            pack(base, layer, archive)
    return archive


def pack(base: Path, layer: bytes, archive: Path) -> None:
    """Write the archive atomically.

    `docker load` reads a layer from the archive only if it lacks that chain of digests (moby,
    image/tarexport/load.go).
    """
    config, layers = _read_base(base)
    digest = hashlib.sha256(layer).hexdigest()
    config["rootfs"]["diff_ids"].append(f"sha256:{digest}")
    config["history"].append({"created_by": f"vlaunch lab up: {PLAINLY}"})
    config["config"]["Env"] += _ENV
    config["config"]["Labels"] = {LABEL: PLAINLY}
    text = json.dumps(config, sort_keys=True).encode()
    name = f"{hashlib.sha256(text).hexdigest()}.json"
    manifest = [
        {"Config": name, "RepoTags": [NAME], "Layers": [*layers, f"{digest}/layer.tar"]},
    ]
    partial = archive.with_suffix(".partial")
    with tarfile.open(partial, "w") as tar:
        _add_file(tar, "manifest.json", json.dumps(manifest).encode())
        _add_file(tar, name, text)
        _add_file(tar, f"{digest}/layer.tar", layer)
    partial.rename(archive)


def _read_base(base: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration of the image in an archive, and the paths of its layers."""
    with tarfile.open(base) as tar:

        def content(name: str) -> Any:
            member = tar.extractfile(name)
            assert member is not None  # noqa: S101 - `image.pack` wrote it
            return json.load(member)

        manifest = content("manifest.json")[0]
        return content(manifest["Config"]), manifest["Layers"]


def _layer() -> bytes:
    """Return the reproducible layer: both plugins as installed by pip, and a note in /etc."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        _add_file(tar, "etc/vlaunch-practice", f"{PLAINLY}\n".encode())
        for name, data in plugin.files().items():
            _add_file(tar, f"{image.SITE}/{name}", data)
        _add_file(tar, f"{image.SITE}/{_CLAIM}.py", Path(gpu_claim.__file__).read_bytes())
        for name, text in _CLAIM_INFO.items():
            _add_file(tar, f"{image.SITE}/{_CLAIM}-1.0.dist-info/{name}", text.encode())
    return buffer.getvalue()


def _add_file(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o644
    tar.addfile(entry, io.BytesIO(data))
