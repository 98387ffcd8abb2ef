"""Errors that users can act on, for all exceptions of the library."""

from __future__ import annotations

import errno
import inspect
import socket
from pathlib import Path

import paramiko
import pytest
from paramiko import ssh_exception

from launcher.ssh.connect_errors import connect_error, resets
from launcher.ssh.known_hosts import HostKeyRefused
from launcher.ssh.login import KeyUnusable, LoginRefused
from launcher.ssh.openssh import JumpFailed, ProxyFailed, Target

TARGET = Target(
    node="gpu02",
    host="10.0.0.12",
    port=2222,
    user="ops",
    ssh="ssh -J bastion gpu02",
    jump="bastion",
    timeout=7,
)
KEY = paramiko.ECDSAKey.generate()
FILE = Path("/nowhere/known_hosts")
LOCKED = KeyUnusable("/k", "is encrypted", encrypted=True)
BANNER = "Error reading SSH protocol banner"


def nested(outer: BaseException, inner: BaseException) -> BaseException:
    outer.__context__ = inner
    return outer


KINDS = [
    kind
    for _, kind in inspect.getmembers(ssh_exception, inspect.isclass)
    if kind.__module__ == ssh_exception.__name__
]
ARGUMENTS: dict[type, tuple[object, ...]] = {
    ssh_exception.BadAuthenticationType: ("odd", ["password"]),
    ssh_exception.PartialAuthentication: (["odd"],),
    ssh_exception.ChannelException: (2, "odd"),
    ssh_exception.BadHostKeyException: ("h", KEY, KEY),
    ssh_exception.ProxyCommandFailure: ("nc", "odd"),
    ssh_exception.NoValidConnectionsError: ({("h", 22): OSError("odd")},),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_exception_of_the_library(kind: type[Exception]) -> None:
    """An error with the node's name, the exception's text, and a hint."""
    error = kind(*ARGUMENTS.get(kind, ("odd",)))
    failure = connect_error(TARGET, error)

    assert failure.message.startswith("gpu02: ")
    assert "10.0.0.12:2222" in failure.message
    assert str(error) in (failure.evidence, failure.message) or "odd" in failure.message
    assert failure.hint


@pytest.mark.parametrize(
    ("error", "text", "hint"),
    [
        (
            OSError(errno.EHOSTUNREACH, "No route to host"),
            "10.0.0.12:2222: No route to host",
            "try",
        ),
        (
            ssh_exception.NoValidConnectionsError(
                {("h", 22): ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")}
            ),
            "cannot connect to 10.0.0.12:2222: Connection refused",
            "`ssh -J bastion gpu02`",
        ),
        (TimeoutError("timed out"), "no answer within 7s", "try"),
        (socket.gaierror(-2, "Name or service not known"), "service not known", "getent hosts"),
        (ConnectionResetError(errno.ECONNRESET, "x"), "closed the connection", "MaxStartups"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/root/k"),
            "cannot use /root/k",
            "ls -l /root/k",
        ),
        (nested(paramiko.SSHException(BANNER), TimeoutError()), "did not finish the login", "try"),
        (nested(paramiko.SSHException(BANNER), EOFError()), "closed the connection", "MaxStartups"),
        (EOFError(), "closed the connection", "MaxStartups"),
        (paramiko.SSHException("No existing session"), "did not finish the login", "try"),
        (
            HostKeyRefused("unknown", "h", KEY, FILE),
            "is not in /nowhere/known_hosts",
            "ssh-keyscan -p 2222 -H",
        ),
        (HostKeyRefused("changed", "[h]:1", KEY, FILE), "has changed", "ssh-keygen -R '[h]:1'"),
        (HostKeyRefused("revoked", "h", KEY, FILE), "@revoked", "new key"),
        (LOCKED, "key /k is encrypted", "ssh-add /k"),
        (KeyUnusable("/k", "does not exist"), "key /k does not exist", "ls -l /k"),
        (LoginRefused(["/k", "agent key x"], [], None), "(tried: /k, agent key x)", "ssh-copy-id"),
        (LoginRefused([], [], None), "no key for", "ssh-add"),
        (LoginRefused([], [LOCKED], None), "/k is", "ssh-add /k"),
        (LoginRefused(["/other"], [LOCKED], None), "/other; key /k is encrypted", "ssh-add /k"),
        (JumpFailed("refused"), "log in to jump host bastion", "ssh ssh://bastion true"),
        (ProxyFailed("x"), "bastion cannot reach 10.0.0.12", "-W [10.0.0.12]:2222 ssh://bastion"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_cause_and_hint(error: BaseException, text: str, hint: str) -> None:
    """Every cause has its message and its command."""
    failure = connect_error(TARGET, error)
    assert text in failure.message
    assert hint in failure.hint


@pytest.mark.parametrize(
    "cause",
    [
        ssh_exception.BadAuthenticationType("Bad authentication type", ["password"]),
        ssh_exception.PartialAuthentication(["password"]),
    ],
    ids=lambda cause: type(cause).__name__,
)
def test_a_server_with_other_requirements(cause: Exception) -> None:
    """The library's message lists them as evidence."""
    failure = connect_error(TARGET, LoginRefused(["/k"], [], cause))
    assert "['password']" in failure.evidence


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConnectionResetError(), True),
        (EOFError(), True),
        (nested(paramiko.SSHException(BANNER), EOFError()), True),
        (nested(paramiko.SSHException(BANNER), TimeoutError()), False),
        (paramiko.AuthenticationException("no"), False),
        (LoginRefused(["/k"], [], None), False),
        (HostKeyRefused("changed", "h", KEY, FILE), False),
        (TimeoutError(), False),
    ],
)
def test_retries(error: BaseException, expected: bool) -> None:
    """Only of dropped connections, never of rejected logins."""
    assert resets(error) is expected
