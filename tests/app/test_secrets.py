"""Secrets from the launcher's machine: all or none, and never shown."""

from __future__ import annotations

import os
import select
import sys
from pathlib import Path

import pytest

from launcher.app.secrets import from_terminal, hide_known_values, redact, resolve
from launcher.core import redaction
from launcher.core.domain import Secret, SecretSource
from launcher.core.errors import RequestError

VALUE = "s3cret-value"


def _file(path: Path, content: str | bytes, mode: int = 0o600) -> Path:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(mode)
    return path


def _python(path: Path, program: str) -> SecretSource:
    """Return a command that runs `program` from a file, to keep secrets off the command line."""
    path.write_text(program)
    return SecretSource(command=f"{sys.executable} {path}")


def _failure(source: SecretSource, base: Path, seconds: float = 30.0) -> str:
    with pytest.raises(RequestError) as caught:
        resolve({"NAME": source}, base, seconds=seconds)
    messages = f"{caught.value} {caught.value.evidence} {caught.value.hint}"
    assert VALUE not in messages
    return str(caught.value.evidence).removeprefix("NAME: ")


def _ends(pid: int) -> bool:
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return select.select([process], [], [], 5.0)[0] != []
    finally:
        os.close(process)


def test_from_an_environment_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Unchanged."""
    monkeypatch.setenv("MINE", VALUE)

    assert resolve({"HF_TOKEN": SecretSource(env="MINE")}, tmp_path) == {"HF_TOKEN": Secret(VALUE)}


def test_from_a_file_beside_the_inventory(tmp_path: Path) -> None:
    """Without the final line break of editors."""
    _file(tmp_path / "key", f"{VALUE}\n")

    assert resolve({"A": SecretSource(file="key")}, tmp_path) == {"A": Secret(VALUE)}


def test_from_a_file_at_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`~` is the launcher's home."""
    _file(tmp_path / "key", VALUE)
    monkeypatch.setenv("HOME", str(tmp_path))

    assert resolve({"A": SecretSource(file="~/key")}, Path("/nowhere")) == {"A": Secret(VALUE)}


def test_from_a_command(tmp_path: Path) -> None:
    """Split as in a shell, but run without one."""
    (tmp_path / "a b").write_text(f"print('{VALUE}')")

    result = resolve(
        {"A": SecretSource(command=f"{sys.executable} '{tmp_path}/a b' $HOME ;")}, tmp_path
    )

    assert result == {"A": Secret(VALUE)}


def test_commands_have_no_terminal(tmp_path: Path) -> None:
    """A command that reads gets the end of its input."""
    source = _python(
        tmp_path / "p.py", f"import sys; print('{VALUE}' if sys.stdin.read() == '' else 'no')"
    )

    assert resolve({"A": source}, tmp_path) == {"A": Secret(VALUE)}


def test_all_failures_are_reported_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As mistakes of the request."""
    monkeypatch.delenv("MISSING", raising=False)
    sources = {
        "A": SecretSource(env="MISSING"),
        "B": SecretSource(file="missing"),
        "C": SecretSource(command="/missing/x"),
    }

    with pytest.raises(RequestError) as caught:
        resolve(sources, tmp_path)

    assert caught.value.message == "cannot fetch 3 secrets"
    assert caught.value.exit_code == 2
    assert str(caught.value.evidence).splitlines() == [
        "A: the environment variable `MISSING` is not set; run `export MISSING=…` first",
        "B: `missing` cannot be read: no such file or directory",
        "C: `/missing/x` cannot be run: no such file or directory",
    ]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o601])
def test_a_file_of_other_users_is_rejected_with_a_fix(tmp_path: Path, mode: int) -> None:
    """For any permission of group and world."""
    path = _file(tmp_path / "key", VALUE, mode)

    assert (
        _failure(SecretSource(file="key"), tmp_path)
        == f"`{path}` has mode {mode:04o}; run `chmod 600 {path}`"
    )


def test_a_directory_is_no_secret(tmp_path: Path) -> None:
    """Even a private one."""
    (tmp_path / "key").mkdir(mode=0o700)

    assert _failure(SecretSource(file="key"), tmp_path).endswith("is not a regular file")


def test_a_pipe_does_not_block(tmp_path: Path) -> None:
    """It may never have a writer."""
    os.mkfifo(tmp_path / "key", 0o600)

    assert _failure(SecretSource(file="key"), tmp_path).endswith("is not a regular file")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "is empty"),
        ("\n", "is empty"),
        (f"{VALUE}\nsecond\n", "must be one line of text"),
        (f"{VALUE}\r\n", "must be one line of text"),
        (f"{VALUE}\0", "must be one line of text"),
        (f"{VALUE}\n\n", "must be one line of text"),
        (VALUE.encode() + b"\xff", "is not UTF-8 text (byte 13)"),
        (VALUE * 10_000, "is larger than 64 KiB"),
    ],
)
def test_invalid_values(tmp_path: Path, content: str | bytes, expected: str) -> None:
    """From a file or a command: not a line of an env file."""
    _file(tmp_path / "key", content)
    echo = _python(
        tmp_path / "p.py",
        f"import sys; sys.stdout.buffer.write(open({str(tmp_path / 'key')!r}, 'rb').read())",
    )

    assert _failure(SecretSource(file="key"), tmp_path).startswith(expected)
    assert _failure(echo, tmp_path).startswith(expected)


def test_an_empty_environment_variable_is_not_a_value(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Although it is set."""
    monkeypatch.setenv("MINE", "")

    assert _failure(SecretSource(env="MINE"), tmp_path) == "is empty"


