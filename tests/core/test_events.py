"""The stream of events."""

from __future__ import annotations

import json

from launcher.core.events import Event


def test_events_as_json() -> None:
    """Without empty fields, with rounded times."""
    event = Event(
        kind="step",
        stage="head",
        node="gpu01",
        text="starting",
        state="ok",
        seconds=1.23456,
        data={"changed": 0},
    )

    assert json.loads(json.dumps(event.as_json())) == {
        "kind": "step",
        "stage": "head",
        "node": "gpu01",
        "text": "starting",
        "state": "ok",
        "seconds": 1.235,
        "data": {"changed": 0},
    }
    assert Event(kind="done").as_json() == {"kind": "done"}
