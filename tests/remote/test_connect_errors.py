"""Every exception of the library becomes an error the user can act on."""

from __future__ import annotations

import errno
import inspect
import socket
from collections.abc import Callable
from pathlib import Path

import paramiko
import pytest
from paramiko import ssh_exception

from launcher.errors import ConnectError
from launcher.remote.connect_errors import JumpFailed, Target, connect_error, resets
from launcher.remote.hostkeys import HostKeyRefused
from launcher.remote.known_hosts import KnownHosts
from launcher.remote.login import KeyUnusable, LoginRefused

TARGET = Target(node="gpu02", host="10.0.0.12", port=2222, user="ops", jump="bastion", timeout=7)
KEY = paramiko.ECDSAKey.generate()
KNOWN = KnownHosts([Path("/nowhere/known_hosts")])
GENERIC = "the SSH connection to 10.0.0.12:2222 failed"

# One example of each class that paramiko's exceptions module defines, and words that its error must
# contain.
LIBRARY: dict[type[BaseException], tuple[Callable[[], BaseException], str]] = {
    ssh_exception.SSHException: (lambda: ssh_exception.SSHException("odd"), GENERIC),
    ssh_exception.AuthenticationException: (
        lambda: ssh_exception.AuthenticationException("no"),
        "refused the login",
    ),
    ssh_exception.PasswordRequiredException: (
        lambda: ssh_exception.PasswordRequiredException("no"),
        "encrypted",
    ),
    ssh_exception.BadAuthenticationType: (
        lambda: ssh_exception.BadAuthenticationType("no", ["password"]),
        "does not take keys, only password",
    ),
    ssh_exception.PartialAuthentication: (
        lambda: ssh_exception.PartialAuthentication(["keyboard-interactive"]),
        "second proof (keyboard-interactive)",
    ),
    ssh_exception.UnableToAuthenticate: (ssh_exception.UnableToAuthenticate, "refused the login"),
    ssh_exception.ChannelException: (
        lambda: ssh_exception.ChannelException(2, "Connect failed"),
        "jump host bastion",
    ),
    ssh_exception.BadHostKeyException: (
        lambda: ssh_exception.BadHostKeyException("h", KEY, KEY),
        "has changed",
    ),
    ssh_exception.IncompatiblePeer: (lambda: ssh_exception.IncompatiblePeer("kex"), "no algorithm"),
    ssh_exception.ProxyCommandFailure: (
        lambda: ssh_exception.ProxyCommandFailure("nc", "no"),
        "ProxyCommand",
    ),
    ssh_exception.NoValidConnectionsError: (
        lambda: ssh_exception.NoValidConnectionsError(
            {("10.0.0.12", 22): OSError(errno.ECONNREFUSED, "refused")}
        ),
        "nothing listens",
    ),
    ssh_exception.CouldNotCanonicalize: (ssh_exception.CouldNotCanonicalize, "ssh configuration"),
    ssh_exception.ConfigParseError: (ssh_exception.ConfigParseError, "ssh configuration"),
    ssh_exception.MessageOrderError: (
        lambda: ssh_exception.MessageOrderError("odd"),
        "broke the SSH protocol",
    ),
}


def test_every_exception_of_the_library_is_in_the_table() -> None:
    """A new paramiko with a new exception fails here first."""
    defined = {
        kind
        for _, kind in inspect.getmembers(ssh_exception, inspect.isclass)
        if issubclass(kind, BaseException) and kind.__module__ == ssh_exception.__name__
    }
    assert defined == set(LIBRARY)


@pytest.mark.parametrize("kind", LIBRARY, ids=lambda kind: kind.__name__)
def test_library(kind: type[BaseException]) -> None:
    """Each has words of its own; only the base class falls through to the general ones."""
    make, words = LIBRARY[kind]
    error = connect_error(TARGET, make())
    assert isinstance(error, ConnectError)
    assert error.node == "gpu02"
    assert error.message.startswith("gpu02: ")
    assert words in error.message
    assert error.hint
    assert (GENERIC in error.message) == (kind is ssh_exception.SSHException)


