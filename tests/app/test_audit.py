"""Programs that append to and read a node's audit trail, run locally."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher import __version__
from launcher.app import audit
from tests.app.conftest import ENTRY
from tests.command_line import INVENTORY, SECRET, Cluster


def run(*argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False)


def append(state: Path, *, strict: bool = True) -> subprocess.CompletedProcess[str]:
    """Append a line before a command that prints its input."""
    argv = audit.append_argv(str(state), "c", audit.format_line(ENTRY), strict=strict)
    return run(*argv, "sed", "s/^/ran: /", stdin="it's\n")


def read(state: Path, last: int = 0) -> tuple[list[dict[str, Any]], int]:
    done = run(*audit.read_argv(str(state), "c", last))
    assert done.returncode == 0, done.stderr
    return audit.parse_lines("gpu01", done.stdout)


def test_the_line_is_written_before_the_command_runs(tmp_path: Path) -> None:
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
    """The command is unaffected."""
    done = run(
        *audit.append_argv(str(tmp_path), "c", audit.format_line(ENTRY)),
        "sh",
        "-c",
        'echo "$0|$*"; exit 7',
        "a b",
        "$HOME",
        "'",
    )

    assert (done.returncode, done.stdout) == (7, "a b|$HOME '\n")


def test_a_failed_write_stops_the_command(tmp_path: Path) -> None:
    """Except for cleanup, as it may be the remedy for a full disk."""
    (tmp_path / "audit").write_text("a file is in the way")
    strict, lenient = append(tmp_path), append(tmp_path, strict=False)

    assert (strict.returncode, strict.stdout) == (73, "")
    assert f"the audit line could not be written to {tmp_path}/audit/c.ndjson" in strict.stderr
    assert (lenient.returncode, lenient.stdout) == (0, "ran: it's\n")


def test_rotation_at_a_megabyte(tmp_path: Path) -> None:
    """One old file remains, and is read as well."""
    file = tmp_path / "audit/c.ndjson"
    append(tmp_path)
    old = file.read_text()
    file.write_text(old + "x" * 1_000_000 + "\n")
    append(tmp_path)

    assert file.read_text() == old
    assert (tmp_path / "audit/c.ndjson.1").stat().st_size > 1_000_000
    assert read(tmp_path) == ([ENTRY, ENTRY], 1)
    assert read(tmp_path, last=1) == ([ENTRY], 0)


def test_files_of_a_shared_folder_belong_to_its_group(tmp_path: Path) -> None:
    """Administrators share a folder with its set-group-ID bit."""
    (tmp_path / "audit").mkdir()
    (tmp_path / "audit").chmod(0o2770)
    append(tmp_path)

    assert stat.S_IMODE((tmp_path / "audit/c.ndjson").stat().st_mode) == 0o660


def test_concurrent_lines_are_complete(tmp_path: Path) -> None:
    """A line is a single write, even the longest."""
    line = audit.format_line({**ENTRY, "changes": [f"é{n}" * 9 for n in range(900)]})
    argv = (*audit.append_argv(str(tmp_path), "c", line), "true")
    processes = [subprocess.Popen(argv) for _ in range(24)]

    assert [process.wait() for process in processes] == [0] * 24
    entries, strange = read(tmp_path)
    assert (entries, strange) == (entries[:1] * 24, 0)


def test_a_missing_trail_is_empty(tmp_path: Path) -> None:
    """No change was recorded."""
    assert read(tmp_path) == ([], 0)


@given(st.lists(st.text(max_size=300), max_size=60), st.text(max_size=3000))
def test_a_line_is_short_and_has_no_break(changes: list[str], command: str) -> None:
    """For any content; omitted changes are counted."""
    text = audit.format_line({**ENTRY, "command": command, "changes": changes})

    assert len(text.encode()) <= audit.LONGEST
    assert "\n" not in text
    ((back,), strange) = audit.parse_lines("gpu01", text + "\n")
    assert strange == 0
    assert len(back["changes"]) == len(set(changes)) or "in all" in back["changes"][-1]


@given(
    st.text()
    | st.from_type(dict).map(repr)
    | st.sampled_from(["[1]", "{}", '{"at": 1}', "nan", "[" * 9000])
)
def test_invalid_lines_are_counted(text: str) -> None:
    """They do not affect the others."""
    good = audit.format_line(ENTRY)
    entries, _ = audit.parse_lines("gpu01", f"{good}\n{text}\n{good}\n")

    assert entries[0] == ENTRY and entries[-1] == ENTRY
    assert all(audit.describe_entry(entry) for entry in audit.merge_lines(entries))


@given(st.fixed_dictionaries(dict.fromkeys(ENTRY, st.none() | st.integers() | st.text())))
def test_values_of_any_kind_are_shown(entry: dict[str, Any]) -> None:
    """A line comes from a node."""
    ((back,), _) = audit.parse_lines("gpu01", json.dumps(entry))
    (merged,) = audit.merge_lines([back, back])

    assert "\n" not in audit.describe_entry(merged)


def test_an_unreadable_folder_is_an_error(tmp_path: Path) -> None:
    """It belongs to another user."""
    (tmp_path / "audit").mkdir(mode=0)
    powers = () if os.getuid() else ("setpriv", "--bounding-set=-dac_override,-dac_read_search")
    done = run(*powers, *audit.read_argv(str(tmp_path), "c"))

    assert (done.returncode, done.stdout) == (77, "")
    assert f"{tmp_path}/audit is not readable by this user" in done.stderr


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
def test_secrets_in_command_lines_are_redacted(parts: list[str], shown: str) -> None:
    """By pattern, in addition to known values."""
    assert audit.redact_command(parts) == shown


def test_lines_of_several_nodes_are_merged() -> None:
    """In order of time; a file on a shared disk is read by several nodes, and counts once."""
    other = {**ENTRY, "node": "gpu02"}
    late = {**other, "at": "2026-11-21T22:00:00Z", "changes": ["removing"]}
    result = audit.merge_lines([late, ENTRY, other, ENTRY, late])

    assert [(entry["nodes"], entry["changes"][0]) for entry in result] == [
        (["gpu01", "gpu02"], "pulling x:1"),
        (["gpu02"], "removing"),
    ]
    assert "node" not in result[0]


def lines(cluster: Cluster) -> dict[str, list[dict[str, Any]]]:
    """Return the lines sent to the nodes, in order; lines are sent once."""
    results: dict[str, list[dict[str, Any]]] = {}
    for command in cluster.commands:
        if command.preamble:
            assert command.preamble[:2] == ("sh", "-c") and command.preamble[3] == "audit"
            assert command.preamble[5] == "c"
            results.setdefault(command.node, []).append(json.loads(command.preamble[6]))
    cluster.commands.clear()
    return results


def test_every_changed_node_gets_one_line(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before its first change; with operator, changes and inventory."""
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


