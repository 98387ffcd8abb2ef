"""Tiny models with random weights: built once inside the image, then copied to all lab hosts."""

import hashlib
import shutil
from pathlib import Path

from launcher.lab import hosts, image, machine
from launcher.lab.layout import HF_HOME, Host, Lab
from launcher.lab.machine import Say

LLAMA = "tiny-llama"
MOE = "tiny-moe"
EMBED = "tiny-embed"
RERANK = "tiny-rerank"
_OTHER_MODELS = Path(__file__).with_name("tiny_others.py")
# Built in this order: the other models use the tokenizer of tiny-llama.
_SCRIPTS = {
    LLAMA: Path(__file__).with_name("tiny_llama.py"),
    MOE: _OTHER_MODELS,
    EMBED: _OTHER_MODELS,
    RERANK: _OTHER_MODELS,
}


def ensure_models(lab: Lab, cache: Path, archive: Path, say: Say) -> None:
    """Copy the models to all hosts that lack them, building them if the cache has none."""
    cached = cache / f"model-{_digest(archive)}"
    with image.cache_lock(cache):
        if not cached.exists():
            say("creating the tiny models")
            _build_models(lab.hosts[0], cached)
        for host in lab.hosts:
            for name in _SCRIPTS:
                target = hosts.hf_home(host) / name
                if not _same_files(cached / name, target):
                    shutil.rmtree(target, ignore_errors=True)
                    shutil.copytree(cached / name, target)


def _digest(archive: Path) -> str:
    """Return a hash of the models' inputs: the image and the scripts."""
    inputs = archive.name + "".join(script.read_text() for script in _SCRIPTS.values())
    return hashlib.sha256(inputs.encode()).hexdigest()[:12]


def _build_models(host: Host, cached: Path) -> None:
    build_dir = hosts.hf_home(host) / ".models"
    shutil.rmtree(build_dir, ignore_errors=True)
    build_dir.mkdir()
    container_dir = f"{HF_HOME}/{build_dir.name}"
    for name, script in _SCRIPTS.items():
        (build_dir / name).mkdir()
        (build_dir / script.name).write_text(script.read_text())
        machine.run(
            *hosts.docker_argv(
                host,
                "run",
                "--rm",
                "--network",
                "none",
                "--volume",
                f"{container_dir}:{container_dir}",
            ),
            *(
                "--entrypoint",
                "python3",
                image.NAME,
                f"{container_dir}/{script.name}",
                f"{container_dir}/{name}",
                f"{container_dir}/{LLAMA}",
            ),
            timeout=300,
            what=f"making the model {name}",
        )
        (build_dir / script.name).unlink()
        for path in (build_dir / name).iterdir():
            path.chmod(0o644)
    for old in cached.parent.glob("model-*"):
        shutil.rmtree(old)
    shutil.copytree(build_dir, cached.with_suffix(".partial"))
    cached.with_suffix(".partial").rename(cached)
    shutil.rmtree(build_dir)


def _same_files(first: Path, second: Path) -> bool:
    """Compare two directories of small files byte by byte."""
    names = sorted(path.name for path in first.iterdir())
    if not second.is_dir() or names != sorted(path.name for path in second.iterdir()):
        return False
    return all((first / name).read_bytes() == (second / name).read_bytes() for name in names)
