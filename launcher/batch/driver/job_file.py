"""The job of a driver: `job.json`, as the launcher wrote it, and the two ways in which it fails."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from ...core.values import FromMapping
from ..job import VERSION, PlacedJob

if TYPE_CHECKING:
    from pydantic import TypeAdapter


class Failed(Exception):
    """A failure that ends the job: message, evidence lines and hint."""

    def __init__(self, message: str, evidence: str = "", hint: str = "") -> None:
        # all three: exceptions are pickled by their arguments
        super().__init__(message, evidence, hint)
        self.message, self.evidence, self.hint = message, evidence, hint

    def __str__(self) -> str:
        return self.message


class Refused(Failed):
    """A failure before the start: no row was processed."""


def read_job(work: str) -> PlacedJob:
    """Read WORK/job.json.

    Raises:
        Refused: the file is missing or of another version.
    """
    path, again = os.path.join(work, "job.json"), "run `vlaunch batch` again: it writes this file"
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
        version = content.pop("version", None) if isinstance(content, dict) else type(content)
        if version != VERSION:
            shown = getattr(version, "__name__", version)
            text = f"{path} is of version {shown}, but this driver supports {VERSION}"
            raise Refused(text, hint="run `vlaunch batch` again")
        return parse_job({**content, "work": os.path.abspath(work)})
    except OSError as error:
        raise Refused(f"cannot read {path}", str(error), again) from error
    except (ValueError, RecursionError) as error:
        evidence = f"{type(error).__name__}: {error}"
        raise Refused(f"{path} does not describe a job", evidence, again) from error


def parse_job(content: Mapping[str, Any]) -> PlacedJob:
    """Parse the content of `job.json`, without its version; raises ValueError."""
    return _job_adapter().validate_python(dict(content))


@cache
def _job_adapter() -> TypeAdapter[PlacedJob]:
    from pydantic import TypeAdapter

    marked: Any = FromMapping
    return TypeAdapter(marked[PlacedJob])


def thin_job(job: PlacedJob) -> PlacedJob:
    """Return a job for tasks and actors to carry: it does not grow with the input."""
    return dataclasses.replace(job, read=dataclasses.replace(job.read, paths=()), identity={})
