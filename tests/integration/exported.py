"""What the tests of exports that run share: what a server must answer, who asks it, and what is
left when it has ended.
"""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.faults.traffic import Traffic
from launcher.lab.layout import Host
from launcher.lab.render import MODEL
from tests.integration.batches import running, until
from tests.integration.conftest import API_KEY, HF_TOKEN, Practice
from tests.integration.servers import answered_since, lost, url

T = TypeVar("T")
# Two stages over two nodes, as everywhere here.
SPLIT = ("--tp", "1", "--pp", "2")
SERVER = "/srv/server"  # where a practice host has the files of an export
# What the exports want to be given; made up, like the rest of the practice server's secrets.
GIVEN = {"VLLM_API_KEY": API_KEY, "HF_TOKEN": HF_TOKEN, "RAY_AUTH_TOKEN": "ab" * 32}
_PROMPT = "def main"


@dataclass(frozen=True)
class Answer:
    """A greedy answer: its words, and what vLLM says of version, split and settings."""

    words: str
    fingerprint: str


def ask(practice: Practice, host: str = "node1") -> Answer:
    """Ask the server for a greedy completion."""
    body = {"model": MODEL, "prompt": _PROMPT, "max_tokens": 24, "temperature": 0}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"}
    request = urllib.request.Request(
        f"{url(practice, host)}/completions", json.dumps(body).encode(), headers
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        said = json.load(answer)
    return Answer(words=said["choices"][0]["text"], fingerprint=said["system_fingerprint"])


def on_all(practice: Practice, do: Callable[[Host], T]) -> list[T]:
    """Do something on all hosts at once."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(do, practice.lab.hosts))


def written(practice: Practice, kind: str, folder: Path, *words: str) -> Path:
    """Export the practice server into a folder, with the secrets that it wants; return that."""
    ran = practice.vlaunch("export", kind, "-o", str(folder), *SPLIT, *words)
    assert ran.code == 0, ran.said
    secrets = folder / "secrets"
    secrets.mkdir(mode=0o700)
    for name, value in GIVEN.items():
        (secrets / name).write_text(value)
        (secrets / name).chmod(0o600)
    return folder


def observed(practice: Practice) -> dict[str, Any]:
    """Return what the head's agent has written of its server."""
    said = practice.docker(
        "node1", "exec", "vlaunch-lab-node1", "python3", "/opt/vlaunch/head.py", "servers"
    )
    (server,) = json.loads(said)["servers"]
    found: dict[str, Any] = server["observed"]
    return found


def left(practice: Practice) -> Iterable[str]:
    """Yield what Docker and processes have left of a server on all hosts, volumes included."""
    for host in practice.lab.hosts:
        for what in (("ps", "--all"), ("volume", "ls")):
            found = practice.docker(host.name, *what, "--quiet").split()
            yield from (f"{host.name}: {what[0]} {each}" for each in found)
        for words in ("vllm", "vlaunch_agent"):
            yield from (f"{host.name}: {line}" for _, line in running(practice, words, host.name))


def place(practice: Practice, folder: Path) -> None:
    """Bring a folder to all hosts, in place of what they had."""
    for host in practice.lab.hosts:
        there = host.root / SERVER.lstrip("/")
        if there.exists():
            shutil.rmtree(there)
        shutil.copytree(folder, there)


def answers_again(traffic: Traffic, within: float) -> None:
    """Wait until a request has failed, and a later one is answered."""
    until(lambda: lost(traffic), "a request fails", 60)
    failed = lost(traffic)[0].ended
    until(lambda: answered_since(traffic, failed), "it answers again", within)


def clear(practice: Practice) -> None:
    """Remove what `place` and tests have brought to the hosts."""
    for host in practice.lab.hosts:
        for path in (host.root / "srv").iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
