"""What the tests of exports that run share: what a server must answer, who asks it, and what is
left when it has ended.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from launcher.lab.layout import Host
from launcher.lab.render import MODEL
from tests.integration.conftest import API_KEY, HF_TOKEN, Practice
from tests.integration.servers import url

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