def test_no_change_leaves_no_line(cluster: Cluster) -> None:
    """Neither a second `up`, nor a dry run and its script."""
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
    """Neither the cluster's secrets and token nor a typed one."""
    monkeypatch.setenv("HF_TOKEN", secret)
    cluster.run("up")
    token = cluster.world.machines["gpu01"].files["secrets/RAY_AUTH_TOKEN"].decode()
    cluster.run("serve", "--model", f"x {secret}", "--skip-network-check", "--no-wait")
    assert "gpu01: want" in cluster.world.verbs()
    text = json.dumps(
        [command.preamble for command in cluster.commands]
        + [command.argv for command in cluster.background_commands]
    )

    assert "serve --model" in text
    assert secret not in text
    assert token not in text


def test_text_like_a_secret_is_not_in_a_line(cluster: Cluster) -> None:
    """The value is unknown; `vlaunch lock` shows the same command line."""
    cluster.run("up")
    argv = ("--", "--kv-transfer-config", '{"auth_token": "swordfish-swordfish"}')
    cluster.run("serve", "--model", "org/m", "--skip-network-check", "--no-wait", *argv)
    text = [command.preamble for command in cluster.commands] + [
        item.stdin() for item in cluster.background_commands if item.stdin
    ]

    assert "auth_token" in str(text)
    assert "swordfish" not in str(text)


@pytest.mark.parametrize(("parts", "strict"), [(["up"], "strict"), (["down"], "lenient")])
def test_a_full_disk_does_not_stop_cleanup(cluster: Cluster, parts: list[str], strict: str) -> None:
    """Other commands need the disk anyway."""
    if parts == ["down"]:
        cluster.run("up")
        cluster.commands.clear()
    cluster.run(*parts)

    assert {command.preamble[7] for command in cluster.commands if command.preamble} == {strict}
