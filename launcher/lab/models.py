"""Put the tiny random model on every practice host: made once, inside the image, and the same bytes everywhere."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from launcher.lab import hosts, image, machine
from launcher.lab.layout import HF_HOME, Host, Lab
from launcher.lab.machine import Say

NAME = "tiny-llama"
_SCRIPT = Path(__file__).with_name("tiny_llama.py")


def ensure(lab: Lab, cache: Path, archive: Path, say: Say) -> None:
    """Give every host of `lab` that lacks it the model, making it first where the cache has none."""
    script = _SCRIPT.read_text()
    cached = cache / f"model-{hashlib.sha256((archive.name + script).encode()).hexdigest()[:12]}"
    if not cached.exists():
        say("making the tiny model")
        _make(lab.hosts[0], script, cached)
    for host in lab.hosts:
        target = hosts.hf_home(host) / NAME
        if not _same(cached, target):
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(cached, target)


def _make(host: Host, script: str, cached: Path) -> None:
    making = hosts.hf_home(host) / f".{NAME}"
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    (making / _SCRIPT.name).write_text(script)
    inside = f"{HF_HOME}/{making.name}"
    machine.run(
        *hosts.docker_argv(host, "run", "--rm", "--network", "none", "--volume", f"{inside}:{inside}"),
        *("--entrypoint", "python3", image.NAME, f"{inside}/{_SCRIPT.name}", inside),
        timeout=300,
        what="making the tiny model",
    )
    (making / _SCRIPT.name).unlink()
    for path in making.iterdir():
        path.chmod(0o644)
    for old in cached.parent.glob("model-*"):
        shutil.rmtree(old)
    shutil.copytree(making, cached.with_suffix(".partial"))
    cached.with_suffix(".partial").rename(cached)
    shutil.rmtree(making)


def _same(one: Path, other: Path) -> bool:
    """Compare two directories of small files byte by byte."""
    names = sorted(path.name for path in one.iterdir())
    if not other.is_dir() or names != sorted(path.name for path in other.iterdir()):
        return False
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)
