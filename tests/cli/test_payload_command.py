"""`vlaunch payload`: the archive of node programs."""

from __future__ import annotations

import subprocess

import pytest

from launcher.tools.shipped.node_files import payload_tar
from tests.command_line import VLAUNCH

pytestmark = pytest.mark.processes


def test_the_payload_is_printed_byte_for_byte() -> None:
    """The script of `--dry-run` pipes it to nodes."""
    done = subprocess.run([*VLAUNCH, "payload"], capture_output=True, check=True)

    assert done.stdout == payload_tar()
