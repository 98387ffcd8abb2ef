"""State of a front as parsed from its node's answer."""

from __future__ import annotations

import json

import pytest

from launcher.core.domain import Answer
from launcher.front.keys import Key
from launcher.front.status import FrontStatus, ReplicaStatus, parse_status

STAT = """\
# pxname,svname,qcur,qmax,scur,smax,slim,stot,econ,eresp,status,
FRONT,FRONTEND,,,3,9,,40,,,OPEN,
chat,gpu01,0,0,2,5,,30,1,2,UP,
chat,HOLD,0,0,4,4,,4,0,0,no check,
chat,BACKEND,0,0,6,6,,34,1,2,UP,
ROUTER,router,0,0,1,1,,1,0,0,UP,
chat.ready,gpu01,0,0,0,0,,0,0,0,UP,
"""


def answer(out: str, code: int = 0) -> Answer:
    """Return a node's answer."""
    return Answer(node="gpu01", code=code, out=out)


def test_replicas_keys_and_waiting_requests_are_counted() -> None:
    """Without HAProxy's own rows."""
    content = {
        "keys": "ab bob:0:2:*\ncd alice:60:0:,chat,\n# revoked ef\n",
        "stat": STAT,
        "info": "Name: HAProxy\ndescription: 0123456789ab\n",
    }

    assert parse_status(answer(json.dumps(content))) == FrontStatus(
        keys=(
            Key(name="alice", digest="cd", rpm=60, models=("chat",)),
            Key(name="bob", digest="ab", concurrent=2),
        ),
        digest="0123456789ab",
        held=4,
        replicas=(
            ReplicaStatus(
                server="chat", replica="gpu01", state="UP", requests=2, total=30, errors=3
            ),
        ),
    )


@pytest.mark.parametrize(
    "out",
    [
        "",
        "[]",
        "{",
        '{"keys": 1}',
        '{"keys": {"a": 1}}',
        '{"keys": "a b"}',
        '{"keys": "", "stat": 1}',
        '{"keys": "", "stat": "# a,b\\n1,2"}',
        '{"keys": "", "stat": "# pxname,svname,scur\\n1,2,x"}',
        '{"keys": "", "info": [1]}',
        "[" * 100_000,
    ],
)
def test_an_unreadable_answer_is_a_front_whose_state_is_unknown(out: str) -> None:
    """Whatever a node sends."""
    assert parse_status(answer(out)) == FrontStatus(error="its answer is unreadable")
    assert parse_status(answer("{}", code=1)) == FrontStatus(error="{}")
