"""NCCL logs for tests of its parsers: recorded ones, and lines to vary."""

from __future__ import annotations

from pathlib import Path

from launcher.network import nccl_log
from launcher.network.nccl_log import Reading

FIXTURES = Path(__file__).parents[1] / "fixtures" / "nccl"
LOGS = sorted(FIXTURES.glob("*.log"))
LINK = "gpu0{0}:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [{1}] via NET/{2}"
GOOD, BAD = LINK.format(1, "send", "IB/0/GDRDMA"), LINK.format(2, "receive", "Socket/0")


def read(name: str) -> Reading:
    """Read a fixture."""
    return nccl_log.parse_log([(FIXTURES / f"{name}.log").read_bytes()])


def parse_text(text: str) -> Reading:
    """Parse a literal log."""
    return nccl_log.parse_log([text.encode()])
