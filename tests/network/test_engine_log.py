"""NCCL logs of the engine's ranks: settings, queries, and the merged result."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launcher.core.domain import Answer
from launcher.network import engine_log
from launcher.tools.site import Site
from tests.conftest import Load

ONE_NODE = "nodes: [{host: gpu01, ip: 10.0.0.11, gpus: 8}]"
LINE = "{0}:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [{1}] via NET/IB/0/GDRDMA\n"


@pytest.mark.parametrize(
    ("accelerator", "nodes", "messages"),
    [
        ("nvidia", "", True),
        ("amd", "", True),
        ("cpu", "", False),
        ("nvidia", ONE_NODE, False),
        ("cpu", ONE_NODE, False),
    ],
)
def test_only_gpus_on_several_nodes_write_logs(
    load: Load, accelerator: str, nodes: str, messages: bool
) -> None:
    """A CPU has no NCCL, and one node no network."""
    inventory = load(f"accelerator: {accelerator}", nodes)
    settings = engine_log.variables(inventory, "chat-1")

    assert bool(settings) is messages
    if messages:
        assert settings["NCCL_DEBUG"] == "INFO"
        assert settings["NCCL_DEBUG_FILE"] == "/tmp/vlaunch-nccl.chat-1.%h.%p.log"


def test_nodes_with_ranks_are_queried(load: Load) -> None:
    """In their containers, and no others."""
    requests = engine_log.query_logs(Site(load()), ["gpu02"], "chat-1")

    assert [(request.node, request.argv[:3]) for request in requests] == [
        ("gpu02", ("docker", "exec", "vlaunch-c-gpu02"))
    ]


def read_lines(load: Load, folder: Path, name: str) -> str:
    """Run the container's program locally, on another folder."""
    argv = engine_log.query_logs(Site(load()), ["gpu01"], name)[0].argv[3:]
    items = [
        item.replace("/tmp/vlaunch-nccl", f"{folder}/vlaunch-nccl") if at == 2 else item
        for at, item in enumerate(argv)
    ]
    return subprocess.run(items, capture_output=True, text=True, check=False, cwd=folder).stdout


def test_relevant_lines_of_this_server(load: Load, tmp_path: Path) -> None:
    """Not those of a server with a similar name, and no irrelevant ones."""
    (tmp_path / "vlaunch-nccl.serve-1.gpu01.7.log").write_text(
        LINE.format("gpu01", "send") + "gpu01:7:9 noise\n"
    )
    (tmp_path / "vlaunch-nccl.serve-1.gpu01.8.log").write_text("gpu01:8:9 [0] NCCL WARN trouble\n")
    (tmp_path / "vlaunch-nccl.serve-12.gpu01.9.log").write_text(LINE.format("other", "send"))

    assert (
        read_lines(load, tmp_path, "serve-1")
        == LINE.format("gpu01", "send") + "gpu01:8:9 [0] NCCL WARN trouble\n"
    )
    assert read_lines(load, tmp_path, "serve-3") == ""


@pytest.mark.parametrize(
    "name", ["$(touch owned)", "a; touch owned", "`touch owned`", '"; touch owned; "', "../../x"]
)
def test_a_name_is_never_parsed_by_a_shell(load: Load, tmp_path: Path, name: str) -> None:
    """It is passed as an argument."""
    assert read_lines(load, tmp_path, name) == ""
    assert not (tmp_path / "owned").exists()


def test_logs_of_ranks_are_merged() -> None:
    """Links of both ends, and the sum of lines; a silent node adds nothing."""
    reading = engine_log.parse_logs(
        {
            "gpu01": [Answer(node="gpu01", code=0, out=LINE.format("gpu01", "send"))],
            "gpu02": [Answer(node="gpu02", code=0, out=LINE.format("gpu02", "receive") * 2)],
            "gpu03": [Answer(node="gpu03", code=1, err="No such container")],
        }
    )

    assert {link.host for link in reading.links} == {"gpu01", "gpu02"}
    assert reading.network_links == 3
