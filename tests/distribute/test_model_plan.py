"""Plans of model copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from launcher.core.errors import RequestError
from launcher.distribute.chain import THIS_MACHINE, NodeModels, Revision, StoredModel
from launcher.distribute.model_plan import chain_order, choose_chunk_size, plan_copy

NAME = "org/model"
BLOB, SMALL = "a" * 64, "b" * 40
COMMIT, OTHER = "1" * 40, "2" * 40
GB = 10**9


def revision(commit: str = COMMIT, **changes: Any) -> Revision:
    base = f"snapshots/{commit}"
    fields: dict[str, Any] = {
        "revision": commit,
        "size": 5 * GB + 100,
        "count": 2,
        "used": 0,
        "why": "",
        "files": (
            (f"blobs/{SMALL}", 100, 7, SMALL),
            (f"blobs/{BLOB}", 5 * GB, 7, BLOB),
        ),
        "links": (
            (f"{base}/config.json", f"blobs/{SMALL}"),
            (f"{base}/model.safetensors", f"blobs/{BLOB}"),
        ),
    }
    return Revision(**{**fields, **changes})


def hub(*revisions: Revision, **changes: Any) -> StoredModel:
    fields: dict[str, Any] = {
        "name": NAME,
        "root": "/hf/hub/models--org--model",
        "kind": "hub",
        "refs": {"main": COMMIT},
        "revisions": revisions or (revision(),),
        "copied": False,
        "unfinished": 0,
        "downloading": 0,
        "left_over": 0,
    }
    return StoredModel(**{**fields, **changes})


def node_models(*models: StoredModel, free: int = 100 * GB) -> NodeModels:
    return NodeModels(models=models, free=free)


def test_the_first_node_with_the_model_is_the_source() -> None:
    """With links, and under the same name."""
    copying = plan_copy(
        NAME,
        {"a": node_models(), "b": node_models(hub()), "c": node_models(), "d": node_models(hub())},
    )

    assert (copying.source, copying.targets) == ("b", ("c", "a"))
    assert copying.complete_nodes == ("b", "d")
    assert copying.missing_bytes == {"a": 5 * GB + 100, "c": 5 * GB + 100}
    assert [file.digest for file in copying.manifest.files] == [SMALL, BLOB]
    assert copying.links == revision().links
    assert copying.refs == (("refs/main", COMMIT),)
    assert copying.label == COMMIT


def test_the_node_with_the_most_bytes_comes_first() -> None:
    """It can serve the others."""
    part = revision(
        files=((f"blobs/{BLOB}", 5 * GB, 7, BLOB),), links=(), why="config.json missing"
    )
    copying = plan_copy(
        NAME, {"a": node_models(hub()), "b": node_models(), "c": node_models(hub(part))}
    )

    assert copying.targets == ("c", "b")
    assert copying.missing_bytes == {"b": 5 * GB + 100, "c": 100}


def test_the_chain_follows_the_names() -> None:
    """From the source round: every rack is entered and left once; numbers sort as numbers."""
    names = ("r2-n9", "r1-n2", "head", "r1-n10", "r2-n1")

    assert chain_order(names, "r1-n3") == ("r1-n10", "r2-n1", "r2-n9", "head", "r1-n2")
    assert chain_order(names, THIS_MACHINE) == ("head", "r1-n2", "r1-n10", "r2-n1", "r2-n9")


def test_no_copy_if_all_nodes_have_it() -> None:
    """By names, sizes and revision; an unfinished copy does not count."""
    both = {"a": node_models(hub()), "b": node_models(hub())}
    assert plan_copy(NAME, both).targets == ()
    unfinished = {**both, "b": node_models(hub(unfinished=5))}

    assert plan_copy(NAME, unfinished).targets == ("b",)
    without_name = {**both, "b": node_models(hub(refs={}))}
    assert plan_copy(NAME, {**without_name}, source="a", revision=COMMIT).targets == ("b",)


def test_a_folders_files_count_by_name_size_and_time() -> None:
    """They have no digests."""
    files = (("config.json", 20, 7, ""), ("m.safetensors", GB, 7, ""))
    own = revision("", files=files, links=())
    path = "/hf/mine"
    stored = hub(own, name=path, kind="plain", refs={})
    older = hub(
        replace(own, files=(files[0], ("m.safetensors", GB, 6, ""))),
        name=path,
        kind="plain",
        refs={},
    )

    copying = plan_copy(
        path,
        {"a": node_models(stored), "b": node_models(older), "c": node_models(stored)},
        source="a",
    )
    assert (copying.targets, copying.missing_bytes) == (("b",), {"b": GB})
    assert (copying.refs, copying.label) == ((), "files")


def test_no_node_has_the_model() -> None:
    """The error lists incomplete copies."""
    part = hub(revision(why="model-2.safetensors missing"))
    with pytest.raises(RequestError) as caught:
        plan_copy(NAME, {"a": node_models(), "b": node_models(part)})

    assert "no node has org/model completely" in caught.value.message
    assert caught.value.evidence == "b: model-2.safetensors missing"
    with pytest.raises(RequestError, match="a does not have org/model in revision v2"):
        plan_copy(NAME, {"a": node_models(hub())}, source="a", revision="v2")


def test_different_copies_need_a_choice() -> None:
    """The user must name the source."""
    newer = hub(revision(OTHER), refs={"main": OTHER})
    nodes = {"a": node_models(hub()), "b": node_models(newer)}
    with pytest.raises(RequestError, match=r"differs between \[?a,? ?b") as caught:
        plan_copy(NAME, nodes)
    assert "--from a" in caught.value.hint
    copying = plan_copy(NAME, nodes, source="b")

    assert (copying.revision, copying.targets) == (OTHER, ("a",))


def test_too_little_space_is_detected_by_the_plan() -> None:
    """With a margin; partial data of an interrupted copy count."""
    with pytest.raises(RequestError, match="b has too little disk space") as caught:
        plan_copy(NAME, {"a": node_models(hub()), "b": node_models(free=5 * GB)})
    assert caught.value.evidence.startswith("b: 4.7 GiB missing, 4.7 GiB free")
    partial = hub(revision(files=(), links=(), why="x"), unfinished=GB)

    assert plan_copy(
        NAME, {"a": node_models(hub()), "b": node_models(partial, free=5 * GB)}
    ).targets == ("b",)


def test_selected_nodes() -> None:
    """Others may have it or not."""
    nodes = {"a": node_models(hub()), "b": node_models(), "c": node_models()}

    assert plan_copy(NAME, nodes, targets=["c"]).targets == ("c",)


def test_large_models_get_larger_chunks() -> None:
    """To limit their number."""
    assert (choose_chunk_size(10 * GB), choose_chunk_size(700 * GB)) == (2**20, 2**22)


def test_a_file_that_leads_out_of_its_folder() -> None:
    """The error names the hostile node."""
    files = (("../../etc/cron.d/evil", 100, 7, SMALL),)
    stored = hub(revision(files=files, links=()))
    with pytest.raises(RequestError, match="a names a file of org/model that cannot be") as caught:
        plan_copy(NAME, {"a": node_models(stored), "b": node_models()})
    assert "leads out of its folder" in caught.value.evidence
