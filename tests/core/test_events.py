"""The one stream of what happens."""

from __future__ import annotations

import json

from launcher.core.events import Event


def test_an_event_as_json_leaves_out_what_is_empty_and_rounds_times() -> None:
    """Machines read lines; a line says only what there is to say."""
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
