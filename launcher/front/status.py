"""State of a front, as HAProxy reports it through its socket."""

import csv
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from launcher.core import untrusted
from launcher.core.domain import Answer
from launcher.front.keys import Key, parse_key


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """A replica of a server: HAProxy's state (UP, DOWN, DRAIN, MAINT), its requests now and so far,
    and its failed ones.
    """

    server: str
    replica: str
    state: str
    requests: int
    total: int
    errors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontStatus:
    """Keys and state of a front; `digest` identifies its configuration, empty unless it runs.
    `error` tells why a node's state is unknown.
    """

    keys: tuple[Key, ...] = ()
    digest: str = ""
    held: int = 0
    replicas: tuple[ReplicaStatus, ...] = ()
    error: str = ""


def parse_status(answer: Answer) -> FrontStatus:
    """Parse the status that `node_program` prints."""
    if not answer.ok:
        return FrontStatus(error=answer.tail or f"exit code {answer.code}")
    try:
        status = untrusted.loads(answer.out)
        lines = (line for line in status["keys"].splitlines() if not line.startswith("#"))
        keys = tuple(parse_key(*line.split(" ", 1)) for line in lines)
        rows = list(csv.DictReader((status.get("stat") or "").removeprefix("# ").splitlines()))
        digest = re.search(r"^description: ([0-9a-f]{12})$", status.get("info") or "", re.MULTILINE)
        return FrontStatus(
            keys=tuple(sorted(keys, key=lambda key: key.name)),
            digest=digest[1] if digest else "",
            held=sum(int(row["scur"]) for row in rows if row["svname"] == "HOLD"),
            replicas=tuple(_replicas(rows)),
        )
    except (ValueError, LookupError, TypeError, AttributeError, csv.Error):
        return FrontStatus(error="its answer is unreadable")


def _replicas(rows: list[dict[str, str]]) -> Iterator[ReplicaStatus]:
    for row in rows:
        is_replica = row["svname"] not in ("FRONTEND", "BACKEND", "HOLD")
        if is_replica and not row["pxname"].endswith(".ready") and not row["pxname"].isupper():
            yield ReplicaStatus(
                server=row["pxname"],
                replica=row["svname"],
                state=row["status"],
                requests=int(row["scur"]),
                total=int(row["stot"]),
                errors=_count(row, "econ") + _count(row, "eresp"),
            )


def _count(row: Mapping[str, str], column: str) -> int:
    return int(row[column] or 0)
