"""The shell line of a node, run by various shells."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.ssh import envelope

SHELLS = ["sh", "bash", "dash", "zsh", "fish", "csh", "ksh"]


def test_line_is_readable() -> None:
    """Only necessary arguments are quoted."""
    assert (
        envelope.shell_line(("docker", "run", "--name", "a b", "$x"))
        == "docker run --name 'a b' '$x'"
    )


def test_shells_parse_the_envelope_alike() -> None:
    """fish, csh and POSIX shells parse the line in the same way if the argv is plain."""
    line = envelope.wrap(("true",), timeout=5, stdin=0, marker="m")
    assert not set(line) & set("\\\n")
    assert line.count("'") == 2
    assert line.startswith("exec timeout -k 5 5 sh -c '")


@pytest.mark.parametrize(
    ("seconds", "argument"),
    [(60, "60"), (0.5, "0.5"), (math.inf, "0"), (1e-9, "0.001"), (120.25, "120.25")],
)
def test_deadline_argument(seconds: float, argument: str) -> None:
    """`timeout` reads 0 as no deadline, so only infinity may become 0."""
    assert envelope.wrap(("true",), timeout=seconds, stdin=0, marker="m").split()[4] == argument


def run(*argv: str, **environment: str) -> bytes:
    """Return the output of a command on both streams, without the markers."""
    line = envelope.wrap(argv, timeout=20, stdin=0, marker="mark")
    with subprocess.Popen(
        ["sh", "-c", line],
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,  # left open, like by a running launcher
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout
        return process.stdout.read().replace(b"mark\n", b"")


GERMAN = {"LANG": "de_DE.UTF-8", "LC_ALL": "de_DE.UTF-8", "LANGUAGE": "de"}


def test_messages_are_english() -> None:
    """Checks and symptoms match them, whatever the node's language; also with C.UTF-8, `LANGUAGE`
    chooses one.
    """
    for chosen in (GERMAN, {"LC_ALL": "C.UTF-8", "LANGUAGE": "de"}):
        assert run("sh", "-c", 'echo "$LC_ALL"', **chosen) == b"C\n"
        assert b"No such file or directory" in run("timeout", "1", "no-such-program", **chosen)
        assert b"not found" in run("sh", "-c", "no-such-program", **chosen)


def test_names_of_files_are_utf8(tmp_path: Path) -> None:
    """In Python's programs on nodes too, and in listings."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "Gewichte-é-模.bin").touch()
    names = "import os, sys; print(*os.listdir(sys.argv[1])); print('é')"
    argv = (sys.executable, "-c", names, str(folder))

    assert run(*argv, **GERMAN).decode() == "Gewichte-é-模.bin\né\n"
    for listing in ("ls", "find . -type f -printf %f"):
        shown = run("sh", "-c", f'cd "$0" && {listing}', str(folder), **GERMAN)
        assert shown.decode().strip() == "Gewichte-é-模.bin"


@pytest.mark.parametrize("login", SHELLS)
@pytest.mark.parametrize("inner", ["sh", "bash", "dash"])
def test_shells(login: str, inner: str) -> None:
    """Status, both streams and standard input work with any login shell and any `sh`."""
    if shutil.which(login) is None or shutil.which(inner) is None:
        pytest.skip(f"{login} or {inner} is not installed")
    line = envelope.wrap(
        ("sh", "-c", "cat; echo err >&2; exit 7"), timeout=20, stdin=5, marker="mark"
    )
    line = line.replace(" sh -c ", f" {inner} -c ", 1)
    with subprocess.Popen(
        [login, "-c", line],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(b"hello" + envelope.TRAILER)
        process.stdin.flush()  # left open, like by a running launcher
        out, err = process.stdout.read(), process.stderr.read()
        assert process.wait(timeout=60) == 7
    assert (out, err) == (b"mark\nhello", b"mark\nerr\n")
