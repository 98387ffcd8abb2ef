"""Which expectations of GPUs and network cards count: ours, with the user's own over them."""

from __future__ import annotations

from pathlib import Path

from launcher.core import expectations_read
from launcher.core.expectations import Expectations

FILE = "expectations.yaml"


def load(named: Path | None = None) -> Expectations:
    """Return our figures with those of the file that is named over them, else of
    `expectations.yaml` in the user's settings.

    Raises RequestError with every mistake in that file.
    """
    import platformdirs

    own = platformdirs.user_config_path("vlaunch") / FILE
    return expectations_read.load(named or (own if own.exists() else None))