def test_errors_of_a_command_are_redacted(tmp_path: Path) -> None:
    """Tools sometimes echo the value."""
    source = _python(
        tmp_path / "p.py",
        f"import sys; print('{VALUE}'); sys.exit('first\\nthe store is locked: {VALUE} is in it')",
    )

    assert _failure(source, tmp_path).endswith(
        "failed with exit status 1: the store is locked: *** is in it"
    )


def test_a_hanging_command_is_killed_with_its_children(tmp_path: Path) -> None:
    """No process is left behind."""
    source = _python(
        tmp_path / "p.py",
        "import os, subprocess, sys, time\nchild = subprocess.Popen(['sleep', '600']);"
        f" open({str(tmp_path / 'pids')!r}, 'w').write(str(child.pid))\ntime.sleep(600)\n",
    )

    assert "timed out after 1 s" in _failure(source, tmp_path, seconds=1.0)
    assert _ends(int((tmp_path / "pids").read_text()))


def test_an_unkillable_command_is_not_awaited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`sudo` runs it as another user; the error is still about the secret."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("launcher.app.secrets.os.killpg", refuse)

    assert "timed out after 0.3 s" in _failure(
        SecretSource(command="sleep 1"), tmp_path, seconds=0.3
    )


@pytest.mark.parametrize(
    ("command", "expected"),
    [("'open", "is not a command: no closing quotation"), ("''", "cannot be run")],
)
def test_commands_that_cannot_be_run(tmp_path: Path, command: str, expected: str) -> None:
    """Shown as in the inventory."""
    assert expected in _failure(SecretSource(command=command), tmp_path)


def test_an_empty_source_is_an_error(tmp_path: Path) -> None:
    """As in the loader."""
    assert _failure(SecretSource(), tmp_path) == "has no source"


def test_prompts_come_last(tmp_path: Path) -> None:
    """Not while another secret is missing; the inventory's order stays."""
    requests: list[tuple[str, str]] = []

    def ask(name: str, question: str) -> str:
        requests.append((name, question))
        return VALUE

    sources = {"A": SecretSource(prompt="Say"), "B": SecretSource(file="key")}
    with pytest.raises(RequestError) as caught:
        resolve(sources, tmp_path, ask=ask)
    assert (requests, caught.value.evidence.startswith("B: ")) == ([], True)
    _file(tmp_path / "key", "of-b-value")
    assert list(resolve(sources, tmp_path, ask=ask)) == ["A", "B"]
    assert requests == [("A", "Say")]


def test_a_typed_value_is_checked_like_any_other(tmp_path: Path) -> None:
    """A pasted line break would end up in a header."""
    with pytest.raises(RequestError) as caught:
        resolve({"A": SecretSource(prompt="Say")}, tmp_path, ask=lambda *_: f"{VALUE}\nmore")

    assert "must be one line" in caught.value.evidence
    assert VALUE not in caught.value.evidence


def test_without_a_terminal_prompts_are_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, with the alternatives."""
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    from_terminal.cache_clear()
    with pytest.raises(RequestError) as caught:
        resolve(
            {
                "A": SecretSource(prompt="x"),
                "B": SecretSource(prompt="y"),
                "C": SecretSource(file="no"),
            },
            tmp_path,
        )

    assert caught.value.message == "cannot fetch 3 secrets"
    assert [line[:2] for line in caught.value.evidence.splitlines()] == ["C:", "A:", "B:"]
    assert "`env`, `file`, `command`" in caught.value.evidence


def test_values_are_redacted_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if fetching another one fails; `recall` neither prompts nor fails."""
    _file(tmp_path / "key", VALUE)
    with pytest.raises(RequestError):
        resolve({"A": SecretSource(file="key"), "B": SecretSource(file="no")}, tmp_path)
    assert redaction.redact(f"x{VALUE}") == "x***"
    redaction.clear_secrets()
    monkeypatch.delenv("NOT_THERE", raising=False)
    ran = tmp_path / "ran"
    sources = {
        "A": SecretSource(env="NOT_THERE"),
        "B": SecretSource(file="key"),
        "C": SecretSource(command=f"touch {ran}"),
        "D": SecretSource(prompt="x"),
        "E": SecretSource(file="no"),
    }
    assert hide_known_values(sources, tmp_path) == ["A", "C", "D", "E"]
    assert redaction.redact(f"x{VALUE}") == "x***"
    assert not ran.exists()


def test_redaction_replaces_every_value_the_longest_first() -> None:
    """A value that contains another is removed completely."""
    secrets = {"A": Secret("secret"), "B": Secret("secret-and-more")}

    assert redact("x=secret-and-more y=secret secret", secrets) == "x=*** y=*** ***"


def test_short_values_are_not_redacted() -> None:
    """They would remove ordinary text."""
    assert redact("12345 123456", [Secret("12345"), Secret("123456")]) == "12345 ***"


def test_a_weak_token_is_rejected(tmp_path: Path) -> None:
    """Ray and the agents obey anyone with the token."""
    _file(tmp_path / "key", "x")
    with pytest.raises(RequestError) as caught:
        resolve({"RAY_AUTH_TOKEN": SecretSource(file="key")}, tmp_path)
    assert "RAY_AUTH_TOKEN: must have at least 32 characters" in caught.value.evidence
    assert "create one with `openssl rand -hex 32`" in caught.value.evidence
    _file(tmp_path / "key", "0123456789abcdef" * 2)
    assert resolve({"RAY_AUTH_TOKEN": SecretSource(file="key")}, tmp_path)
