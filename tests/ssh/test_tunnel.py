"""The lifetime of a tunnel: its connection's."""

from __future__ import annotations

from typing import Any, cast

import pytest

from launcher.core.errors import NodeError
from launcher.ssh.tunnel import Tunnel


class Dead:
    """A closed SSH connection."""

    def is_active(self) -> bool:
        return False


def test_waiting_ends_with_the_connection() -> None:
    """With an error and a hint."""
    with (
        Tunnel("gpu01", cast("Any", Dead()), "127.0.0.1", 8000, 0) as tunnel,
        pytest.raises(NodeError) as lost,
    ):
        tunnel.wait()

    assert str(lost.value) == "gpu01: the SSH connection closed, and the tunnel with it"
    assert lost.value.hint
