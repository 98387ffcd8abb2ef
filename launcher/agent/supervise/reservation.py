"""GPUs that Ray reserves for a server whose ranks run outside of Ray."""

from __future__ import annotations

import time

from ..background import Background
from ..desired import Desired
from ..processes import ray_driver

# seconds between two attempts: before the start, and while the engine runs
_AGAIN, _LATER = 1.0, 30.0
_FREE = 20.0  # seconds for Ray to take the GPUs back


class Reservation:
    """Reserved GPUs of one server; `doing` is the reason why its start waits."""

    def __init__(self, spec: Desired) -> None:
        self.spec, self.ready, self.doing = spec, False, "reserving its GPUs in Ray"
        self._gpus: dict[str, tuple[int, ...]] = {}
        self._request: Background[tuple[int, str]] | None = None
        self._freed: Background[tuple[int, str]] | None = None
        self._again, self._head = 0.0, ""

    def tick(self, now: float, head: str, *, runs: bool) -> None:
        """Request the GPUs, again after a refusal or a restart of Ray (`head` changes)."""
        if head != self._head:
            self._head, self.ready = head, False
        spec, request = self.spec, self._request
        if request is None and not self.ready and now >= self._again and self._freed is None:
            places = [f"{spec.addresses[node]}={n}" for node, n in spec.places.items() if n]
            self._request = Background(lambda: ray_driver.run("take", spec.name, *places))
        elif request is not None and request.done:
            self._request, self._again = None, now + (_LATER if runs else _AGAIN)
            self._parse_reply(*(request.value or (1, request.error)), runs=runs)

    def _parse_reply(self, code: int, out: str, *, runs: bool) -> None:
        """Record which GPUs Ray has reserved, or why it has not."""
        answer = ray_driver.parse_output(out)
        gpus: dict[str, list[int]] | None = answer.get("gpus")
        if code != 0 or gpus is None:
            self.doing = f"waiting for Ray to reserve its GPUs: {answer.get('error', '')}"
            return
        self.ready = True
        if not runs:  # an engine that runs keeps the GPUs that it has
            names = {ip: node for node, ip in self.spec.addresses.items()}
            self._gpus = {
                names.get(ip, ip): tuple(map(int, indices)) for ip, indices in gpus.items()
            }

    def gpus(self, node: str) -> tuple[int, ...] | None:
        """Return the GPU indices on a node; None if the server has all of them."""
        return self._gpus.get(node)

    def release(self) -> bool:
        """Begin to give them back; True once Ray has them, or does not answer in time."""
        if self._freed is None:
            self._freed = Background(lambda: ray_driver.run("free", self.spec.name))
        return self._freed.done or time.monotonic() - self._freed.began > _FREE
