"""The output folder of a batch job: the names that vlaunch writes there, and may delete.

`rows/part-NUMBER.parquet` or `.jsonl`, `errors/part-NUMBER.jsonl` and `summary.json`; in `ledger/`,
`part-NUMBER.json`, `schema.json`, `run.json`, and `job.json`, the mark of the job that owns the
folder. A file is written under a hidden name, `.NAME.SUFFIX.new`, and then renamed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

KINDS = ("rows", "errors")
FOLDERS = (*KINDS, "ledger")
PART = re.compile(r"part-(\d{6,12})\.(json|jsonl|parquet)", re.ASCII)
_OUTPUT = re.compile(
    r"rows/part-\d{6,12}\.(?:parquet|jsonl)|errors/part-\d{6,12}\.jsonl|summary\.json", re.ASCII
)
_STATE = ("job", "run", "schema")
_HIDDEN = re.compile(rf"\.(?:part-\d{{6,12}}|{'|'.join(_STATE)})\.[a-z]+\.new", re.ASCII)


def part_name(number: int) -> str:
    """Return the name of a part, without its ending."""
    return f"part-{number:06d}"


def is_output(path: str) -> bool:
    """Return True for a file of answers or errors, or the summary, relative to the folder."""
    return _OUTPUT.fullmatch(path) is not None


def ledger_number(name: str) -> int | None:
    """Return the number of a ledger file; None for another name."""
    match = PART.fullmatch(name)
    return int(match[1]) if match and match[2] == "json" else None


def is_own(name: str) -> bool:
    """Return True for a file that vlaunch writes in one of `FOLDERS`, or is about to rename."""
    state = name in {f"{stem}.json" for stem in _STATE}
    return state or bool(PART.fullmatch(name) or _HIDDEN.fullmatch(name))


def is_marked(mark: Mapping[str, Any], job: str, cluster: str) -> bool:
    """Return True if a folder with this mark belongs to the job."""
    return (mark.get("job"), mark.get("cluster")) == (job, cluster)
