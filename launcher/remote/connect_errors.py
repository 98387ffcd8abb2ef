"""Every way a connection can fail, as a sentence and the command that mends it. paramiko's
exceptions stop here.
"""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass

import paramiko
from paramiko import ssh_exception

from launcher.errors import ConnectError
from launcher.remote.hostkeys import HostKeyRefused
from launcher.remote.login import KeyUnusable, LoginRefused


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Who was being called: enough to word an error."""

    node: str
    host: str
    port: int
    user: str
    jump: str = ""
    timeout: float = 10.0

    @property
    def address(self) -> str:
        """`HOST`, or `HOST:PORT` off port 22."""
        return self.host if self.port == 22 else f"{self.host}:{self.port}"

    @property
    def ssh(self) -> str:
        """The ssh command that makes the same connection by hand."""
        port = "" if self.port == 22 else f"-p {self.port} "
        jump = f"-J {self.jump} " if self.jump else ""
        return f"ssh {jump}{port}{self.user}@{self.host}"


class JumpFailed(Exception):
    """The jump host itself could not be used; `error` is its own story."""

    def __init__(self, jump: str, error: ConnectError) -> None:
        super().__init__(str(error))
        self.jump = jump
        self.error = error


def connect_error(target: Target, error: BaseException) -> ConnectError:
    """Return what happened to `target` as a ConnectError with a hint."""
    message, hint = _explain(target, error)
    evidence = str(error).strip() or type(error).__name__
    if isinstance(error, JumpFailed):
        evidence = error.error.evidence
    if isinstance(error, ssh_exception.NoValidConnectionsError):
        evidence = "\n".join(
            f"{address[0]} port {address[1]}: {e}" for address, e in error.errors.items()
        )
    return ConnectError(
        target.node, message, evidence="" if evidence in message else evidence, hint=hint
    )


def resets(error: BaseException) -> bool:
    """True for a connection that was dropped before the login, which a busy sshd does
    (MaxStartups): worth one more try.
    """
    if isinstance(error, (ConnectionResetError, BrokenPipeError, EOFError)):
        return True
    return (
        type(error) is paramiko.SSHException
        and "protocol banner" in str(error)
        and not _timed_out(error)
    )


def _explain(target: Target, error: BaseException) -> tuple[str, str]:
    if isinstance(error, JumpFailed):
        return f"jump host {error.jump}: {error.error.message.partition(': ')[2]}", error.error.hint
    if isinstance(error, HostKeyRefused):
        return _host_key(target, error)
    if isinstance(error, KeyUnusable):
        return f"cannot log in to {target.address}: {error}", _key_hint(error)
    if isinstance(error, paramiko.AuthenticationException):
        return _refused(target, error)
    if isinstance(error, OSError):
        return _network(target, error)
    return _protocol(target, error)


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
            "ask who runs the server for its new key",
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
        return f"ssh-add {error.path}"
    return f"ls -l {error.path}, or set `ssh.identity` in the inventory"


def _refused(target: Target, error: paramiko.AuthenticationException) -> tuple[str, str]:
    where = f"{target.user}@{target.address}"
    if not isinstance(error, LoginRefused):
        return _other_proof(where, error) or (
            f"{where} refused the login (tried: keys)",
            _login_hint(target),
        )
    if error.locked and not error.tried:
        return f"{where} was offered no key: {error.locked[0]}", _key_hint(error.locked[0])
    if told := _other_proof(where, error.last):
        return told
    if not error.tried:
        return (
            f"{where} was offered no key: none is named, held by the agent, or in ~/.ssh",
            "ssh-add KEY",
        )
    tried = ", ".join(error.tried) + "".join(f"; {key}" for key in error.locked)
    return (
        f"{where} refused the login (tried: {tried})",
        _key_hint(error.locked[0]) if error.locked else _login_hint(target),
    )


def _other_proof(where: str, cause: BaseException | None) -> tuple[str, str] | None:
    """Say what is asked for besides a key, or instead of one; None when that is not what is
    wrong.
    """
    if isinstance(cause, ssh_exception.PasswordRequiredException):
        return f"the key for {where} is encrypted", "ssh-add"
    if isinstance(cause, ssh_exception.PartialAuthentication):
        wants = ", ".join(cause.allowed_types)
        return f"{where} asks for a second proof ({wants})", "use a login that needs only a key"
    if isinstance(cause, ssh_exception.BadAuthenticationType):
        allowed = ", ".join(cause.allowed_types)
        return (
            f"{where} does not take keys, only {allowed}",
            "set `PubkeyAuthentication yes` in its sshd_config",
        )
    return None


def _login_hint(target: Target) -> str:
    return (
        f"check the user, then `ssh-copy-id {target.user}@{target.host}`, or set `ssh.user` and"
        " `ssh.identity`"
    )


def _network(target: Target, error: OSError) -> tuple[str, str]:
    via = f" from jump host {target.jump}" if target.jump else ""
    codes = _codes(error)
    if isinstance(error, socket.gaierror):
        return (
            f"the name {target.host} does not resolve{via}",
            f"getent hosts {target.host}; set `host` to an address",
        )
    if errno.ECONNREFUSED in codes:
        return f"nothing listens on {target.address}", f"is sshd running there? Try `{target.ssh}`"
    if codes & {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN}:
        return f"there is no route to {target.address}", f"ip route get {target.host}"
    if isinstance(error, TimeoutError) or errno.ETIMEDOUT in codes:
        hint = f"is it on, and is a firewall in the way? Try `{target.ssh}`"
        return f"{target.address} did not answer within {target.timeout:g}s", hint
    if isinstance(error, (ConnectionResetError, BrokenPipeError)):
        return (
            f"{target.address} dropped the connection",
            f"try `{target.ssh}`, and see sshd's log there",
        )
    if error.filename is not None:
        return f"cannot use {error.filename}: {error.strerror}", f"ls -l {error.filename}"
    return f"cannot connect to {target.address}: {error.strerror or error}", f"try `{target.ssh}`"


def _codes(error: OSError) -> set[int | None]:
    """Return its number; of a host with several addresses, that of each."""
    if isinstance(error, ssh_exception.NoValidConnectionsError):
        return {getattr(each, "errno", None) for each in error.errors.values()}
    return {error.errno}


def _protocol(target: Target, error: BaseException) -> tuple[str, str]:
    if isinstance(error, paramiko.ChannelException):
        cause = "does not allow forwarding" if error.code == 1 else "cannot reach it"
        return (
            f"jump host {target.jump} {cause}: {target.address}",
            f"ssh {target.jump} nc -vz {target.host} {target.port}",
        )
    if isinstance(error, paramiko.BadHostKeyException):
        return f"the host key of {target.address} has changed", f"ssh-keygen -R {target.host}"
    if isinstance(error, ssh_exception.IncompatiblePeer):
        return f"{target.address} shares no algorithm with this client", "update the server's sshd"
    if isinstance(error, paramiko.ProxyCommandFailure):
        return f"the ProxyCommand for {target.address} failed", f"run it by hand: {error.command}"
    if isinstance(error, (paramiko.ConfigParseError, paramiko.CouldNotCanonicalize)):
        return f"the ssh configuration for {target.host} cannot be used", f"ssh -G {target.host}"
    if isinstance(error, ssh_exception.MessageOrderError):
        return (
            (
                f"{target.address} broke the SSH protocol: something may be tampering with the"
                " connection"
            ),
            f"try `{target.ssh}`",
        )
    return _handshake(target, error)


def _handshake(target: Target, error: BaseException) -> tuple[str, str]:
    """Say how far the connection came."""
    by_hand = f"try `{target.ssh}`"
    said = str(error)
    unsaid = isinstance(error, EOFError) or "banner" in said
    if unsaid and not _timed_out(error):
        return (
            f"{target.address} closed the connection before saying SSH",
            f"see MaxStartups in its sshd_config; {by_hand}",
        )
    if unsaid or "No existing session" in said or "Timeout" in said:
        return (
            (
                f"{target.address} accepts connections but did not finish an SSH handshake within"
                f" {target.timeout:g}s"
            ),
            by_hand,
        )
    return f"the SSH connection to {target.address} failed", by_hand


def _timed_out(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, TimeoutError):
            return True
        error = error.__cause__ or error.__context__
    return False
