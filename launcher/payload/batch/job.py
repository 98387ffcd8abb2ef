"""What the driver was asked to do: `job.json` as frozen values, and the two ways in which it can be
impossible.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

VERSION = 1


class Failed(Exception):
    """The job cannot go on: what happened, the lines that show it, and what to do."""

    def __init__(self, message: str, evidence: str = "", hint: str = "") -> None:
        # all three: exceptions travel between processes by their arguments
        super().__init__(message, evidence, hint)
        self.message, self.evidence, self.hint = message, evidence, hint

    def __str__(self) -> str:
        return self.message


class Refused(Failed):
    """The job cannot begin as it stands; nothing was read or written in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    sources: tuple[str, ...]
    format: str
    id: str | None = None
    limit: int | None = None
    row_bytes: int = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    column: str | None = None
    template: str | None = None
    chat: tuple[Message, ...] = ()
    chat_args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    args: Mapping[str, Any] = field(default_factory=dict)
    tp: int = 1
    pp: int = 1
    replicas: tuple[int, int] = (1, 1)
    batch_size: int = 256
    placement: str = "PACK"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    ip: str
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallel:
    size: int
    port: int
    nodes: tuple[Node, ...]
    expert_parallel: bool | None = None
    timeout: float = 600.0
    round_rows: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Predict:
    target: str
    args: Mapping[str, Any] = field(default_factory=dict)
    num_gpus: float = 0.0
    num_cpus: float = 1.0
    batch_size: int = 256
    replicas: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocess:
    target: str
    num_cpus: float = 1.0
    batch_size: int = 256
    replicas: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    format: str = "parquet"
    rows_per_file: int = 10_000
    seconds: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    restarts: int = 5
    stall: float = 1800.0
    errors: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job as the driver sees it; `keep` of None keeps every column, a type of None is found out
    from the first rows.
    """

    name: str
    cluster: str
    mode: str
    work: str
    out: str
    read: Read
    identity: Mapping[str, Any] = field(default_factory=dict)
    digest: str = ""
    model: str = ""
    prompt: Prompt | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    keep: Mapping[str, str | None] | None = None
    engine: Engine = field(default_factory=Engine)
    data_parallel: DataParallel | None = None
    predict: Predict | None = None
    preprocess: Preprocess | None = None
    write: Write = field(default_factory=Write)
    limits: Limits = field(default_factory=Limits)
    retry_errors: bool = False
    restart: bool = False

    @property
    def kept_columns(self) -> tuple[str, ...] | None:
        """The columns that go into the answers, the rows' ids among them; None for all."""
        if self.keep is None:
            return None
        ids = (self.read.id,) if self.read.id else ()
        return tuple(dict.fromkeys((*self.keep, *ids)))


def read(work: str) -> Job:
    """Read WORK/job.json.

    Raises:
        Refused: there is none, or this version does not understand it.
    """
    path = os.path.join(work, "job.json")
    try:
        with open(path, encoding="utf-8") as file:
            asked = json.load(file)
        if not isinstance(asked, dict) or asked.get("version") != VERSION:
            found = asked.get("version") if isinstance(asked, dict) else type(asked).__name__
            raise Refused(
                f"{path} is of version {found}, this driver understands {VERSION}",
                hint="run `vlaunch batch` again",
            )
        return job({**asked, "work": os.path.abspath(work)})
    except OSError as error:
        raise Refused(
            f"{path} cannot be read", str(error), "run `vlaunch batch` again: it writes this file"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise Refused(
            f"{path} does not describe a job",
            said,
            "run `vlaunch batch` again: it writes this file",
        ) from error


def job(asked: Mapping[str, Any]) -> Job:
    """Make a job of what `job.json` holds; keys that this version does not know are left out."""
    prompt, parallel = asked.get("prompt"), asked.get("data_parallel")
    return known(
        Job,
        asked,
        identity=asked.get("meaning", {}),
        read=known(Read, asked["read"], sources=tuple(asked["read"]["sources"])),
        prompt=prompt and known(Prompt, prompt, chat=each_known(Message, prompt.get("chat"))),
        engine=ranged(Engine, asked.get("engine") or {}),
        data_parallel=parallel
        and known(DataParallel, parallel, nodes=each_known(Node, parallel.get("nodes"))),
        predict=asked.get("predict") and ranged(Predict, asked["predict"]),
        preprocess=asked.get("preprocess") and ranged(Preprocess, asked["preprocess"]),
        write=known(Write, asked.get("write") or {}),
        limits=known(Limits, asked.get("limits") or {}),
    )


def known(kind: Any, asked: Mapping[str, Any], **made: Any) -> Any:
    """Make a value of the fields that it has; `made` are those that are more than JSON."""
    fields = kind.__dataclass_fields__
    return kind(**{name: value for name, value in {**asked, **made}.items() if name in fields})


def each_known(kind: Any, asked: Iterable[Mapping[str, Any]] | None) -> tuple[Any, ...]:
    """Make a value of each; of nothing, none."""
    return tuple(known(kind, each) for each in asked or ())


def ranged(kind: Any, asked: Mapping[str, Any]) -> Any:
    least, most = asked.get("replicas") or (1, 1)
    return known(kind, asked, replicas=(int(least), int(most)))


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two identities of a job, a line each."""
    return [
        f"{key}: {brief(before, key)} → {brief(now, key)}"
        for key in sorted({*before, *now})
        if before.get(key, ...) != now.get(key, ...)
    ]


def brief(values: Mapping[str, Any], key: str) -> str:
    if key not in values:
        return "(nothing)"
    text = json.dumps(values[key], ensure_ascii=False, default=str)
    return text if len(text) <= 120 else text[:117] + "…"
