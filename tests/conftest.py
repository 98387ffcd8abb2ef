"""What holds for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launcher import redaction


@pytest.fixture(autouse=True)
def _no_secret_is_known() -> Iterator[None]:
    """A value that one test's program learned must not be hidden from the next one."""
    redaction.forget()
    yield
    redaction.forget()
