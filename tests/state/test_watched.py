"""Where the clients of a server that is watched find it."""

from __future__ import annotations

import pytest

from launcher.state.watched import endpoint
from tests.plan.served import INVENTORY


@pytest.mark.parametrize(
    ("bind", "url"),
    [
        ("0.0.0.0", "http://10.0.0.1:8000/v1"),
        ("::", "http://10.0.0.1:8000/v1"),
        ("127.0.0.1", "http://127.0.0.1:8000/v1"),
        ("fd00::1", "http://[fd00::1]:8000/v1"),
    ],
)
def test_endpoint(bind: str, url: str) -> None:
    """Where clients go: the head's address between the nodes, or the one address that was asked
    for.
    """
    assert endpoint(INVENTORY, bind, 8000) == url
    assert endpoint(INVENTORY, bind, 8000, "n2") == url.replace("10.0.0.1", "10.0.0.2")
