"""Which images nobody needs any more."""

from __future__ import annotations

from dataclasses import dataclass

from launcher.tools import derived
from launcher.tools.image_store import Store


@dataclass(frozen=True, kw_only=True)
class Doomed:
    """What may go from a node: names of images, and bytes of unfinished copies."""

    images: tuple[str, ...]
    unfinished: int


def doomed(store: Store, image: str) -> Doomed | None:
    """Return what may go from a node whose cluster's image is `image`; None when nothing may.

    Of the images that we made those stay that were made from what `image` is now, for Ray of
    another version may be what the containers run; where `image` is not there, none may go.
    """
    base = store.image(image)
    made = [
        name
        for each in store.images
        for name in each.names
        if base is not None
        and name.startswith(f"{derived.REPOSITORY}:")
        and derived.CONTENT in each.labels
        and each.labels.get(derived.BASE) != base.identity
    ]
    if not made and not store.unfinished:
        return None
    return Doomed(images=tuple(sorted(made)), unfinished=store.unfinished)
