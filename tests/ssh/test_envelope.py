"""The shell line of a node, run by various shells."""

from __future__ import annotations

import math
import shutil
import subprocess

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
