"""What is written, in and beside a job file, becomes a checked `Job` or every mistake at once.

Looks at this machine only.
"""

from __future__ import annotations

import re
from pathlib import Path

from launcher.batch import build, rules
from launcher.batch.draft import Draft, draft
from launcher.batch.places import Bounds
from launcher.batch.refused import HINT, JobError
from launcher.batch.shape import Job
from launcher.inventory import document
from launcher.inventory.document import Document
from launcher.inventory.mistakes import Mistake

MAX_BYTES = 1024 * 1024


def read(path: Path) -> str:
    """Return what is in the job file at `path`; raises JobError."""
    try:
        return document.read_file(path, most=MAX_BYTES, kind="job file")
    except document.UnusableFile as error:
        hint = "" if error.encoding else HINT
        raise JobError(
            f"`{path}` cannot be used", [f"{path}:{error.line}: {error}"], hint=hint
        ) from error


def parse(content: str) -> Document:
    """Read the YAML of a job file."""
    return document.parse(content, first="read", example="examples/reference.yaml")


def check(written: Document, within: Bounds, *, name: str) -> tuple[Job | None, list[Mistake]]:
    """Return the job, or what is wrong with it.

    Args:
        written: what is written, with its lines.
        within: where its paths start and may lead.
        name: the job's name where none is written; empty when there is none to give.
    """
    mistakes = list(written.mistakes)
    if written.data is None:
        return None, mistakes
    made, wrong = draft(written, within)
    mistakes += wrong
    if made is None:
        return None, mistakes
    mistakes += _broken_rules(made)
    if not (made.file.job or name) and made.sound("job"):
        mistakes.append(
            Mistake(
                where=(),
                text="`job` is missing: Name of the job, which the file's name does not give",
            )
        )
    return (None if mistakes else build.job(made, name=name, within=within)), mistakes


def _broken_rules(made: Draft) -> list[Mistake]:
    found = [mistake for rule in rules.ALL for mistake in rule(made)]
    return [mistake for mistake in found if made.sound(*mistake.where)]


def name_of(path: Path) -> str:
    """Return the job's name that a file's name gives: `My Job.yaml` → `my-job`; empty when it gives
    none.
    """
    return re.sub(r"[^a-z0-9_.-]+", "-", path.stem.lower())[:40].strip("-_.")
