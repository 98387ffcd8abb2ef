"""The program that changes keys, beside a running HAProxy."""

from __future__ import annotations

import hashlib

import pytest

from tests.front.running import running, wait_for

pytestmark = pytest.mark.processes
LINE = "carol:0:0:*"


def test_changes_can_be_repeated_and_a_revoked_key_stays_revoked() -> None:
    """Also after a restart of HAProxy, which reads the map again."""
    with running() as (front, _, _):
        key = front.add_key("carol")
        digest = hashlib.sha256(key.encode()).hexdigest()
        front.node("add", digest, LINE)
        assert front.status()["keys"] == f"{digest} {LINE}\n"
        assert front.get("/chat/v1/models", key=key)[0] == 200

        for words in [("carol",), ("carol",), ("", digest)]:
            front.node("revoke", *words)
            assert front.get("/chat/v1/models", key=key)[0] == 401
        assert front.status()["keys"] == f"# revoked {digest}\n"
        front.stop()
        front.start()
        assert front.get("/chat/v1/models", key=key)[0] == 401


def test_a_key_is_revoked_by_its_digest_and_others_of_its_user_stay() -> None:
    """As nodes do that learn of a revocation later."""
    with running() as (front, _, _):
        old, new = (hashlib.sha256(text.encode()).hexdigest() for text in ("sk-old", "sk-new"))
        for digest in (old, new):
            front.node("add", digest, LINE)
        front.node("revoke", "", old, "ab" * 32)

        assert front.get("/chat/v1/models", key="sk-old")[0] == 401
        assert front.get("/chat/v1/models", key="sk-new")[0] == 200


def test_a_key_that_haproxy_lacks_is_added_by_a_repetition() -> None:
    """The map has it, but HAProxy was not told."""
    with running() as (front, _, _):
        digest = hashlib.sha256(b"sk-carol").hexdigest()
        (front.folder / "keys.map").write_text(f"{digest} {LINE}\n")
        assert front.get("/chat/v1/models", key="sk-carol")[0] == 401
        front.node("add", digest, LINE)
        wait_for(lambda: front.get("/chat/v1/models", key="sk-carol")[0] == 200)
