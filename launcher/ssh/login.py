"""Authentication keys in the order in which servers are offered them, loaded once for all nodes.

The inventory's key comes first, then the agent's (those named by the configuration before the
others), then the key files of the configuration or OpenSSH's defaults. Servers accept only a few
attempts (MaxAuthTries), so the order matters.
"""

import getpass
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import paramiko
from paramiko.agent import AgentKey, AgentSSH
from paramiko.ssh_exception import PartialAuthentication, PasswordRequiredException

from launcher.ssh.openssh import Target, Terminal


class KeyUnusable(paramiko.SSHException):
    """Key file that is missing, unreadable, encrypted, or not a key."""

    def __init__(self, path: str, problem: str, *, encrypted: bool = False) -> None:
        super().__init__(f"key {path} {problem}")
        self.path = path
        self.encrypted = encrypted


class LoginRefused(paramiko.AuthenticationException):
    """Rejection of all keys: `tried` names those offered, `locked` are those not decrypted."""

    def __init__(
        self, tried: Sequence[str], locked: Sequence[KeyUnusable], last: BaseException | None
    ) -> None:
        super().__init__(str(last) if last else "no key to offer")
        self.tried, self.locked, self.last = tuple(tried), tuple(locked), last


class Keys:
    """Key files and agents, shared by all connections; prompts for each passphrase at most once.

    `ask` is a context in which the user may be prompted; None without a terminal.
    """

    def __init__(self, ask: Terminal | None = None) -> None:
        self._ask = ask
        self._lock = threading.RLock()
        self._files: dict[str, paramiko.PKey | KeyUnusable] = {}
        self._agents: dict[str, _Agent] = {}

    def login(self, target: Target, transport: paramiko.Transport) -> None:
        """Authenticate; raises LoginRefused, KeyUnusable, or paramiko's errors for a broken
        connection.
        """
        tried: list[str] = []
        locked: list[KeyUnusable] = []
        last: BaseException | None = None
        for name, key in self._candidates(target, locked):
            tried.append(name)
            try:
                further_methods = transport.auth_publickey(target.user, key)
            except paramiko.AuthenticationException as error:
                last = error
                if transport.is_active() and not isinstance(error, paramiko.BadAuthenticationType):
                    continue
                break
            if not further_methods:
                return
            last = PartialAuthentication(list(further_methods))
            break
        raise LoginRefused(tried, locked, last)

    def close(self) -> None:
        """Close the connections to agents."""
        with self._lock:
            for agent in self._agents.values():
                agent._close()  # type: ignore[attr-defined]
            self._agents.clear()

    def _candidates(
        self, target: Target, locked: list[KeyUnusable]
    ) -> Iterator[tuple[str, paramiko.PKey]]:
        """Yield the keys to offer, with their names; opens each file only when it is needed."""
        agent_keys = {key.asbytes(): key for key in self._from_agent(target.agent)}
        files = (target.identity,) if target.identity else target.keys
        matched_keys = {
            file: agent_keys.pop(_public_key(file))
            for file in files
            if _public_key(file) in agent_keys
        }
        for file, key in matched_keys.items():
            yield f"{file} (agent)", key
        remaining_files = [file for file in files if file not in matched_keys]
        if target.identity:
            yield from self._from_files(remaining_files, locked, required=True)
        if not target.only_keys:
            for key in agent_keys.values():
                yield f"agent key {key.comment or key.get_name()}", key
        if not target.identity:
            yield from self._from_files(remaining_files, locked, required=False)

    def _from_files(
        self, files: Sequence[str], locked: list[KeyUnusable], *, required: bool
    ) -> Iterator[tuple[str, paramiko.PKey]]:
        for file in files:
            path = Path(file).expanduser()
            if not required and not path.exists():
                continue
            with self._lock:
                if file not in self._files:
                    self._files[file] = self._read(path)
            key = self._files[file]
            if not isinstance(key, KeyUnusable):
                yield file, key
            elif required and not key.encrypted:
                raise key
            else:
                locked.append(key)

    def _read(self, path: Path) -> paramiko.PKey | KeyUnusable:
        try:
            return paramiko.PKey.from_path(path)
        except FileNotFoundError:
            return KeyUnusable(str(path), "does not exist")
        except OSError as error:
            return KeyUnusable(str(path), f"cannot be read: {error.strerror}")
        except (PasswordRequiredException, TypeError):
            pass
        except (paramiko.SSHException, ValueError, paramiko.pkey.UnknownKeyType) as error:
            if "password" not in str(error).lower():
                return KeyUnusable(str(path), f"is not a private key: {error}")
        if self._ask is None:
            return KeyUnusable(str(path), "is encrypted", encrypted=True)
        with self._ask():
            passphrase = getpass.getpass(f"Passphrase of {path}: ").encode()
        try:
            # paramiko requires bytes here, despite its annotation.
            return paramiko.PKey.from_path(path, passphrase)  # type: ignore[arg-type]
        except (paramiko.SSHException, ValueError, TypeError):
            return KeyUnusable(
                str(path), "is encrypted, and this is not its passphrase", encrypted=True
            )

    def _from_agent(self, path: str) -> Sequence[AgentKey]:
        """Return the keys of an agent; none when it does not answer."""
        with self._lock:
            if path and path not in self._agents:
                self._agents[path] = _Agent(path)
            return self._agents[path].get_keys() if path else ()


class _Agent(AgentSSH):
    """Thread-safe version of paramiko's agent client, for a given socket."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._message_lock = threading.Lock()
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(path)
            self._connect(connection)  # type: ignore[attr-defined]
        except (paramiko.SSHException, OSError):
            connection.close()

    def _send_message(self, message: Any) -> Any:
        with self._message_lock:
            return super()._send_message(message)  # type: ignore[misc]


def _public_key(file: str) -> bytes:
    try:
        return paramiko.pkey.PublicBlob.from_file(f"{Path(file).expanduser()}.pub").key_blob
    except (OSError, ValueError):
        return b""
