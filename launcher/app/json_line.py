"""What `--json` prints: one line, valid to the letter whatever nodes have put into it, and harmless
in a terminal.
"""

from __future__ import annotations

import json


def dumps(value: object) -> str:
    """Return a value as JSON in ASCII; numbers that JSON has not (NaN, Infinity) are null."""
    try:
        text = json.dumps(value, allow_nan=False)
    except ValueError:
        text = json.dumps(json.loads(json.dumps(value), parse_constant=lambda _: None))
    return text.replace("\x7f", "\\u007f")  # the one control character that JSON lets pass
