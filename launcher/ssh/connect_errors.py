"""Translation of connection failures, including paramiko's exceptions, into ConnectError."""

import socket
from typing import Any

import paramiko
from paramiko import ssh_exception

from launcher.core.errors import ConnectError
from launcher.ssh.known_hosts import HostKeyRefused
from launcher.ssh.login import KeyUnusable, LoginRefused
from launcher.ssh.openssh import JumpFailed, ProxyFailed, Target, jump_argv


def connect_error(target: Target, error: BaseException) -> ConnectError:
    """Return a failure to connect to `target` as a ConnectError with a hint."""
    if isinstance(error, ConnectError):
        return error
    message, hint = _explain(target, error)
    # The message already contains the text of an OSError.
    network = isinstance(error, OSError) and not resets(error)
    evidence = "" if network else str(error).strip() or type(error).__name__
    return ConnectError(
        target.node, message, evidence="" if evidence in message else evidence, hint=hint
    )


def resets(error: BaseException) -> bool:
    """Return True for a connection dropped before the login, as by a busy sshd (MaxStartups),
    which is worth a retry.
    """
    if isinstance(error, (ConnectionResetError, BrokenPipeError, EOFError)):
        return True
    return (
        type(error) is paramiko.SSHException
        and "protocol banner" in str(error)
        and not _timed_out(error)
    )


def _explain(target: Target, error: BaseException) -> tuple[str, str]:
    jump = " ".join(jump_argv(target.jump))
    if isinstance(error, JumpFailed):
        return f"cannot log in to jump host {target.jump}", f"make `ssh {jump} true` work"
    if isinstance(error, ProxyFailed) and target.jump:
        hint = f"ssh -W [{target.host}]:{target.port} {jump}"
        return f"jump host {target.jump} cannot reach {target.address}", hint
    if isinstance(error, ProxyFailed):
        return f"the ProxyCommand for {target.address} failed", f"try `{target.ssh}`"
    if isinstance(error, HostKeyRefused):
        return _host_key(target, error)
    if isinstance(error, KeyUnusable):
        return f"cannot log in to {target.address}: {error}", _key_hint(error)
    if isinstance(error, LoginRefused):
        return _refused(target, error)
    if isinstance(error, OSError) and not resets(error):
        return _network(target, error)
    return _handshake(target, error)


def _host_key(target: Target, error: HostKeyRefused) -> tuple[str, str]:
    if error.verdict == "unknown":
        port = "" if target.port == 22 else f"-p {target.port} "
        scan = f"ssh-keyscan {port}-H {target.host} >> {error.file}"
        return (
            f"the host key of {target.address} is not in {error.file}",
            (
                f"compare the key with the server's own, then `{scan}`, or run again with"
                " `--accept-new-host-keys`"
            ),
        )
    if error.verdict == "revoked":
        return (
            f"the host key of {target.address} is marked @revoked",
            "ask the server's administrator for its new key",
        )
    return (
        f"the host key of {target.address} has changed: another machine may be answering",
        (
            f"if the server was reinstalled: `ssh-keygen -R '{error.name}' -f {error.file}`, then"
            " connect again"
        ),
    )


def _key_hint(error: KeyUnusable) -> str:
    if error.encrypted:
        return f"unlock it: `ssh-add {error.path}`"
    return f"check the file: `ls -l {error.path}`; or set `ssh.identity` in the inventory"


def _refused(target: Target, error: LoginRefused) -> tuple[str, str]:
    login = f"{target.user}@{target.address}"
    hint = (
        f"install your key: `ssh-copy-id {target.user}@{target.host}`; or set `ssh.user` and"
        " `ssh.identity`"
    )
    if error.locked:
        hint = _key_hint(error.locked[0])
    if error.tried:
        tried = ", ".join(error.tried) + "".join(f"; {key}" for key in error.locked)
        return f"{login} rejected the login (tried: {tried})", hint
    if error.locked:
        return f"no usable key for {login}: {error.locked[0]}", hint
    return (
        f"no key for {login}: none is configured, in the SSH agent, or in ~/.ssh",
        "add one to the SSH agent: `ssh-add KEY`",
    )


def _network(target: Target, error: OSError) -> tuple[str, str]:
    hint = f"try `{target.ssh}`"
    if error.filename is not None:
        file = error.filename
        return f"cannot use {file}: {error.strerror}", f"check the file: `ls -l {file}`"
    cause: Any = error
    if isinstance(error, ssh_exception.NoValidConnectionsError):  # one for each of its addresses
        cause = next(iter(error.errors.values()))
    reason = cause.strerror or str(cause)
    if isinstance(cause, socket.gaierror):
        hint = f"check the name: `getent hosts {target.host}`; or set `host:` to an address"
    elif isinstance(cause, TimeoutError) and cause.errno is None:
        reason = f"no answer within {target.timeout:g}s"
    return f"cannot connect to {target.address}: {reason}", hint


def _handshake(target: Target, error: BaseException) -> tuple[str, str]:
    by_hand = f"try `{target.ssh}`"
    if resets(error):
        return (
            f"{target.address} closed the connection before the login",
            f"see MaxStartups in its sshd_config; {by_hand}",
        )
    if _timed_out(error) or "No existing session" in str(error) or "Timeout" in str(error):
        return f"{target.address} did not finish the login within {target.timeout:g}s", by_hand
    return f"the SSH connection to {target.address} failed", by_hand


def _timed_out(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, TimeoutError):
            return True
        error = error.__cause__ or error.__context__
    return False
