"""Servers that have answered, and how much they held, as the head's agent records them
(`agent/state.py`); the one of them that `vlaunch rollback` returns to.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from launcher.agent import state
from launcher.core import decode, untrusted
from launcher.core.domain import Answer, ServerSpec
from launcher.core.errors import RequestError, UnreadableAnswer
from launcher.core.transport import Command
from launcher.tools import servers
from launcher.tools.site import Site

# The files are not there before anything has been served, nor after `down`.
_READ = 'for file do cat "$file" 2>/dev/null; printf "\\n\\036\\n"; done'

_LATEST = 1e11  # seconds since 1970; no calendar goes much further


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered(ServerSpec):
    """A server that has answered: its spec, its image, when it answered last (seconds since 1970),
    and the labels of vLLM's metric for its KV cache (empty where vLLM reported none).
    """

    id: str
    at: Annotated[float, decode.within(0, _LATEST)]
    tp: int
    pp: int
    dp: int
    image: str = ""
    held: Mapping[str, str] = field(default_factory=dict)

    @property
    def what(self) -> str:
        """Name it for people."""
        split = f"TP={self.tp} PP={self.pp}" + (f" DP={self.dp}" if self.dp > 1 else "")
        return " ".join((self.model, f"({split}, {self.backend})", *self.args))


def names_with(site: Site, file: str) -> list[str]:
    """Return the names of the servers in whose folder on the head a file lies; no container need
    run for it.
    """
    seen = site.facts_of(site.head)
    parts = [path.split("/") for path in (seen.files if seen else ())]
    return sorted(
        part[1] for part in parts if len(part) == 3 and (part[0], part[2]) == ("server", file)
    )


def ask(site: Site, name: str) -> Command:
    """Ask the head what has answered under a name, and what is wanted now; its container need not
    run.
    """
    folder = servers.folder(site, name)
    return _cat(site, f"{folder}/{state.HISTORY}", f"{folder}/{state.DESIRED}")


def ask_all(site: Site) -> Command | None:
    """Ask the head what has answered under any name; None where nothing is written down."""
    found = names_with(site, state.HISTORY)
    files = [f"{servers.folder(site, name)}/{state.HISTORY}" for name in found]
    return _cat(site, *files) if files else None


def _cat(site: Site, *files: str) -> Command:
    return Command(node=site.head.name, argv=("sh", "-c", _READ, "answered", *files), timeout=30)


def read(answer: Answer) -> tuple[tuple[Answered, ...], str]:
    """Return what has answered, the newest first, and the id of what is wanted now (empty when
    nothing is).

    What cannot be read did not answer: it is left out.

    Raises:
        UnreadableAnswer: the head did not say.
    """
    if not answer.ok:
        raise UnreadableAnswer(
            f"{answer.node}: does not say which server has answered", evidence=answer.tail
        )
    texts = answer.out.split("\x1e")
    present = _json(texts[1] if len(texts) > 1 else "")
    now = present.get("id") if isinstance(present, Mapping) else None
    return tuple(_listed(texts[0])), now if isinstance(now, str) else ""


def read_all(answer: Answer) -> tuple[Answered, ...]:
    """Return what has answered under any name, the newest first; nothing where the head did not
    say.
    """
    found = [each for text in answer.out.split("\x1e") for each in _listed(text)]
    return tuple(sorted(found, key=lambda each: -each.at)) if answer.ok else ()


def _listed(text: str) -> list[Answered]:
    """Return the servers of a history; entries that cannot be read are left out."""
    history, servers_read = _json(text), list[Answered]()
    for entry in history if isinstance(history, list) else ():
        with contextlib.suppress(KeyError, TypeError, AttributeError, UnreadableAnswer):
            server = entry["desired"]
            own = {
                "id": server["id"],
                "at": entry["at"],
                "image": server.get("image") or "",
                "held": entry.get("held") or {},
            }
            spec = {**server["asked_for"], **own}
            servers_read.append(decode.fit(Answered, spec, "what has answered"))
    return servers_read


def _json(text: str) -> Any:
    try:
        return untrusted.loads(text)
    except ValueError:
        return None


def pick(site: Site, name: str | None) -> str:
    """Return the name of the server to roll back: the named one, else the only one with a spec,
    or that has answered.

    Raises:
        RequestError: there are several.
    """
    if name is not None:
        return name
    for file in (state.DESIRED, state.HISTORY):
        names = names_with(site, file)
        if len(names) == 1:
            return names[0]
        if names:
            text = f"{len(names)} servers are known: {', '.join(f'`{known}`' for known in names)}"
            raise RequestError(text, hint=f"say which one: `vlaunch rollback {names[0]}`")
    return servers.DEFAULT


def choose(answered: Sequence[Answered], present: str, image: str) -> Answered:
    """Return the newest server that has answered and is not the present one.

    Raises:
        RequestError: there is none, or it answered with another image than the nodes have.
    """
    before = next((server for server in answered if server.id != present), None)
    if before is None:
        known = (
            f"only the present one has: {answered[0].what}"
            if answered
            else "none is written down on the head"
        )
        raise RequestError(
            "no other server has answered under this name",
            evidence=known,
            hint="start one by its model: `vlaunch serve --model MODEL`",
        )
    if before.image and image and before.image != image:
        raise RequestError(
            f"{before.what} answered with another image than the one that `image:` names now",
            evidence=f"then {before.image[:19]}, now {image[:19]}",
            hint=(
                "put the old `image:` back into the inventory and run `vlaunch up`, then roll back"
            ),
        )
    return before
