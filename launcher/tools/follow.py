"""Following a distant process by queries: its log, and how long it may be silent."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from launcher.core import untrusted

INTERVAL = 1.0  # seconds between two queries
LOST_AFTER = 45.0  # seconds without an answer: a connection may recover


@dataclass(kw_only=True)
class Contact:
    """Contact with a process, lost if `lost_since` is set; unreachable is unknown, not dead."""

    clock: Callable[[], float]
    lost_since: float | None = None

    def restore(self) -> None:
        """Note an answer."""
        self.lost_since = None

    def lose(self) -> bool:
        """Note a query without an answer; return True when it is time to give up."""
        now = self.clock()
        self.lost_since = now if self.lost_since is None else self.lost_since
        return now - self.lost_since >= LOST_AFTER


def log_lines(text: str) -> tuple[str, ...]:
    """Return the lines of a part of a log, safe to print; a progress bar's states are lines."""
    lines = re.split(r"[\r\n]+", untrusted.truncate(text))
    return tuple(
        untrusted.sanitize(line)[: untrusted.MAX_LINE_LENGTH] for line in lines if line.strip()
    )