def nested(outer: BaseException, inner: BaseException) -> BaseException:
    outer.__context__ = inner
    return outer


BANNER = "Error reading SSH protocol banner"


@pytest.mark.parametrize(
    ("error", "words", "hint"),
    [
        (OSError(errno.EHOSTUNREACH, "x"), "no route to 10.0.0.12:2222", "ip route get 10.0.0.12"),
        (OSError(errno.ENETUNREACH, "x"), "no route", "ip route"),
        (
            ConnectionRefusedError(errno.ECONNREFUSED, "x"),
            "nothing listens",
            "ssh -J bastion -p 2222 ops@10.0.0.12",
        ),
        (TimeoutError("timed out"), "did not answer within 7s", "firewall"),
        (OSError(errno.ETIMEDOUT, "x"), "did not answer within 7s", "firewall"),
        (socket.gaierror(-2, "Name or service not known"), "does not resolve", "getent hosts"),
        (ConnectionResetError(errno.ECONNRESET, "x"), "dropped the connection", "sshd's log"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/root/k"),
            "cannot use /root/k",
            "ls -l /root/k",
        ),
        (
            nested(paramiko.SSHException(BANNER), TimeoutError()),
            "did not finish an SSH handshake",
            "try",
        ),
        (
            nested(paramiko.SSHException(BANNER), EOFError()),
            "closed the connection before saying SSH",
            "MaxStartups",
        ),
        (EOFError(), "closed the connection", "MaxStartups"),
        (paramiko.SSHException("No existing session"), "did not finish an SSH handshake", "try"),
        (
            ssh_exception.ChannelException(1, "Administratively prohibited"),
            "does not allow forwarding",
            "ssh bastion",
        ),
        (
            HostKeyRefused("unknown", "h", KEY, KNOWN),
            "is not in /nowhere/known_hosts",
            "ssh-keyscan -p 2222 -H",
        ),
        (HostKeyRefused("changed", "[h]:1", KEY, KNOWN), "has changed", "ssh-keygen -R '[h]:1'"),
        (HostKeyRefused("revoked", "h", KEY, KNOWN), "@revoked", "new key"),
        (KeyUnusable("/k", "is encrypted", encrypted=True), "key /k is encrypted", "ssh-add /k"),
        (KeyUnusable("/k", "does not exist"), "key /k does not exist", "ls -l /k"),
        (
            LoginRefused("ops", ["/k", "agent key x"], [], None),
            "(tried: /k, agent key x)",
            "ssh-copy-id",
        ),
        (LoginRefused("ops", [], [], None), "was offered no key", "ssh-add"),
        (
            LoginRefused("ops", [], [KeyUnusable("/k", "is encrypted", encrypted=True)], None),
            "/k is",
            "ssh-add /k",
        ),
        (
            JumpFailed(
                "bastion", ConnectError("bastion", "nothing listens on b", hint="is sshd running")
            ),
            "jump host bastion: nothing listens on b",
            "is sshd running",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_cause_and_hint(error: BaseException, words: str, hint: str) -> None:
    """Each cause has its sentence and its command."""
    made = connect_error(TARGET, error)
    assert words in made.message
    assert hint in made.hint


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError(), True),
        (EOFError(), True),
        (nested(paramiko.SSHException(BANNER), EOFError()), True),
        (nested(paramiko.SSHException(BANNER), TimeoutError()), False),
        (paramiko.AuthenticationException("no"), False),
        (LoginRefused("ops", ["/k"], [], None), False),
        (HostKeyRefused("changed", "h", KEY, KNOWN), False),
        (TimeoutError(), False),
    ],
)
def test_what_is_tried_again(error: BaseException, expected: bool) -> None:
    """Only a dropped connection is worth a second try; a refused login never is."""
    assert resets(error) is expected
