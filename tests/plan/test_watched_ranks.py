"""Watching ranks that have a supervisor: it waits for what has ended, and its word counts."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launcher.model import Answer
from launcher.plan.watched import Seen, as_ranks
from tests.plan.test_ranks import INVENTORY, REQUEST


def look(*running: bool, log: str = "", **said: Any) -> Seen:
    """Read a look at two rank containers, of which rank 0 says something of its supervisor."""
    states = [
        {
            "Name": "/r", "Id": "1", "Config": {"Labels": {}, "Image": "i", "Env": []}, "RestartCount": 0,
            "State": {"Status": "running" if each else "exited", "ExitCode": 1, "StartedAt": "", "Error": ""},
        }
        for each in running
    ]  # fmt: skip
    answers = [Answer(node=f"n{n}", code=0, out=json.dumps([state])) for n, state in enumerate(states, start=1)]
    server = {"health": 0, "supervised": {"id": REQUEST.digest, "faults": [], "age": 1, "wanted": True, **said} if said else {}}
    head = [answers[0], Answer(node="n1", code=0, out=log), Answer(node="n1", code=0, out=json.dumps(server))]
    return as_ranks(INVENTORY, REQUEST).read({"n1": head, "n2": answers[1:]}, 0)


def test_a_container_that_has_ended_is_the_end_without_a_supervisor() -> None:
    """With one, it is waited for; but not when it is the supervisor's own."""
    waiting = look(True, False, state="recovering", doing="waiting for rank 1 on n2 to come back")

    assert (look(True, False).ended, look(True, False).culprits) == ("the rank on n2 ended with exit code 1", ("n2",))
    assert (waiting.ended, waiting.doing) == ("", "waiting for rank 1 on n2 to come back")
    assert look(False, True, state="recovering").ended == "the rank on n1 ended with exit code 1"


@pytest.mark.parametrize(("fault", "culprit"), [({"at": 1.0, "what": "x", "node": "n2"}, "n2"), (None, "n1")])
def test_a_group_that_gave_up_is_over(fault: Any, culprit: str) -> None:
    """Though all its containers run."""
    seen = look(
        True, True, log="one\nhalf", state="gave-up", doing="the first start failed: why", faults=[fault] if fault else []
    )  # fmt: skip

    assert seen.ended == "its supervisor gave up: the first start failed: why"
    assert seen.culprits == (culprit,)
    assert (seen.lines, seen.server) == (("one", "half"), {})


def test_what_another_engine_printed_is_not_this_ones() -> None:
    """A log has all of them, one after the other."""
    log = "ValueError: old\nvlaunch supervisor: starting the engine again: all 2 members are here (generation 2)\nnew\n"
    seen = look(True, True, log=log, state="recovering", doing="starting the engine")

    assert (seen.lines, seen.anew, seen.offset) == (("new",), True, len(log))
