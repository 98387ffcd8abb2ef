"""Which server answered before the present one: the supervisors write it down on the head (`payload/record.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast, get_args

from launcher.errors import RequestError, UnreadableAnswer
from launcher.model import Answer, Backend, Inventory
from launcher.plan import containers
from launcher.tools import untrusted
from launcher.tools.host import HostFacts
from launcher.transport import Command

# The files are not there before anything has been served, nor after `down`.
_READ = 'for file in answered.json wanted.json; do cat "$1/server/$file" 2>/dev/null; printf "\\n\\036\\n"; done'

_LATEST = 1e11  # seconds since 1970; no calendar goes much further


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A server that has answered: what was asked for, with which image, and when (seconds since 1970)."""

    id: str
    at: float
    model: str
    backend: Backend
    host: str
    port: int
    tp: int
    pp: int
    dp: int
    args: tuple[str, ...] = ()
    image: str = ""

    @property
    def what(self) -> str:
        """Name it for people."""
        split = f"TP={self.tp} PP={self.pp}" + (f" DP={self.dp}" if self.dp > 1 else "")
        return " ".join((self.model, f"({split}, {self.backend})", *self.args))


def ask(inventory: Inventory, facts: Mapping[str, HostFacts]) -> Command:
    """Ask the head what has answered, and what is wanted now; its containers need not run."""
    head = inventory.head
    folder = containers.state_dir(inventory, head, facts.get(head.name))
    return Command(node=head.name, argv=("sh", "-c", _READ, "answered", folder), timeout=30)


def read(answer: Answer) -> tuple[tuple[Answered, ...], str]:
    """Return what has answered, the newest first, and the id of what is wanted now (empty when nothing is).

    What cannot be read did not answer: it is left out.

    Raises:
        UnreadableAnswer: the head did not say.
    """
    if not answer.ok:
        raise UnreadableAnswer(f"{answer.node}: does not say which server has answered", evidence=answer.tail)
    texts = answer.out.split("\x1e")
    kept, wanted = _json(texts[0]), _json(texts[1] if len(texts) > 1 else "")
    found = [_one(each) for each in kept] if isinstance(kept, list) else []
    now = wanted.get("id") if isinstance(wanted, Mapping) else None
    return tuple(each for each in found if each is not None), now if isinstance(now, str) else ""


def choose(answered: Sequence[Answered], wanted: str, image: str) -> Answered:
    """Return the newest server that has answered and is not the one that is wanted now.

    Raises:
        RequestError: there is none, or it answered with another image than the nodes have.
    """
    before = next((each for each in answered if each.id != wanted), None)
    if before is None:
        known = f"only the present one has: {answered[0].what}" if answered else "none is written down on the head"
        raise RequestError(
            "no other server has answered on this cluster",
            evidence=known,
            hint="start one by name: `vlaunch serve --model MODEL`",
        )
    if before.image and image and before.image != image:
        raise RequestError(
            f"{before.what} answered with another image than the one that `image:` names now",
            evidence=f"then {before.image[:19]}, now {image[:19]}",
            hint="put the old `image:` back into the inventory and run `vlaunch up`, then roll back",
        )
    return before


def _json(text: str) -> Any:
    try:
        return untrusted.loads(text)
    except ValueError:
        return None


def _one(said: Any) -> Answered | None:
    try:
        wanted = said["wanted"]
        asked = wanted["asked_for"]
        backend, args, at = str(asked["backend"]), asked["args"], float(said["at"])
        if backend not in get_args(Backend) or not isinstance(args, list) or not 0 <= at < _LATEST:
            return None
        return Answered(
            id=str(wanted["id"]), at=at, model=str(asked["model"]), backend=cast("Backend", backend),
            host=str(asked["host"]), port=int(asked["port"]), tp=int(asked["tp"]), pp=int(asked["pp"]), dp=int(asked["dp"]),
            args=tuple(str(each) for each in args), image=str(wanted.get("image") or ""),
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
