"""The image of practice hosts with stand-in GPUs: the practice image, and on it what an inventory
with `accelerator: nvidia` does not bring.

vLLM's CPU build needs a platform plugin under Ray, which `vlaunch up` adds for `accelerator: cpu`
alone; here the image itself carries it, and says that it is no image for GPUs.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

from launcher.lab import gpu_claim, image
from launcher.lab.gpu_models import PLAINLY
from launcher.tools import derived

NAME = f"vllm-practice-gpus:{image.VLLM}"
LABEL = "vlaunch.practice"
_CLAIM = "vlaunch_gpu_claim"
_CLAIM_INFO = {
    "METADATA": f"Metadata-Version: 2.1\nName: {_CLAIM}\nVersion: 1.0\n",
    "entry_points.txt": f"[vllm.general_plugins]\n{_CLAIM} = {_CLAIM}:register\n",
}
# What vLLM needs on a CPU; an inventory that `vlaunch init` has written says nothing of it.
_ENV = (
    "HF_HUB_OFFLINE=1",
    "OMP_NUM_THREADS=1",
    "VLLM_CPU_KVCACHE_SPACE=1",
    "VLLM_CPU_OMP_THREADS_BIND=nobind",
)


def ensure(cache: Path, base: Path) -> Path:
    """Return an archive of this image for a Docker that has the one in `base` already: it holds
    the upper layer alone.
    """
    layer = _layer()
    key = hashlib.sha256(layer + "".join(_ENV).encode() + base.name.encode()).hexdigest()[:12]
    archive = cache / f"gpus-{key}.tar"
    with image.only_one(cache):
        if not archive.exists():
            for old in cache.glob("gpus-*.tar"):
                old.unlink()
            pack(base, layer, archive)
    return archive


def pack(base: Path, layer: bytes, archive: Path) -> None:
    """Write the archive, appearing only when it is whole.

    `docker load` takes a layer from the archive only where it has none with that chain of digests
    (moby, image/tarexport/load.go).
    """
    config, layers = _read(base)
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
    whole = archive.with_suffix(".partial")
    with tarfile.open(whole, "w") as tar:
        _add(tar, "manifest.json", json.dumps(manifest).encode())
        _add(tar, name, text)
        _add(tar, f"{digest}/layer.tar", layer)
    whole.rename(archive)


def _read(base: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the configuration of the image in an archive, and its layers' places there."""
    with tarfile.open(base) as tar:

        def content(name: str) -> Any:
            member = tar.extractfile(name)
            assert member is not None  # noqa: S101 - `image.pack` wrote it
            return json.load(member)

        manifest = content("manifest.json")[0]
        return content(manifest["Config"]), manifest["Layers"]


def _layer() -> bytes:
    """Return the layer, the same bytes every time: both plugins as pip would install them, and a
    word about what this is.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        _add(tar, "etc/vlaunch-practice", f"{PLAINLY}\n".encode())
        for name, data in derived.plugin_files().items():
            _add(tar, f"{image.SITE}/{name}", data)
        _add(tar, f"{image.SITE}/{_CLAIM}.py", Path(gpu_claim.__file__).read_bytes())
        for name, text in _CLAIM_INFO.items():
            _add(tar, f"{image.SITE}/{_CLAIM}-1.0.dist-info/{name}", text.encode())
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), 0o644
    tar.addfile(entry, io.BytesIO(data))
