"""Programs that append to and read a node's audit trail, run on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import __version__
from launcher.app import audit
from launcher.app.audit import AuditLine
from launcher.core.domain import Answer
from launcher.core.errors import UnreadableAnswer
from tests.app.conftest import ENTRY
from tests.command_line import INVENTORY, SECRET, Cluster


def run(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)


def append(
    state: Path, entry: AuditLine = ENTRY, *, strict: bool = True
) -> subprocess.CompletedProcess[str]:
    """Append a line in front of a command that says what it reads."""
    return run(
        *audit.append_argv(str(state), "c", entry, strict=strict),
        "sed",
        "s/^/ran: /",
        stdin="it's\n",
    )


def read(state: Path, last: int = 0) -> tuple[list[AuditLine], int]:
    done = run(*audit.read_argv(str(state), "c", last))
    return audit.parse_lines(
        Answer(node="gpu01", code=done.returncode, out=done.stdout, err=done.stderr)
    )


def test_the_line_is_there_before_the_command_runs(tmp_path: Path) -> None:
    """The command gets its own arguments and input; only the SSH user may read the line."""
    state = tmp_path / "a b"
    done = append(state)
    file = state / "audit/c.ndjson"

    assert (done.returncode, done.stdout, done.stderr) == (0, "ran: it's\n", "")
    assert json.loads(file.read_text())["changes"] == ["pulling x:1", "starting the Ray head"]
    assert [stat.S_IMODE(item.stat().st_mode) for item in (state, state / "audit", file)] == [
        0o755,
        0o700,
        0o600,
    ]
    assert read(state) == ([ENTRY], 0)


def test_the_exit_code_is_the_commands(tmp_path: Path) -> None:
    """And nothing else changes for it."""
    done = run(
        *audit.append_argv(str(tmp_path), "c", ENTRY),
        "sh",
        "-c",
        'echo "$0|$*"; exit 7',
        "a b",
        "$HOME",
        "'",
    )

    assert (done.returncode, done.stdout) == (7, "a b|$HOME '\n")


def test_what_cannot_be_written_down_is_not_done(tmp_path: Path) -> None:
    """Unless it is to clean up, for which a full disk may be the reason."""
    (tmp_path / "audit").write_text("a file is in the way")
    strict, lenient = append(tmp_path), append(tmp_path, strict=False)

    assert (strict.returncode, strict.stdout) == (73, "")
    assert f"the audit line could not be written to {tmp_path}/audit/c.ndjson" in strict.stderr
    assert (lenient.returncode, lenient.stdout) == (0, "ran: it's\n")


def test_a_file_of_a_megabyte_makes_room(tmp_path: Path) -> None:
    """One old one is kept, and read as well."""
    file = tmp_path / "audit/c.ndjson"
    append(tmp_path)
    old = file.read_text()
    file.write_text(old + "x" * 1_000_000 + "\n")
    append(tmp_path)

    assert file.read_text() == old
    assert (tmp_path / "audit/c.ndjson.1").stat().st_size > 1_000_000
    assert read(tmp_path) == ([ENTRY, ENTRY], 1)
    assert read(tmp_path, last=1) == ([ENTRY], 0)


def test_a_shared_folder_makes_files_that_the_group_may_use(tmp_path: Path) -> None:
    """Its set-group-ID bit is how an administrator says so."""
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit").chmod(0o2770)
    append(tmp_path)

    assert stat.S_IMODE((tmp_path / "audit/c.ndjson").stat().st_mode) == 0o660


def test_lines_of_many_at_once_are_whole(tmp_path: Path) -> None:
    """Each is one write, also the longest."""
    entry = AuditLine(
        **{
            **{name: getattr(ENTRY, name) for name in AuditLine.__slots__},
            "changes": tuple(f"é{n}" * 9 for n in range(900)),
        }
    )
    argv = (*audit.append_argv(str(tmp_path), "c", entry), "true")
    processes = [subprocess.Popen(argv) for _ in range(24)]

    assert [process.wait() for process in processes] == [0] * 24
    entries, strange = read(tmp_path)
    assert (len(set(entries)), len(entries), strange) == (1, 24, 0)


def test_no_trail_is_an_empty_one(tmp_path: Path) -> None:
    """Nothing has changed there."""
    assert read(tmp_path) == ([], 0)


@given(st.lists(st.text(max_size=300), max_size=60), st.text(max_size=3000))
def test_a_line_is_short_and_has_no_break(changes: list[str], command: str) -> None:
    """Whatever is to be told; what found no room is counted."""
    entry = AuditLine(
        at="t", who="a", host="h", verb="up", command=command, node="n", changes=tuple(changes)
    )
    text = audit.format_line(entry)

    assert len(text.encode()) <= audit.LONGEST
    assert "\n" not in text
    ((back,), strange) = audit.parse_lines(Answer(node="n", code=0, out=text + "\n"))
    assert strange == 0
    assert len(back.changes) == len(set(changes)) or "in all" in back.changes[-1]


@given(
    st.text()
    | st.from_type(dict).map(repr)
    | st.sampled_from(["[1]", "{}", '{"at": 1}', "nan", "[" * 9000])
)
def test_strange_lines_are_counted(text: str) -> None:
    """And never in the way of the others."""
    good = audit.format_line(ENTRY)
    entries, _ = audit.parse_lines(Answer(node="gpu01", code=0, out=f"{good}\n{text}\n{good}\n"))

    assert entries[0] == ENTRY and entries[-1] == ENTRY


def test_a_folder_that_may_not_be_read_is_not_an_empty_trail(tmp_path: Path) -> None:
    """Another login has made it its own."""
    (tmp_path / "audit").mkdir(mode=0)
    powers = () if os.getuid() else ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    done = run(*powers, *audit.read_argv(str(tmp_path), "c"))

    assert (done.returncode, done.stdout) == (77, "")
    assert f"{tmp_path}/audit may not be read by this login" in done.stderr


def test_a_trail_that_may_not_be_read_is_not_an_empty_one() -> None:
    """It is said."""
    with pytest.raises(UnreadableAnswer, match="gpu01"):
        audit.parse_lines(Answer(node="gpu01", code=77, err="may not be read by this login"))


@pytest.mark.parametrize(
    ("parts", "shown"),
    [
        (["vlaunch", "up", "a b.yaml"], "vlaunch up a b.yaml"),
        (
            ["serve", "--", "--api-key", "swordfish", "--seed", "1"],
            "serve -- --api-key *** --seed 1",
        ),
        (["serve", "--", "--api-key=swordfish"], "serve -- --api-key=***"),
        (
            ["serve", "--", "--api_key", "sword", "fish", "--seed", "1"],
            "serve -- --api_key *** *** --seed 1",
        ),
        (["--api-key=sword\nfish"], "--api-key=***"),
        (["--hf-token", "--seed", "1"], "--hf-token --seed 1"),
        (
            ["--tokenizer", "org/t", "--max-num-batched-tokens", "8192"],
            "--tokenizer org/t --max-num-batched-tokens 8192",
        ),
        (["--x", "hf_abcdefghijklmnopqrst"], "--x ***"),
        (["https://anna:swordfish@hub/x"], "https://***@hub/x"),
        (["task-specific-chat-template"], "task-specific-chat-template"),
    ],
)
def test_a_command_line_without_what_looks_like_a_secret(parts: list[str], shown: str) -> None:
    """By its form; values that are known are taken out besides."""
    assert audit.redact_command(parts) == shown


def test_what_several_nodes_say_is_said_once() -> None:
    """In the order of time; a file that nodes share is read by each of them, and counts once."""
    other = replace(ENTRY, node="gpu02")
    late = replace(ENTRY, at="2026-11-21T22:00:00Z", node="gpu02", changes=("removing",))
    result = audit.merge_lines([late, ENTRY, other, ENTRY, late])

    assert [(item.nodes, item.entry.changes[0]) for item in result] == [
        (("gpu01", "gpu02"), "pulling x:1"),
        (("gpu02",), "removing"),
    ]
    assert result[0].as_json()["nodes"] == ["gpu01", "gpu02"]


def lines(cluster: Cluster) -> dict[str, list[dict[str, Any]]]:
    """The lines that each node was sent, in order; they are not sent again."""
    results: dict[str, list[dict[str, Any]]] = {}
    for command in cluster.commands:
        if command.preamble:
            assert command.preamble[:2] == ("sh", "-c") and command.preamble[3] == "audit"
            assert command.preamble[5] == "c"
            results.setdefault(command.node, []).append(json.loads(command.preamble[6]))
    cluster.commands.clear()
    return results


def test_each_node_that_changes_keeps_one_line(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In front of the first thing that changes it; with who, what, and the inventory it came
    from.
    """
    monkeypatch.setenv("LOGNAME", "anna")
    assert cluster.run("up", "--verbose").code == 0
    first = {}
    for command in cluster.commands:
        if command in cluster.world.changes:
            first.setdefault(command.node, command)
    assert set(first) == {"gpu01", "gpu02"} and all(command.preamble for command in first.values())
    result = lines(cluster)

    for name in ("gpu01", "gpu02"):
        (text,) = result[name]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", text["at"])
        assert (text["who"], text["verb"], text["node"], text["vlaunch"]) == (
            "anna",
            "up",
            name,
            __version__,
        )
        assert text["command"] == "vlaunch up --verbose"
        assert text["inventory"] == hashlib.sha256(INVENTORY.encode()).hexdigest()[:12]
        assert f"starting the Ray {'head' if name == 'gpu01' else 'worker'}" in text["changes"]
    assert result["gpu01"][0]["id"] == result["gpu02"][0]["id"]


