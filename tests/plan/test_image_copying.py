"""Who gets which layers from whom, and what is refused before anything is written."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from launcher.errors import NodeError, RequestError
from launcher.payload.chain import archive
from launcher.plan.image_copying import Group, check_export, check_targets, manifest, plan_image
from launcher.tools.docker import Image
from launcher.tools.image_store import Store

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


def store(*images: Image, **more: Any) -> Store:
    about = {"free": 100 * GIB, "scratch": 100 * GIB, "python": (3, 11)}
    folders = {"folder": "/var/tmp/vlaunch-0/c/n", "top": "/var/tmp/vlaunch-0"}
    return Store(**{**folders, **about, "images": images, **more})


def exported(*, packed: bool = False) -> archive.Image:
    rows = [archive.Layer("f" * 64 if packed else each, GIB, each) for each in LAYERS]
    return archive.Image("e" * 64, 1000, json.dumps({}), tuple(rows))


def test_nodes_that_lack_the_same_are_one_chain() -> None:
    """Those that lack most come first; who has the image under this name gets nothing."""
    seen = {
        "n1": store(image("x:1")),
        "n2": store(),
        "n3": store(image("base:1", layers=LAYERS[:2], identity="base")),
        "n4": store(image("x:1")),
        "n5": store(),
        "n6": store(image("other:1", identity="o")),
    }
    copying = plan_image("x:1", seen)

    assert (copying.source, copying.complete) == ("n1", ("n1", "n4"))
    assert copying.groups == (
        Group(has=0, targets=("n2", "n5")),
        Group(has=2, targets=("n3",)),
        Group(has=3, targets=("n6",)),
    )
    assert copying.names == ("x:1",)


def test_only_some_nodes_shall_have_it() -> None:
    """The others are left as they are."""
    seen = {"n1": store(), "n2": store(image("x:latest")), "n3": store()}
    copying = plan_image("x", seen, targets=["n3"])

    assert (copying.source, copying.targets) == ("n2", ("n3",))
    assert copying.names == ("x:latest",)


def test_containerds_store_gets_all_layers() -> None:
    """What it has is packed in ways that Docker does not tell."""
    base = image("base:1", layers=LAYERS[:2], identity="base")
    seen = {"n1": store(image("x:1")), "n2": store(base, containerd=True)}

    assert plan_image("x:1", seen).groups == (Group(has=0, targets=("n2",)),)


def test_what_travels_is_each_blob_once() -> None:
    """The configuration, and the layers that are missing; their digests are their names."""
    rows = [archive.Layer(each * 64, 10, each * 64) for each in "aba"]
    made = manifest(archive.Image("e" * 64, 1000, "{}", tuple(rows)), 1)

    assert [(each.name[0], each.size) for each in made.files] == [("e", 1000), ("b", 10), ("a", 10)]
    assert all(each.sum == each.name for each in made.files)
    assert manifest(archive.Image("e" * 64, 1000, "{}", tuple(rows)), 3).bytes == 1000


def test_nobody_has_it() -> None:
    """What can be done is said."""
    with pytest.raises(RequestError, match=r"no node has x:1 \(n\[1-2\] were asked\)") as caught:
        plan_image("x:1", {"n1": store(), "n2": store()})
    assert "--here" in caught.value.hint
    with pytest.raises(RequestError, match="n2 does not have x:1"):
        plan_image("x:1", {"n1": store(image("x:1")), "n2": store()}, source="n2")


def test_nodes_differ_in_what_it_is() -> None:
    """Nothing is overwritten until somebody says whose it shall be."""
    seen = {"n1": store(image("x:1")), "n2": store(image("x:1", identity="j"))}
    with pytest.raises(RequestError, match="not the same image") as caught:
        plan_image("x:1", seen)

    assert "--from n1" in caught.value.hint
    copying = plan_image("x:1", seen, source="n2")
    assert (copying.source, copying.targets) == ("n2", ("n1",))


def test_a_name_by_digest_is_refused() -> None:
    """No copied image has one; where all nodes have it nothing is to be done."""
    name = f"x@sha256:{'0' * 64}"
    there = replace(image("x:1"), digests=(name,))
    with pytest.raises(RequestError, match="named by its digest"):
        plan_image(name, {"n1": store(there), "n2": store()})

    assert plan_image(name, {"n1": store(there), "n2": store(there)}).targets == ()


def test_who_cannot_take_part() -> None:
    """Docker or Python is missing: all such nodes are named, but for those that lack nothing."""
    seen = {
        "n1": store(image("x:1")),
        "n2": store(trouble="Cannot connect to the Docker daemon"),
        "n3": store(python=(3, 6)),
        "n4": store(image("x:1"), python=(0, 0)),
    }
    with pytest.raises(NodeError) as caught:
        plan_image("x:1", seen)

    assert "Docker does not answer" in caught.value.evidence
    assert "Python 3.8 or newer" in caught.value.evidence
    assert "n4" not in caught.value.evidence


def test_room_is_looked_at_before() -> None:
    """On the source for all of it, on the others for what they lack: as it comes, in Docker's
    temporary folder, and unpacked.
    """
    tight = {"n1": store(image("x:1")), "n2": store(free=6 * GIB), "n3": store(scratch=GIB)}
    copying = plan_image("x:1", tight)

    assert check_export(copying, tight["n1"]) == round(3 * GIB * 1.02)
    with pytest.raises(NodeError, match="too little room") as caught:
        check_targets(copying, exported(), tight)
    assert "n2: has too little room" in caught.value.evidence
    assert "n3: has too little room" in caught.value.evidence
    with pytest.raises(NodeError, match="too little room"):
        check_export(copying, store(image("x:1"), scratch=2 * GIB))
    room = {"n1": tight["n1"], "n2": store(free=7 * GIB, scratch=4 * GIB)}
    check_targets(plan_image("x:1", room), exported(), room)


def test_one_disk_holds_all_of_it() -> None:
    """Where both folders are on it, what they need is added up; what lies there already counts."""
    seen = {"n1": store(image("x:1")), "n2": store(free=9 * GIB, same_disk=True)}
    with pytest.raises(NodeError, match="too little room"):
        check_targets(plan_image("x:1", seen), exported(), seen)
    seen["n2"] = replace(seen["n2"], unfinished=GIB)
    check_targets(plan_image("x:1", seen), exported(), seen)


def test_packed_layers_need_room_for_what_is_in_them() -> None:
    """As much as the source's Docker says that all take."""
    seen = {"n1": store(image("x:1")), "n2": store(free=4 * GIB)}
    with pytest.raises(NodeError, match="too little room"):
        check_targets(plan_image("x:1", seen), exported(packed=True), seen)


def test_the_same_image_under_another_name_is_only_named() -> None:
    """Nothing travels."""
    seen = {"n1": store(image("x:1")), "n2": store(image("mirror/x:1"))}
    copying = plan_image("x:1", seen)

    assert copying.groups == ()
    assert copying.unnamed == {"n2": image("x:1").id}
    assert copying.targets == ("n2",)


def test_docker_does_not_answer_anywhere_else() -> None:
    """Whether it is there is not known then."""
    with pytest.raises(NodeError, match="Docker does not answer"):
        plan_image("x:1", {"n1": store(), "n2": store(trouble="Cannot connect")})


def test_a_docker_that_does_not_know_zstd() -> None:
    """Is named before anything travels to it."""
    seen = {"n1": store(image("x:1")), "n2": store(version="20.10.24"), "n3": store(version="26.1")}
    packed = replace(exported(packed=True), manifest='{"mediaType": "application/x.tar+zstd"}')
    with pytest.raises(NodeError, match=r"n2: Docker 20.10.24 cannot unpack .* zstd"):
        check_targets(plan_image("x:1", seen), packed, seen)
    del seen["n2"]
    check_targets(plan_image("x:1", seen), packed, seen)
