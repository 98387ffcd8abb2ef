"""What `--json` prints: one line, valid to the letter whatever nodes have put into it, and harmless
in a terminal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def dumps(value: object) -> str:
    """Return a value as JSON in ASCII; numbers that JSON has not (NaN, Infinity) are null."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value))
    return text.replace("\x7f", "\\u007f")  # the one control character that JSON lets pass


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
