"""Fixtures of the batch tests: a folder with input, a valid job to modify, and its mistakes."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.batch.checked_job import CheckedJob, JobError
from launcher.batch.flags import job_from_file
from launcher.core.domain import Inventory
from launcher.inventory.load import loads as load_inventory

Load = Callable[..., CheckedJob]
Mistakes = Callable[..., list[str]]

_TOP = {"model": "model: m", "read": "read: data/chat.jsonl", "write": "write: out"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of a job: input of each format, and some Python."""
    home = tmp_path / "job"
    (home / "data").mkdir(parents=True)
    (home / "data" / "chat.jsonl").write_text('{"id": 1, "text": "a"}\n')
    (home / "data" / "more.jsonl").write_text('{"id": 2, "text": "b"}\n')
    (home / "data" / "_SUCCESS").write_text("")
    (home / "data" / ".hidden.jsonl").write_text("{}\n")
    (home / "prompts.txt").write_text("one\ntwo\n")
    (home / "mine.py").write_text(
        "import math\n\nclass Mine:\n    pass\n\ndef ready(batch):\n    return batch\n"
    )
    return home


@pytest.fixture
def load_text(folder: Path) -> Load:
    """Load a valid job with `more` keys (from line 4 on); `read`, `write` and `model` replace its
    own.
    """

    def load(extra: str = "", *, allow: tuple[Path, ...] = (), **top: str | None) -> CheckedJob:
        lines = [line for key, line in (_TOP | top).items() if line is not None]
        text = "\n".join([*lines, textwrap.dedent(extra).strip("\n")])
        path = folder / "test.yaml"
        path.write_text(text, encoding="utf-8")
        return job_from_file(path, {}, allow=allow)

    return load


@pytest.fixture
def mistakes(load_text: Load, folder: Path) -> Mistakes:
    """Return the mistakes of a job as `LINE: path: text`; `load_text` has the arguments."""

    def find(extra: str = "", **options: str | None) -> list[str]:
        try:
            load_text(extra, **options)
        except JobError as error:
            return [
                line.removeprefix(f"{folder / 'test.yaml'}:").replace(str(folder), "HERE")
                for line in error.mistakes
            ]
        return []

    return find


@pytest.fixture
def inventory() -> Inventory:
    """Two nodes with two GPUs each, the second one the head, and a mount."""
    return load_inventory(
        textwrap.dedent("""\
            cluster: pair
            image: vllm/vllm-openai:v0.32.0
            mounts: ["/data/in:/data/in:ro", "/data/shared:/data/shared"]
            nodes:
              - {host: a, ip: 10.0.0.11, gpus: 2}
              - {host: b, ip: 10.0.0.12, gpus: 2, head: true}
            """),
        Path("/etc/vlaunch/pair.yaml"),
    )
