"""How long, as people write it."""

from __future__ import annotations

import pytest

from tests.cli.conftest import Cluster
from tests.cli.told import tell


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", "90s"), ("30m", "1800s"), ("1D2h", "93600s")]
)
def test_durations(cluster: Cluster, text: str, seconds: str) -> None:
    """As people write them."""
    tell(cluster)
    cluster.run("doctor", "--since", text)

    assert cluster.commands[0].argv[10] == seconds
