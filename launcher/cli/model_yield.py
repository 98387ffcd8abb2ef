"""Whether a server of the cluster is busy, while something else uses its network (`--yield`)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from launcher.errors import VlaunchError

if TYPE_CHECKING:
    from launcher.cli.session import Session

_EVERY = 3.0  # seconds between two looks
_QUIET = 2  # looks in a row without a request, until a server counts as idle


@contextmanager
def busy_servers(session: Session, *, wanted: bool) -> Iterator[Callable[[], str]]:
    """Look at the keeper's word for servers again and again inside the block, if that is `wanted`;
    it is given what says which server has requests, in words, empty when none has.

    What cannot be asked is not known, and no reason to wait.
    """
    if not wanted:
        yield lambda: ""
        return
    watch = _Watch(session)
    thread = threading.Thread(target=watch.run, name="yield", daemon=True)
    thread.start()
    try:
        yield lambda: watch.why
    finally:
        watch.over.set()


class _Watch:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._quiet = 0
        self.over = threading.Event()
        self.why = ""

    def run(self) -> None:
        """Look until it is over."""
        while not self.over.wait(_EVERY if self._quiet or self.why else 0):
            why = self._look()
            self._quiet = 0 if why else self._quiet + 1
            if why or self._quiet >= _QUIET:
                self.why = why

    def _look(self) -> str:
        from launcher.checks.ray import read_payload
        from launcher.state import servers

        try:
            (answer,) = self._session.transport.run([servers.ask(self._session.site)])
            kept = servers.read(read_payload(answer))
        except VlaunchError:
            return ""
        for each in kept.running:
            load = each.observed.load if each.observed is not None else None
            if load is not None and (requests := load.running + load.waiting):
                return f"{each.what} has {requests} requests"
        return ""
