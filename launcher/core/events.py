"""Progress events: the one stream behind terminals, pipes, `--json` and tests."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Kind = Literal["stage", "step", "wait", "finding", "note", "warning", "done"]
State = Literal["", "running", "ok", "failed", "unchanged", "warn", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A progress event.

    `stage` is the stage's id; an empty `node` means all nodes. `seconds` is the duration, or for
    `wait` the time waited so far, of at most `deadline`. Send a `wait` as often as its text changes
    or more: printers choose the lines. `data` of a `wait` is progress.
    """

    kind: Kind
    stage: str = ""
    node: str = ""
    text: str = ""
    state: State = ""
    seconds: float = 0.0
    deadline: float = 0.0
    data: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the event without its empty fields, ready for `json.dumps`."""
        return {
            key: round(value, 3) if isinstance(value, float) else value
            for key, value in asdict(self).items()
            if value not in ("", 0.0, {})
        }
