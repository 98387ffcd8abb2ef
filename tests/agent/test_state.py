"""The files of servers in a folder of the head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher.agent import state
from launcher.agent.observed import Observed
from tests.agent import specs


def test_names_are_folders_that_could_be_servers(tmp_path: Path) -> None:
    """Other files lie there too, and what has no name that anybody could type."""
    for name in ("chat", "a-1", "UPPER", "-x", "x" * 33, "..."):
        (tmp_path / name).mkdir()
    (tmp_path / "network.json").write_text("{}")
    (tmp_path / "embed").write_text("")

    assert state.server_names(str(tmp_path)) == ["a-1", "chat"]
    assert state.server_names(str(tmp_path / "none")) == []


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    """Its folder is made; nothing is left beside it."""
    file = state.server_file("chat", state.OBSERVED, str(tmp_path))
    for value in ({"a": 1}, {"b": 2}):
        state.write_json(file, value)

    assert state.read_json(file) == {"b": 2}
    assert [path.name for path in (tmp_path / "chat").iterdir()] == ["observed.json"]


def test_a_file_that_cannot_be_written_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is said, and leaves no half of a file."""
    file = state.server_file("chat", state.OBSERVED, str(tmp_path))
    state.write_json(file, {"a": 1})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        state.write_json(file, {"b": 2})

    assert state.read_json(file) == {"a": 1}
    assert [path.name for path in (tmp_path / "chat").iterdir()] == ["observed.json"]


@pytest.mark.parametrize("text", [None, "", "{", "\xff", "[" * 100_000])
def test_what_is_no_json_is_absent(tmp_path: Path, text: str | None) -> None:
    """Whoever reads it goes on without."""
    if text is not None:
        (tmp_path / "x").write_text(text, encoding="latin-1")

    assert state.read_json(str(tmp_path / "x")) is None


def test_what_is_wanted_and_how_it_is(tmp_path: Path) -> None:
    """A desired file of another version is an error, for somebody wrote it; such a record of ours
    is none.
    """
    server, observed = specs.mp("gpu1"), Observed(name="chat", id="abcd1234", asked=1.0)
    folder = str(tmp_path)
    assert (state.read_spec("chat", folder), state.read_status("chat", folder)) == (None, None)

    state.write_json(state.server_file("chat", state.DESIRED, folder), server.as_json())
    state.write_json(state.server_file("chat", state.OBSERVED, folder), observed.as_json())
    assert (state.read_spec("chat", folder), state.read_status("chat", folder)) == (
        server,
        observed,
    )

    for file in (state.DESIRED, state.OBSERVED):
        state.write_json(state.server_file("chat", file, folder), {"version": 1})
    assert state.read_status("chat", folder) is None
    with pytest.raises(ValueError, match="server spec: 1"):
        state.read_spec("chat", folder)


def history(folder: Path) -> list[tuple[float, str]]:
    payload = json.loads((folder / "chat" / "history.json").read_text())
    return [(item["at"], item["desired"]["id"]) for item in payload]


def test_what_has_answered_is_remembered_newest_first(tmp_path: Path) -> None:
    """The same server once, with its last time; five of them."""
    for at, name in enumerate("abcdefcg", 1):
        state.note_answered(
            state.HistoryEntry(at=at, desired=specs.mp("gpu1", id=name)), str(tmp_path)
        )

    assert history(tmp_path) == [(8, "g"), (7, "c"), (6, "f"), (5, "e"), (4, "d")]


@pytest.mark.parametrize("expected", ["{", "{}", '[1, {}, {"desired": 7}, {"desired": ["x"]}]'])
def test_a_history_that_is_spoiled_is_begun_again(tmp_path: Path, expected: str) -> None:
    """A server that has just answered must not end for it."""
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "history.json").write_text(expected)
    state.note_answered(state.HistoryEntry(at=1, desired=specs.mp("gpu1", id="a")), str(tmp_path))

    assert history(tmp_path) == [(1, "a")]


def test_the_id_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Docker shows it with the host's network, on a disk of its own whose path has such a number
    too.
    """
    volume, own = f"/var/lib/docker/volumes/{'0' * 64}/_data", f"containers/{'a' * 64}"
    lines = [
        "267 35 0:65 / / rw,relatime - overlay overlay rw",
        f"284 267 254:0 {volume}/{own}/resolv.conf /etc/resolv.conf rw,relatime - ext4 /dev/vda rw",
        f"285 267 254:0 {volume}/{own}/hostname /etc/hostname rw,relatime - ext4 /dev/vda rw",
    ]
    monkeypatch.setattr(state, "_MOUNTS", str(tmp_path / "mounts"))
    (tmp_path / "mounts").write_text("".join(f"{line}\n" for line in lines))
    assert state.container_id() == "a" * 64

    (tmp_path / "mounts").write_text(f"{lines[0]}\n")
    assert state.container_id() == ""
    (tmp_path / "mounts").unlink()
    assert state.container_id() == ""
