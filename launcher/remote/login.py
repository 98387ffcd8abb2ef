"""Which keys are offered to a server, in which order, loaded once for all nodes.

The keys named for the node come first (from the agent when it holds them), then the agent's others,
then the usual files in `~/.ssh` when none was named. Servers stop listening after a few attempts,
so the order matters.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko.ssh_exception import PasswordRequiredException

_USUAL = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")

AskPassphrase = Callable[[str], "str | None"]


class LoginRefused(paramiko.AuthenticationException):
    """The server took none of the keys; `tried` says which were offered, `locked` which files could
    not be opened.
    """

    def __init__(
        self,
        user: str,
        tried: Sequence[str],
        locked: Sequence[KeyUnusable],
        last: BaseException | None,
    ) -> None:
        super().__init__(str(last) if last else "no key to offer")
        self.user = user
        self.tried = tuple(tried)
        self.locked = tuple(locked)
        self.last = last


class KeyUnusable(paramiko.SSHException):
    """A key file is missing, unreadable, encrypted, or not a key."""

    def __init__(self, path: str, problem: str, *, encrypted: bool = False) -> None:
        super().__init__(f"key {path} {problem}")
        self.path = path
        self.problem = problem
        self.encrypted = encrypted


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What one login may use. `required` files must exist; the others are offered if they do."""

    user: str
    files: tuple[str, ...] = ()
    required: bool = False
    only: bool = False


class Keys:
    """Key files and the agent, shared by all connections of a fleet; asks for each passphrase at
    most once.
    """

    def __init__(self, ask_passphrase: AskPassphrase | None = None) -> None:
        self._ask = ask_passphrase
        self._lock = threading.RLock()
        self._files: dict[str, paramiko.PKey | KeyUnusable] = {}
        self._agent: _Agent | None = None
        self._agent_keys: tuple[paramiko.AgentKey, ...] | None = None

    def login(self, identity: Identity, transport: paramiko.Transport) -> None:
        """Authenticate; raises LoginRefused, KeyUnusable, or what paramiko raises when the
        connection breaks.
        """
        tried: list[str] = []
        locked: list[KeyUnusable] = []
        last: BaseException | None = None
        for name, key in self._candidates(identity, locked):
            tried.append(name)
            try:
                more = transport.auth_publickey(identity.user, key)
            except paramiko.AuthenticationException as error:
                last = error
                if transport.is_active() and not isinstance(error, paramiko.BadAuthenticationType):
                    continue
                break
            if not more:
                return
            last = paramiko.ssh_exception.PartialAuthentication(list(more))
            break
        raise LoginRefused(identity.user, tried, locked, last)

    def close(self) -> None:
        """Let go of the agent."""
        with self._lock:
            if self._agent is not None:
                self._agent.close()
            self._agent = self._agent_keys = None

    def _candidates(
        self, identity: Identity, locked: list[KeyUnusable]
    ) -> Iterator[tuple[str, paramiko.PKey]]:
        """Return the keys to offer, each once, with a name for people; files are opened when it is
        their turn.
        """
        agent = {key.asbytes(): key for key in self._from_agent()}
        offered: set[bytes] = set()
        for name, key in self._in_order(identity, agent, locked):
            if key.asbytes() not in offered:
                offered.add(key.asbytes())
                yield name, key

    def _in_order(
        self,
        identity: Identity,
        agent: dict[bytes, paramiko.AgentKey],
        locked: list[KeyUnusable],
    ) -> Iterator[tuple[str, paramiko.PKey]]:
        for file in identity.files:
            key = self._open(file, agent, identity, locked)
            if key is not None:
                yield (f"{file} (agent)" if isinstance(key, paramiko.AgentKey) else file), key
        if not identity.only:
            for held in agent.values():
                yield f"agent key {held.comment or held.get_name()}", held
        if identity.files:
            return
        for file in _USUAL:
            key = self._open(file, agent, identity, locked)
            if key is not None:
                yield file, key

    def _open(
        self,
        file: str,
        agent: dict[bytes, paramiko.AgentKey],
        identity: Identity,
        locked: list[KeyUnusable],
    ) -> paramiko.PKey | None:
        path = Path(file).expanduser()
        public = _public(path)
        if public in agent:
            return agent[public]
        if not path.exists() and not identity.required:
            return None
        key = self._load(path)
        if not isinstance(key, KeyUnusable):
            return key
        # An agent may still hold another key the server takes; only without one is this the end.
        if identity.required and (not key.encrypted or not agent or identity.only):
            raise key
        locked.append(key)
        return None

    def _load(self, path: Path) -> paramiko.PKey | KeyUnusable:
        with self._lock:
            found = self._files.get(str(path))
            if found is None:
                found = self._files[str(path)] = self._read(path)
            return found

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
        passphrase = self._ask(str(path)) if self._ask is not None else None
        if not passphrase:
            return KeyUnusable(str(path), "is encrypted", encrypted=True)
        try:
            # The library wants bytes here, whatever its annotation says.
            return paramiko.PKey.from_path(path, passphrase.encode())  # type: ignore[arg-type]
        except (paramiko.SSHException, ValueError, TypeError):
            return KeyUnusable(
                str(path), "is encrypted, and this is not its passphrase", encrypted=True
            )

    def _from_agent(self) -> tuple[paramiko.AgentKey, ...]:
        with self._lock:
            if self._agent_keys is None:
                self._agent_keys = ()
                if os.environ.get("SSH_AUTH_SOCK"):
                    try:
                        self._agent = _Agent()
                        self._agent_keys = self._agent.get_keys()
                    except (paramiko.SSHException, OSError):
                        pass  # an agent that does not answer holds no keys
            return self._agent_keys


class _Agent(paramiko.Agent):
    """paramiko's agent client, made safe to share: one question at a time."""

    def __init__(self) -> None:
        self._one_at_a_time = threading.Lock()
        super().__init__()

    def _send_message(self, msg):  # type: ignore[no-untyped-def]
        with self._one_at_a_time:
            return super()._send_message(msg)  # type: ignore[misc]


def _public(path: Path) -> bytes:
    try:
        return paramiko.pkey.PublicBlob.from_file(f"{path}.pub").key_blob
    except (OSError, ValueError):
        return b""