def test_what_changes_nothing_leaves_no_line(cluster: Cluster) -> None:
    """A second `up`, and a dry run, whose script has none either."""
    cluster.run("up")
    cluster.commands.clear()
    assert cluster.run("up").code == 0
    dry = cluster.run("down", "--dry-run")

    assert (dry.code, lines(cluster)) == (0, {})
    assert "audit" not in dry.out


@pytest.mark.parametrize("secret", [SECRET, "it has no form of its own"])
def test_no_secret_is_in_a_line(
    cluster: Cluster, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the cluster's nor what somebody types; the cluster's own token is none of a line's
    business either.
    """
    monkeypatch.setenv("HF_TOKEN", secret)
    cluster.run("up")
    token = cluster.world.machines["gpu01"].files["secrets/RAY_AUTH_TOKEN"].decode()
    cluster.run("serve", "--model", f"x {secret}", "--skip-network-check", "--no-wait")
    assert "gpu01: want" in cluster.world.verbs()
    text = json.dumps(
        [command.preamble for command in cluster.commands]
        + [command.argv for command in cluster.held]
    )

    assert "serve --model" in text
    assert secret not in text
    assert token not in text


def test_nor_is_what_looks_like_one(cluster: Cluster) -> None:
    """Nobody told us of it; `vlaunch lock` shows the same words."""
    cluster.run("up")
    argv = ("--", "--kv-transfer-config", '{"auth_token": "swordfish-swordfish"}')
    cluster.run("serve", "--model", "org/m", "--skip-network-check", "--no-wait", *argv)
    text = [command.preamble for command in cluster.commands] + [
        item.stdin() for item in cluster.held if item.stdin
    ]

    assert "auth_token" in str(text)
    assert "swordfish" not in str(text)


@pytest.mark.parametrize(("parts", "strict"), [(["up"], "strict"), (["down"], "lenient")])
def test_a_full_disk_keeps_nobody_from_cleaning_up(
    cluster: Cluster, parts: list[str], strict: str
) -> None:
    """Whoever builds needs the disk anyway."""
    if parts == ["down"]:
        cluster.run("up")
        cluster.commands.clear()
    cluster.run(*parts)

    assert {command.preamble[7] for command in cluster.commands if command.preamble} == {strict}
