"""Gathering from a slow or silent head; the command's tests cover the fetched files."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.batch.gather import gather
from launcher.batch.output_folder import OutputFolder
from launcher.core.domain import Answer, Inventory, Node
from launcher.core.errors import BatchError, NodeError
from launcher.core.events import Event
from launcher.core.transport import Command
from launcher.tools.site import Site
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


def read(path: str) -> Iterator[bytes]:
    """Yield a healthy head's output."""
    yield json.dumps(FILES).encode() if path == "/w/j/outputs.json" else DATA[:50]
    if path == "/w/j/output/rows/part-000001.jsonl":
        yield from (DATA[at : at + 50] for at in range(50, len(DATA), 50))


def run(
    path: Path,
    read: Callable[[str], Iterator[bytes]] = read,
    answer: Answer = Answer(node="n1", code=0, out='{"files": 1}'),  # noqa: B008
) -> list[Event]:
    """Gather into a folder; queries and blocks take a second."""
    now = [0.0]

    def ask(command: Command) -> Answer:
        now[0] += 1
        return answer

    def timed(path: str) -> Iterator[bytes]:
        for block in read(path):
            now[0] += 1
            yield block

    def sleep(seconds: float) -> None:
        now[0] += seconds

    folder = OutputFolder(path=path, shown="out", cluster="c", job="j", digest="d")
    site, transport = Site(INVENTORY), FakeTransport(ask)
    events = gather(site, "/w/j", folder, transport, timed, clock=lambda: now[0], sleep=sleep)
    return list(events)


def test_a_connection_may_break(tmp_path: Path) -> None:
    """The file is read again from its beginning."""
    prompts: list[str] = []

    def breaking(path: str) -> Iterator[bytes]:
        prompts.append(path)
        for number, block in enumerate(read(path)):
            if len(prompts) in (1, 3) and number == (0 if len(prompts) == 1 else 2):
                raise NodeError("n1", "the connection was lost")
            yield block

    run(tmp_path, breaking)

    assert len(prompts) == 4
    assert (tmp_path / "rows/part-000001.jsonl").read_bytes() == DATA


def test_every_query_may_fail_for_a_while(tmp_path: Path) -> None:
    """The time limit starts again after an answer."""
    reads: list[str] = []

    def breaking(path: str) -> Iterator[bytes]:
        reads.append(path)
        if len(reads) <= 15 or len(reads) in range(17, 41):
            raise NodeError("n1", "the connection was lost")
        yield from read(path)

    run(tmp_path, breaking)

    assert (tmp_path / "rows/part-000001.jsonl").read_bytes() == DATA


@pytest.mark.parametrize("breaks", [1, 1000])
def test_a_long_file_is_read_again(tmp_path: Path, breaks: int) -> None:
    """After minutes of progress, too; not for ever if every try ends at the same byte."""
    reads: list[str] = []

    def breaking(path: str) -> Iterator[bytes]:
        if path == "/w/j/outputs.json":
            yield from read(path)
            return
        reads.append(path)
        for at in range(0, len(DATA), 10):
            if at == 1000 and len(reads) <= breaks:
                raise NodeError("n1", "the connection was lost")
            yield DATA[at : at + 10]

    if breaks > 1:
        with pytest.raises(BatchError, match="the connection was lost"):
            run(tmp_path, breaking)
        assert len(reads) == 2
    else:
        run(tmp_path, breaking)
        assert (tmp_path / "rows/part-000001.jsonl").read_bytes() == DATA


def test_a_lost_connection(tmp_path: Path) -> None:
    """Gathering gives up after a while; the output stays on the head."""

    def lost(_: str) -> Iterator[bytes]:
        raise NodeError("n1", "the connection was lost")
        yield b""

    for broken in (lambda: run(tmp_path, answer=LOST), lambda: run(tmp_path, lost)):
        with pytest.raises(BatchError, match="cannot fetch the output") as raised:
            broken()
        assert "it stays on the head" in raised.value.hint


def test_an_unreadable_list_is_not_queried_again(tmp_path: Path) -> None:
    """It would not improve."""
    prompts: list[str] = []

    def nonsense(path: str) -> Iterator[bytes]:
        prompts.append(path)
        yield b"{}"

    with pytest.raises(BatchError):
        run(tmp_path, nonsense)

    assert prompts == ["/w/j/outputs.json"]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    """A folder from another person may contain links to the user's files."""
    mine, out = tmp_path / "mine", tmp_path / "out"
    mine.write_text("mine")
    (out / "rows").mkdir(parents=True)
    for name in ("rows/.part-000001.jsonl~", ".vlaunch-batch.json~"):
        (out / name).symlink_to(mine)
    OutputFolder(path=out, shown="out", cluster="c", job="j", digest="d").claim(clear=False)
    run(out)

    assert mine.read_text() == "mine"
    assert (out / "rows/part-000001.jsonl").read_bytes() == DATA


def test_a_head_without_output(tmp_path: Path) -> None:
    """It must not count as complete."""
    with pytest.raises(NodeError, match="no longer has any output of `j`"):
        run(tmp_path, lambda _: iter([b'{"files": []}']))


def test_an_endless_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not fill this machine's memory."""
    monkeypatch.setattr("launcher.batch.gather._MAX_LIST_BYTES", 1000)
    with pytest.raises(BatchError, match="too long"):
        run(tmp_path, lambda _: itertools.repeat(b"x" * 100))
