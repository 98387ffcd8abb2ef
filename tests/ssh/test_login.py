"""Order of offered keys, and the errors when all are rejected."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.ssh.fleet import Fleet
from tests.ssh import sshd
from tests.ssh.conftest import refusal, works

pytestmark = pytest.mark.processes


def test_wrong_user(server: sshd.Sshd) -> None:
    """A rejected login names the user and the offered keys."""
    error = refusal(server.node(user="nobody-of-that-name"))
    assert f"nobody-of-that-name@127.0.0.1:{server.port} rejected the login" in error.message
    assert str(server.key) in error.message
    assert "ssh-copy-id nobody-of-that-name@127.0.0.1" in error.hint


def test_wrong_key(server: sshd.Sshd, tmp_path: Path) -> None:
    """Likewise with a key unknown to the server."""
    assert (
        "rejected the login"
        in refusal(server.node(identity=str(sshd.make_key(tmp_path / "wrong")))).message
    )


def test_missing_key(server: sshd.Sshd, tmp_path: Path) -> None:
    """A missing key file of the inventory is named."""
    error = refusal(server.node(identity=str(tmp_path / "nowhere")))
    assert f"key {tmp_path}/nowhere does not exist" in error.message
    assert "ssh.identity" in error.hint


def test_file_that_is_no_key(server: sshd.Sshd, tmp_path: Path) -> None:
    """An invalid key file is named as well."""
    (tmp_path / "poem").write_text("roses are red\n")
    assert "is not a private key" in refusal(server.node(identity=str(tmp_path / "poem"))).message


def test_no_key_at_all(server: sshd.Sshd) -> None:
    """The error for a login without any key."""
    error = refusal(server.node(identity=None))
    assert "no key for" in error.message
    assert "ssh-add" in error.hint


def test_usual_key_of_the_user(server: sshd.Sshd, home: Path) -> None:
    """Without a key in the inventory the usual files are tried."""
    (home / ".ssh" / "id_ed25519").write_bytes(server.key.read_bytes())
    assert works(server.node(identity=None))


@pytest.fixture
def locked(start_server: Callable[..., sshd.Sshd], tmp_path: Path) -> sshd.Sshd:
    """A server whose key has a passphrase, `open sesame`."""
    return start_server(authorized=sshd.make_key(tmp_path / "locked", passphrase="open sesame"))


def test_encrypted_key_without_anybody_to_ask(locked: sshd.Sshd) -> None:
    """The error for an encrypted key has the command that unlocks it."""
    error = refusal(locked.node())
    assert "is encrypted" in error.message
    assert error.hint == f"unlock it: `ssh-add {locked.key}`"


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record prompts; answer them with `open sesame`."""
    questions: list[str] = []

    def answer(question: str) -> str:
        questions.append(question)
        return "open sesame"

    monkeypatch.setattr("getpass.getpass", answer)
    return questions


def test_encrypted_key_asks_once(locked: sshd.Sshd, prompts: list[str]) -> None:
    """One prompt serves all nodes, while no other output uses the terminal."""
    free: list[str] = []

    @contextlib.contextmanager
    def terminal() -> Iterator[None]:
        free.append("free")
        yield
        free.append(f"{len(prompts)} asked")

    nodes = [locked.node(f"gpu0{n}") for n in (1, 2, 3)]
    with Fleet(sshd.inventory(*nodes), terminal=terminal) as fleet:
        assert fleet.connect() == {}
    assert prompts == [f"Passphrase of {locked.key}: "]
    assert free == ["free", "1 asked"]


def test_wrong_passphrase(locked: sshd.Sshd, prompts: list[str], tmp_path: Path) -> None:
    """A wrong passphrase is not prompted for again, and the error names the key."""
    other = sshd.make_key(tmp_path / "other", passphrase="open barley")
    error = refusal(locked.node(identity=str(other)), terminal=contextlib.nullcontext)
    assert "not its passphrase" in error.message
    assert len(prompts) == 1


def test_agent(server: sshd.Sshd, agent: Callable[[Path], None]) -> None:
    """The agent's keys are offered, to many nodes at once."""
    agent(server.key)
    nodes = [server.node(f"gpu{n:02}", identity=None) for n in range(1, 9)]
    with Fleet(sshd.inventory(*nodes)) as fleet:
        assert fleet.connect() == {}


def test_named_key_goes_before_the_agents(
    start_server: Callable[..., sshd.Sshd], agent: Callable[[Path], None], tmp_path: Path
) -> None:
    """A full agent does not use up the server's attempts before the named key."""
    strict = start_server(extra="MaxAuthTries 2")
    for number in range(4):
        agent(sshd.make_key(tmp_path / f"other{number}"))
    assert works(strict.node())


def test_encrypted_key_in_the_agent(
    locked: sshd.Sshd, agent: Callable[[Path], None], tmp_path: Path
) -> None:
    """A named encrypted key needs no passphrase then."""
    clear = tmp_path / "clear"
    clear.write_bytes(locked.key.read_bytes())
    clear.chmod(0o600)
    subprocess.run(
        ["ssh-keygen", "-q", "-p", "-P", "open sesame", "-N", "", "-f", str(clear)], check=True
    )
    agent(clear)
    assert works(locked.node())


@pytest.mark.skipif(os.geteuid() == 0, reason="root can read everything")
def test_unreadable_key(server: sshd.Sshd, tmp_path: Path) -> None:
    """A key file without read permission is named."""
    key = sshd.make_key(tmp_path / "key")
    key.chmod(0)
    assert "cannot be read" in refusal(server.node(identity=str(key))).message
