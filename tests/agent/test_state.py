"""The files of servers on the head."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.agent import state
from launcher.agent.observed import Observed
from launcher.tools.shipped import node_files, zipapps
from tests.agent import specs


def test_names_of_servers(tmp_path: Path) -> None:
    """Other files and invalid names are ignored."""
    invalid = ("UPPER", "-x", "x" * 33, "...", "chat.", "chat.0", "chat.1", "chat.02", "chat.2.2")
    for name in ("chat", "chat.2", "chat.10", "a-1", *invalid):
        (tmp_path / name).mkdir()
    (tmp_path / "network.json").write_text("{}")
    (tmp_path / "embed").write_text("")

    assert state.server_names(str(tmp_path)) == ["a-1", "chat", "chat.10", "chat.2"]
    assert {state.group_of(name) for name in ("chat", "chat.2", "chat.10")} == {"chat"}
    assert state.server_names(str(tmp_path / "none")) == []


def test_files_are_replaced_atomically(tmp_path: Path) -> None:
    """The folder is created, and no temporary file left."""
    file = state.server_file("chat", state.OBSERVED, str(tmp_path))
    for value in ({"a": 1}, {"b": 2}):
        state.write_json(file, value)

    assert state.read_json(file) == {"b": 2}
    assert [path.name for path in (tmp_path / "chat").iterdir()] == ["observed.json"]


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is reported, and leaves no partial file."""
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
def test_invalid_json_counts_as_absent(tmp_path: Path, text: str | None) -> None:
    """Readers continue without it."""
    if text is not None:
        (tmp_path / "x").write_text(text, encoding="latin-1")

    assert state.read_json(str(tmp_path / "x")) is None


def test_specs_and_statuses_of_other_versions(tmp_path: Path) -> None:
    """Such a spec is an error, as an operator wrote it; such a status is absent."""
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
    Path(state.server_file("chat", state.DESIRED, folder)).write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        state.read_spec("chat", folder)


def history(folder: Path) -> list[tuple[float, str]]:
    payload = json.loads((folder / "chat" / "history.json").read_text())
    return [(item["at"], item["desired"]["id"]) for item in payload]


def test_the_history_is_newest_first(tmp_path: Path) -> None:
    """A server appears once, with its last time; five at most."""
    for at, name in enumerate("abcdefcg", 1):
        state.note_answered(
            state.HistoryEntry(at=at, desired=specs.mp("gpu1", id=name)), str(tmp_path)
        )

    assert history(tmp_path) == [(8, "g"), (7, "c"), (6, "f"), (5, "e"), (4, "d")]


@pytest.mark.parametrize("expected", ["{", "{}", '[1, {}, {"desired": 7}, {"desired": ["x"]}]'])
def test_a_damaged_history_is_replaced(tmp_path: Path, expected: str) -> None:
    """A server that has just answered must not stop for it."""
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "history.json").write_text(expected)
    state.note_answered(state.HistoryEntry(at=1, desired=specs.mp("gpu1", id="a")), str(tmp_path))

    assert history(tmp_path) == [(1, "a")]


def test_the_id_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in Docker with the host's network, on a disk with such a number in its path."""
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


def test_the_digest_of_the_program_is_that_of_its_archive(tmp_path: Path) -> None:
    """The launcher compares it with its own agent's."""
    archive = tmp_path / "agent.pyz"
    archive.write_bytes(zipapps.pack(zipapps.agent_files()))
    program = "from vlaunch_agent.agent import state; print(state.program_digest())"
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(archive)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )

    assert result.stdout.strip() == node_files.agent_digest()
    assert state.program_digest() == ""
