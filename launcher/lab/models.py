"""Put the tiny random models on every practice host: made once, inside the image, and the same
bytes everywhere.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from launcher.lab import hosts, image, machine
from launcher.lab.layout import HF_HOME, Host, Lab
from launcher.lab.machine import Say

NAME = "tiny-llama"
MOE = "tiny-moe"
EMBED = "tiny-embed"
RERANK = "tiny-rerank"
_OTHERS = Path(__file__).with_name("tiny_others.py")
# In this order: the others take the tokenizer of the first one.
_SCRIPTS = {
    NAME: Path(__file__).with_name("tiny_llama.py"),
    MOE: _OTHERS,
    EMBED: _OTHERS,
    RERANK: _OTHERS,
}


def ensure(lab: Lab, cache: Path, archive: Path, say: Say) -> None:
    """Give every host of `lab` that lacks them the models, making them first where the cache has
    none.
    """
    cached = cache / f"model-{_digest(archive)}"
    with image.only_one(cache):
        if not cached.exists():
            say("making the tiny models")
            _make(lab.hosts[0], cached)
        for host in lab.hosts:
            for name in _SCRIPTS:
                target = hosts.hf_home(host) / name
                if not _same(cached / name, target):
                    shutil.rmtree(target, ignore_errors=True)
                    shutil.copytree(cached / name, target)


def _digest(archive: Path) -> str:
    """Stand for all that the models are made of: the image, and what runs in it."""
    made_of = archive.name + "".join(script.read_text() for script in _SCRIPTS.values())
    return hashlib.sha256(made_of.encode()).hexdigest()[:12]


def _make(host: Host, cached: Path) -> None:
    making = hosts.hf_home(host) / ".models"
    shutil.rmtree(making, ignore_errors=True)
    making.mkdir()
    inside = f"{HF_HOME}/{making.name}"
    for name, script in _SCRIPTS.items():
        (making / name).mkdir()
        (making / script.name).write_text(script.read_text())
        machine.run(
            *hosts.docker_argv(
                host, "run", "--rm", "--network", "none", "--volume", f"{inside}:{inside}"
            ),
            *(
                "--entrypoint",
                "python3",
                image.NAME,
                f"{inside}/{script.name}",
                f"{inside}/{name}",
                f"{inside}/{NAME}",
            ),
            timeout=300,
            what=f"making the model {name}",
        )
        (making / script.name).unlink()
        for path in (making / name).iterdir():
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
