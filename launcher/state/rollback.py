"""Which server `vlaunch rollback` returns to."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.errors import RequestError
from launcher.payload.agent import state
from launcher.site import Site
from launcher.state import servers
from launcher.state.history import Answered, names_with


def pick(site: Site, name: str | None) -> str:
    """Return the name of the server to roll back: the one that is named, else the only one that is
    wanted or has answered.

    Raises:
        RequestError: there are several.
    """
    if name is not None:
        return name
    for file in (state.DESIRED, state.HISTORY):
        found = names_with(site, file)
        if len(found) == 1:
            return found[0]
        if found:
            text = f"{len(found)} servers are known: {', '.join(f'`{each}`' for each in found)}"
            raise RequestError(text, hint=f"say which one: `vlaunch rollback {found[0]}`")
    return servers.DEFAULT


def choose(answered: Sequence[Answered], present: str, image: str) -> Answered:
    """Return the newest server that has answered and is not the one that is wanted now.

    Raises:
        RequestError: there is none, or it answered with another image than the nodes have.
    """
    before = next((each for each in answered if each.id != present), None)
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
