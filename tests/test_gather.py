"""Gathering where the head is slow to answer, or does not; what is fetched is tested with the
command.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.errors import BatchError, NodeError
from launcher.events import Event
from launcher.gather import gather
from launcher.model import Answer, Inventory, Node
from launcher.output_folder import OutputFolder
from launcher.site import Site
from launcher.transport import Command
from launcher.ui.progress import plain_line
from tests.fakes import FakeTransport

INVENTORY = Inventory(
    path=Path("inventory.yaml"),
    cluster="c",
    image="i",
    nodes=(Node(name="n1", host="n1", ip="10.0.0.1", gpus=1, head=True),),
)
DATA = b'{"row": 0}\n' * 100
LOST = Answer(node="n1", code=255, err="the connection was lost")
FILES = {
    "files": [
        {
            "path": "rows/part-000001.jsonl",
            "bytes": len(DATA),
            "sha256": hashlib.sha256(DATA).hexdigest(),
        }
    ]
}


def run(
    path: Path, answer: Callable[[Command], Answer], seconds: float = 1.0
) -> tuple[list[Event], float]:
    """Gather into a folder; a question costs `seconds`."""
    now = [0.0]

    def ask(command: Command) -> Answer:
        now[0] += seconds
        return answer(command)

    def sleep(wanted: float) -> None:
        now[0] += wanted

    folder = OutputFolder(path=path, shown="out", cluster="c", job="j", digest="d")
    events = gather(
        Site(INVENTORY), "/w/j", folder, FakeTransport(ask), clock=lambda: now[0], sleep=sleep
    )
    return list(events), now[0]


def head(command: Command) -> Answer:
    if "outputs" in command.argv:
        return Answer(node="n1", code=0, out=json.dumps(FILES))
    offset, count = (
        int(command.argv[command.argv.index(word) + 1]) for word in ("--offset", "--bytes")
    )
    data = base64.b64encode(DATA[offset : offset + count]).decode()
    return Answer(node="n1", code=0, out=json.dumps({"data": data, "size": len(DATA)}))


def test_a_connection_may_break(tmp_path: Path) -> None:
    """What was asked is asked again."""
    asked: list[Command] = []

    def breaking(command: Command) -> Answer:
        asked.append(command)
        return LOST if len(asked) in (1, 3, 4) else head(command)

    run(tmp_path, breaking)

    assert (tmp_path / "rows/part-000001.jsonl").read_bytes() == DATA


def test_a_connection_that_does_not_come_back(tmp_path: Path) -> None:
    """Is given up after a while; what is on the head stays there."""
    with pytest.raises(BatchError, match="cannot be gathered") as raised:
        run(tmp_path, lambda _: LOST)

    assert "it stays on the head" in raised.value.hint


def test_nonsense_is_not_asked_for_again(tmp_path: Path) -> None:
    """It would come again."""
    asked: list[Command] = []

    def nonsense(command: Command) -> Answer:
        asked.append(command)
        return Answer(node="n1", code=0, out="{}" if "get" in command.argv else json.dumps(FILES))

    with pytest.raises(BatchError):
        run(tmp_path, nonsense)

    assert (len(asked), list((tmp_path / "rows").iterdir())) == (2, [])


def test_a_long_gathering_is_told_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a pipe, a line every ten seconds."""
    monkeypatch.setattr("launcher.gather.PIECE", 50)
    events, _ = run(tmp_path, head)
    lines = [line for event in events if event.kind == "wait" and (line := plain_line(event))]

    assert len([event for event in events if event.kind == "wait"]) == 22
    assert lines == [
        "  gathering file 1 of 1, 500 bytes of 1.1 kB",
        "  gathering file 1 of 1, 1.0 kB of 1.1 kB",
    ]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """A folder that somebody else packed may hold links to files of the user's."""
    mine, out = tmp_path / "mine", tmp_path / "out"
    mine.write_text("mine")
    (out / "rows").mkdir(parents=True)
    for name in ("rows/.part-000001.jsonl~", ".vlaunch-batch.json~"):
        (out / name).symlink_to(mine)
    OutputFolder(path=out, shown="out", cluster="c", job="j", digest="d").claim(clear=False)
    run(out, head)

    assert mine.read_text() == "mine"
    assert (out / "rows/part-000001.jsonl").read_bytes() == DATA


def test_a_head_that_has_no_output_any_more(tmp_path: Path) -> None:
    """Is not taken for one of which everything is there already."""
    with pytest.raises(NodeError, match="has no output of `j` any more"):
        run(tmp_path, lambda _: Answer(node="n1", code=0, out='{"files": []}'))


def test_a_list_of_files_in_pages(tmp_path: Path) -> None:
    """Is asked for to its end; a page that leads back is the last one."""
    starts: list[str] = []

    def paged(command: Command) -> Answer:
        if "outputs" not in command.argv:
            return head(command)
        starts.append(command.argv[-1] if "--from" in command.argv else "")
        number, after = {1: (1, 2), 2: (2, 3), 3: (3, 2)}[len(starts)]
        file = {**FILES["files"][0], "path": f"rows/part-{number:06}.jsonl"}
        return Answer(
            node="n1", code=0, out=json.dumps({"files": [file], "next": f"part-{after:06}.json"})
        )

    run(tmp_path, paged)

    assert starts == ["", "part-000002.json", "part-000003.json"]
    assert sorted(each.name for each in (tmp_path / "rows").iterdir()) == [
        f"part-00000{number}.jsonl" for number in (1, 2, 3)
    ]
