"""A tunnel that outlives its connection would be a port that leads nowhere."""

from __future__ import annotations

from typing import Any, cast

import pytest

from launcher.core.errors import NodeError
from launcher.ssh.tunnel import Tunnel


class Dead:
    """An SSH connection that has ended."""

    def is_active(self) -> bool:
        return False


def test_waiting_ends_with_the_connection() -> None:
    """Whoever waits is told, and what to do."""
    with (
        Tunnel("gpu01", cast("Any", Dead()), "127.0.0.1", 8000, 0) as tunnel,
        pytest.raises(NodeError) as lost,
    ):
        tunnel.wait()

    assert str(lost.value) == "gpu01: the SSH connection ended, and the tunnel with it"
    assert lost.value.hint
