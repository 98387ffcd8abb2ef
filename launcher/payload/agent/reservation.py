"""The GPUs that Ray sets aside for a server whose ranks run outside of it, as the keeper sees them.

Standard library only.
"""

from __future__ import annotations

import json
import os
import sys

from . import children
from .background import Background
from .desired import Desired

# seconds between two attempts: before the start, and while the engine runs
_AGAIN, _LATER = 1.0, 30.0
_TIMEOUT = 120.0  # seconds for `reserve.py`, which imports Ray


class Reservation:
    """The GPUs that Ray sets aside for a server that runs outside of it; `doing` says what is
    waited for.
    """

    def __init__(self, want: Desired) -> None:
        self.want = want
        self.doing, self._found = "setting its GPUs aside in Ray", dict[str, list[int]]()
        self._asked: Background[tuple[int, str]] | None = None
        self._again, self.ready, self._head = 0.0, False, ""

    def turn(self, now: float, head: str, *, runs: bool) -> None:
        """Ask Ray, and ask again when it had none.

        `head` is another word when Ray's head is, which has forgotten.
        """
        if head != self._head:
            self._head, self.ready = head, False
        if self._asked is None:
            if not self.ready and now >= self._again:
                self._asked = self._take()
            return
        if not self._asked.over:
            return
        code, out = self._asked.value or (1, self._asked.error)
        self._asked, self._again = None, now + (_LATER if runs else _AGAIN)
        self._hear(code, out, runs=runs)

    def _take(self) -> Background[tuple[int, str]]:
        """Begin to have them set aside."""
        want = self.want
        pairs = [f"{want.addresses[node]}={count}" for node, count in want.places.items() if count]
        return Background(lambda: _reserve("take", want.name, *pairs))

    def _hear(self, code: int, out: str, *, runs: bool) -> None:
        """Note which GPUs Ray has set aside, or why it has not."""
        try:
            said = json.loads(out.strip().rpartition("\n")[2])
        except ValueError:
            said = {"error": out[-300:]}
        if code != 0 or not isinstance(said.get("gpus"), dict):
            self.doing = f"waiting for Ray to set its GPUs aside: {said.get('error', '')}"
            return
        names = {ip: node for node, ip in self.want.addresses.items()}
        found = {
            names.get(ip, ip): [int(each) for each in held] for ip, held in said["gpus"].items()
        }
        self._found = self._found if runs else found  # what runs keeps the GPUs that it has
        self.ready = True

    def gpus(self, node: str) -> tuple[int, ...] | None:
        """Return which GPUs of a node they are; None where the server has all."""
        return tuple(self._found[node]) if node in self._found else None

    def free(self) -> Background[tuple[int, str]]:
        """Begin to give them back."""
        name = self.want.name
        return Background(lambda: _reserve("free", name))


def _reserve(*words: str) -> tuple[int, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}
    return children.run(
        (sys.executable, "-m", "vlaunch_agent.reserve", *words), _TIMEOUT, environment
    )
