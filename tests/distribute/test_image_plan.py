"""Plans of image copies, and the errors before any write."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.core.errors import NodeError, RequestError
from launcher.distribute.chain import Exported
from launcher.distribute.image_plan import check_source, check_targets, plan_files, plan_image
from launcher.distribute.image_store import ImageStore
from launcher.distribute.model_plan import CopyPlan
from launcher.tools.docker import Image

GIB = 2**30
LAYERS = ("a" * 64, "b" * 64, "c" * 64)


def image(*names: str, identity: str = "i", layers: tuple[str, ...] = LAYERS) -> Image:
    return Image(
        id=f"sha256:{identity * 64}",
        identity=identity,
        digests=(),
        architecture="amd64",
        labels={},
        names=names,
        layers=layers,
        size=3 * GIB,
    )


def store(*images: Image, **fields: Any) -> ImageStore:
    about = {"free": 100 * GIB, "scratch_free": 100 * GIB, "python": (3, 11)}
    folders = {"folder": "/var/tmp/vlaunch-0/c/n", "top": "/var/tmp/vlaunch-0"}
    return ImageStore(**{**folders, **about, "images": images, **fields})


PATHS = tuple(f"blobs/sha256/{layer}" for layer in LAYERS)
EXPORTED = Exported(
    files=(("manifest.json", 1000, 0, ""), *((path, GIB, 0, path[-64:]) for path in PATHS)),
    layers=PATHS,
)


def plan_targets(stores: dict[str, ImageStore]) -> CopyPlan:
    """Plan a copy, and check the space on its targets."""
    plan = plan_image("x:1", stores)
    copying = plan_files(plan, EXPORTED)
    check_targets(plan, copying, stores)
    return copying


def test_nodes_without_the_image_form_one_chain() -> None:
    """They get the layers that any of them is missing; nodes with this image get none."""
    stores = {
        "n1": store(image("x:1")),
        "n2": store(image("other:1", identity="o")),
        "n3": store(image("base:1", layers=LAYERS[:2], identity="base")),
        "n4": store(image("x:1")),
    }
    plan = plan_image("x:1", stores)

    assert (plan.source, plan.complete_nodes) == ("n1", ("n1", "n4"))
    assert (plan.receivers, plan.common_layers) == (("n2", "n3"), 2)
    assert plan_image("x:1", {**stores, "n5": store()}).common_layers == 0
    assert plan.tagged_name == "x:1"


def test_selected_nodes() -> None:
    """The others are unchanged."""
    stores = {"n1": store(), "n2": store(image("x:latest")), "n3": store()}
    plan = plan_image("x", stores, targets=["n3"])

    assert (plan.source, plan.targets) == ("n2", ("n3",))
    assert plan.tagged_name == "x:latest"


def test_containerds_store_gets_all_layers() -> None:
    """Docker does not list the compressed layers of that store."""
    base = image("base:1", layers=LAYERS[:2], identity="base")
    stores = {"n1": store(image("x:1")), "n2": store(base, containerd=True)}

    assert plan_image("x:1", stores).common_layers == 0


def test_layers_that_all_have_are_not_sent() -> None:
    """Unless the file is also a layer further up. All other files are sent."""
    base = image("base:1", layers=LAYERS[:2], identity="base")
    plan = plan_image("x:1", {"n1": store(image("x:1")), "n2": store(base)})
    copying = plan_files(plan, EXPORTED)

    assert [file.name for file in copying.manifest.files] == ["manifest.json", PATHS[2]]
    assert [file.digest for file in copying.manifest.files] == ["", LAYERS[2]]
    assert (copying.targets, copying.missing_bytes) == (("n2",), {"n2": GIB + 1000})
    again = replace(EXPORTED, layers=(*PATHS, PATHS[0]))
    assert PATHS[0] in [file.name for file in plan_files(plan, again).manifest.files]


def test_no_node_has_the_image() -> None:
    """The hint has the possible commands."""
    with pytest.raises(RequestError, match=r"no node has x:1 \(checked: n\[1-2\]\)") as caught:
        plan_image("x:1", {"n1": store(), "n2": store()})
    assert "--local" in caught.value.hint
    with pytest.raises(RequestError, match="n2 does not have x:1"):
        plan_image("x:1", {"n1": store(image("x:1")), "n2": store()}, source="n2")


def test_different_images_of_one_name() -> None:
    """No image is overwritten until the user names the source."""
    stores = {"n1": store(image("x:1")), "n2": store(image("x:1", identity="j"))}
    with pytest.raises(RequestError, match="differs between") as caught:
        plan_image("x:1", stores)

    assert "--from n1" in caught.value.hint
    copying = plan_image("x:1", stores, source="n2")
    assert (copying.source, copying.targets) == ("n2", ("n1",))


def test_a_digest_is_rejected() -> None:
    """Copied images have none; if all nodes have it, the plan is empty."""
    name = f"x@sha256:{'0' * 64}"
    stored = replace(image("x:1"), digests=(name,))
    with pytest.raises(RequestError, match="named by its digest"):
        plan_image(name, {"n1": store(stored), "n2": store()})

    assert plan_image(name, {"n1": store(stored), "n2": store(stored)}).targets == ()


def test_nodes_that_cannot_take_part() -> None:
    """Without Docker or Python: all such nodes are named, except those with the image."""
    stores = {
        "n1": store(image("x:1")),
        "n2": store(docker_error="Cannot connect to the Docker daemon"),
        "n3": store(python=(3, 6)),
        "n4": store(image("x:1"), python=(0, 0)),
    }
    with pytest.raises(NodeError) as caught:
        plan_image("x:1", stores)

    assert "Docker does not answer" in caught.value.evidence
    assert "Python 3.8 or newer" in caught.value.evidence
    assert "n4" not in caught.value.evidence


def test_space_is_checked_first() -> None:
    """On the source for all of it, on targets for missing data: staged, in Docker's temporary
    folder, and unpacked.
    """
    tight = {"n1": store(image("x:1")), "n2": store(free=6 * GIB), "n3": store(scratch_free=GIB)}
    plan = plan_image("x:1", tight)

    assert check_source(plan, tight["n1"]) == round(3 * GIB * 1.02)
    with pytest.raises(NodeError, match="too little disk space") as caught:
        plan_targets(tight)
    assert "n2: has too little disk space" in caught.value.evidence
    assert "n3: has too little disk space" in caught.value.evidence
    with pytest.raises(NodeError, match="too little disk space"):
        check_source(plan, store(image("x:1"), scratch_free=2 * GIB))
    plan_targets({"n1": tight["n1"], "n2": store(free=7 * GIB, scratch_free=4 * GIB)})


def test_all_folders_on_one_disk() -> None:
    """Their needs add up; staged bytes already count."""
    stores = {"n1": store(image("x:1")), "n2": store(free=9 * GIB, same_disk=True)}
    with pytest.raises(NodeError, match="too little disk space"):
        plan_targets(stores)
    stores["n2"] = replace(stores["n2"], unfinished=GIB)
    plan_targets(stores)


def test_compressed_layers_need_space_for_their_content() -> None:
    """The size from the source's Docker."""
    large = replace(image("x:1"), size=6 * GIB)
    stores = {"n1": store(large), "n2": store(free=7 * GIB)}
    plan_targets(stores)
    stores["n1"] = replace(stores["n1"], containerd=True)
    with pytest.raises(NodeError, match="too little disk space"):
        plan_targets(stores)


def test_the_same_image_under_another_name_is_only_named() -> None:
    """No data are sent."""
    stores = {"n1": store(image("x:1")), "n2": store(image("mirror/x:1"))}
    copying = plan_image("x:1", stores)

    assert copying.receivers == ()
    assert copying.unnamed == {"n2": image("x:1").id}
    assert copying.targets == ("n2",)


def test_docker_does_not_answer_anywhere_else() -> None:
    """Those nodes' images are unknown."""
    with pytest.raises(NodeError, match="Docker does not answer"):
        plan_image("x:1", {"n1": store(), "n2": store(docker_error="Cannot connect")})
