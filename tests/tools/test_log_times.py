"""Times in log lines, as each program writes them."""

from __future__ import annotations

import pytest

from launcher.tools import log_times
from launcher.tools.diagnosis_read import Log

NOW = 1795300000.0  # 2026-11-21 22:26:40 UTC


@pytest.mark.parametrize(
    ("text", "zone", "ago"),
    [
        ("2026-11-21T22:26:10.123456789Z", 0, 30),
        ("[2026-11-21 22:26:10,123 W 17 17] gcs_rpc_client.h:151: Failed", 0, 30),
        ("2026-11-21 23:26:10,123\tINFO worker.py:1514 -- Using address", 3600, 30),
        ("2026-11-21T23:26:10,123456+01:00 Out of memory", 0, 30),
        ("2026-11-21T17:26:10-0500 Out of memory", 0, 30),
        ("(APIServer pid=1) INFO 11-21 22:26:10 [core.py:12] ready", 0, 30),
        ("INFO 12-21 22:26:40 [core.py:12] of last year", 0, 335 * 86400),
    ],
)
def test_times_are_read(text: str, zone: float, ago: float) -> None:
    """With a zone of their own, else with the container's; a year that is not said is the last that
    fits.
    """
    assert log_times.parse(text, zone, NOW) == NOW - ago


@pytest.mark.parametrize(
    "text",
    [
        "Traceback",
        "9999-12-31T23:59:59-23:59",
        "INFO 13-45 22:26:10 x",
        "2026-99-21 22:26:10",
        "0001-01-01T00:00:00Z",
        "INFO 02-29 22:26:10 x",
    ],
)
def test_what_is_no_time_is_none(text: str) -> None:
    """Also Docker's word for never, a day that this year has not, and the far future."""
    assert log_times.parse(text, 0, NOW) is None


def test_a_line_without_a_time_has_that_of_the_line_above() -> None:
    """Tracebacks have none; Docker's stamp comes before what the line says."""
    log = Log(
        part="x",
        what="x",
        lines=("a", "INFO 11-21 22:26:10 b", "  File", "c"),
        stamps={3: "2026-11-21T22:26:20Z"},
    )

    assert log_times.times(log, NOW) == [None, NOW - 30, NOW - 30, NOW - 20]
    assert log_times.parse(log_times.write(NOW), 0, NOW) == NOW
