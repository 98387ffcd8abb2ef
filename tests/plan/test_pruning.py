"""Which images nobody needs any more."""

from __future__ import annotations

from launcher.plan.pruning import Doomed, doomed
from launcher.tools import derived
from launcher.tools.docker import Image
from launcher.tools.image_store import Store

FOLDERS = {"folder": "/var/tmp/vlaunch-0/c/n", "top": "/var/tmp/vlaunch-0"}


def image(name: str, identity: str, base: str = "") -> Image:
    labels = {derived.BASE: base, derived.CONTENT: "1"} if base else {}
    return Image(
        id="", identity=identity, digests=(), architecture="", labels=labels, names=(name,)
    )


def test_what_was_made_of_another_image_may_go() -> None:
    """Of what is not ours nothing may, nor of what the cluster's image is the base."""
    images = (
        image("x:1", "now"),
        image("x:0", "before"),
        image("vllm/other:1", "other", base="before"),
        image("vlaunch/ray:2.60.0-new", "a", base="now"),
        image("vlaunch/ray:2.60.0-old", "b", base="before"),
        image("vlaunch/ray:mine", "c"),
    )

    found = doomed(Store(images=images, **FOLDERS), "x:1")
    assert found == Doomed(images=("vlaunch/ray:2.60.0-old",), unfinished=0)
    assert doomed(Store(images=images, **FOLDERS), "not-there:1") is None
    left = doomed(Store(unfinished=5, **FOLDERS), "x:1")
    assert left == Doomed(images=(), unfinished=5)
