"""Claim on an output folder, `ledger/run.json`: the newest run owns it, and no earlier one commits.

A work folder's lock separates the drivers of one head. Two heads, or two clusters of one name,
share nothing but the output, and a driver that cannot be reached may still run. A commit that is
under way during a takeover may appear late: the new run numbers its files after a gap.
"""

from __future__ import annotations

import json
import platform
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ..job import PlacedJob
from .job_file import Failed
from .storage import Location, mask_secrets

GAP = 1_000  # numbers left to commits under way: six, and those until a network disk is up to date


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A run and its driver; `before` is the driver that it took over from.

    Files before number `first` may be late, those before `floor` have discarded results.
    """

    run: str
    driver: str
    before: str = ""
    first: int = 1
    floor: int = 1


def read_claim(output_dir: Location) -> Claim | None:
    """Return the claim on an output; None if there is none, or none that can be parsed."""
    try:
        data = json.loads(output_dir.child("ledger").child("run.json").read())
        claim = Claim(**data)
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return claim


def claim_run(job: PlacedJob, output_dir: Location, last: int, discard: bool = False) -> Claim:
    """Claim the output, whose last file has the number `last`.

    The previous driver of the work folder has ended, for its lock is held; any other may still run.
    """
    owner, note, node = read_claim(output_dir), Path(job.work, "run"), platform.node()
    run = f"{node}-{secrets.token_hex(8)}"
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    driver = f"the driver on {node} ({job.cluster}, {job.work}), started {started}"
    first, floor, before = (owner.first, owner.floor, owner.driver) if owner else (1, 1, "")
    if owner and owner.run == (note.read_text() if note.exists() else "") and node in owner.run:
        before = ""
    elif owner:
        first = max(first, last) + GAP
        floor = first if discard else floor
    claim = Claim(run=run, driver=driver, before=before, first=first, floor=floor)
    note.write_text(run)
    data = json.dumps(asdict(claim)).encode()
    output_dir.child("ledger").child("run.json").write_atomic(data)
    return claim


def check_claim(claim: Claim, output_dir: Location) -> None:
    """Raise Failed if another run has claimed the output."""
    owner = read_claim(output_dir)
    if owner is None or owner.run != claim.run:
        raise Failed(
            f"{mask_secrets(output_dir.address)} no longer belongs to this driver",
            f"{owner.driver} has claimed it" if owner else "its ledger/run.json is missing",
            "all committed rows are kept; stop one job with `vlaunch stop`, or give it another"
            " folder to write to; `vlaunch batch` continues with the rows that are not written",
        )
