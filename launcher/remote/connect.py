"""One SSH connection to one node: Fabric says how (`~/.ssh/config` and the inventory), this module
says how safely.

The inventory wins over `~/.ssh/config`. A jump host is connected to once and shared by every node
behind it; its own key is verified by the same rules. Nothing here runs a command.
"""

from __future__ import annotations

import contextlib
import logging
import random
import shlex
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import paramiko
from fabric.connection import Config, Connection

from launcher.errors import ConnectError
from launcher.model import Node, Ssh
from launcher.remote import ssh_config
from launcher.remote.connect_errors import JumpFailed, Target, connect_error, resets
from launcher.remote.hostkeys import VerifyHostKey
from launcher.remote.known_hosts import KnownHosts
from launcher.remote.login import AskPassphrase, Identity, Keys
from launcher.remote.proxy import ProxySocket

KEEPALIVE: Final = 15  # seconds between keep-alive messages
# milliseconds of unacknowledged data after which Linux gives a connection up
_UNANSWERED: Final = 45_000
_CONNECT_TIMEOUT: Final = 10.0  # seconds; `ssh.connect_timeout` says so, too
_GLOBAL_KNOWN_HOSTS: Final = "/etc/ssh/ssh_known_hosts"

# Its errors reach the user as ConnectError; its own log lines would be printed next to them.
if logging.getLogger("paramiko").level == logging.NOTSET:
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)


class Connector:
    """Opens connections that share one configuration, one set of keys, and one connection per jump
    host.
    """

    def __init__(
        self, *, accept_new_host_keys: bool = False, ask_passphrase: AskPassphrase | None = None
    ) -> None:
        self._accept_new = accept_new_host_keys
        self._keys = Keys(ask_passphrase)
        self._ssh_config = ssh_config.load()
        self._known: dict[tuple[Path, ...], KnownHosts] = {}
        self._jumps: dict[tuple[str, Ssh], _Jump] = {}
        self._lock = threading.Lock()

    def open(self, node: Node) -> Connection:
        """Connect and log in; raises ConnectError."""
        return self._open(node.name, node.host, node.ssh, (node.host,))

    def close(self) -> None:
        """Close the jump hosts' connections and let go of the agent."""
        with self._lock:
            jumps, self._jumps = list(self._jumps.values()), {}
        for jump in jumps:
            if jump.connection is not None:
                jump.connection.client.close()
        self._keys.close()

    def _open(self, name: str, host: str, ssh: Ssh, through: tuple[str, ...]) -> Connection:
        # Fabric empties a connection's configuration for a moment while the connection is made:
        # none is shared.
        config = Config(lazy=True, ssh_config=self._ssh_config)
        connection = Connection(
            host,
            user=ssh.user,
            port=ssh.port,
            config=config,
            gateway=False,
            connect_kwargs={"channel_timeout": 30},
        )
        settings: Mapping[str, Any] = connection.ssh_config
        jump = _jump(ssh, settings, through)
        target = Target(
            node=name,
            host=connection.host,
            port=connection.port,
            user=connection.user,
            jump=jump,
            timeout=ssh.connect_timeout or _CONNECT_TIMEOUT,
        )
        try:
            verify = VerifyHostKey(
                self._known_hosts(ssh, settings),
                accept_new=self._accept_new,
                alias=settings.get("hostkeyalias"),
            )
            for attempt in (1, 2):
                try:
                    return self._attempt(connection, target, verify, ssh, jump, through)
                except Exception as error:
                    connection.client.close()
                    if attempt == 2 or not resets(error):
                        raise
                    # spreads the retries of many nodes
                    time.sleep(random.uniform(0.2, 0.8))  # noqa: S311
        except Exception as error:
            raise connect_error(target, error) from error
        raise AssertionError("not reached")

    def _attempt(
        self,
        connection: Connection,
        target: Target,
        verify: VerifyHostKey,
        ssh: Ssh,
        jump: str,
        through: tuple[str, ...],
    ) -> Connection:
        settings: Mapping[str, Any] = connection.ssh_config
        name = target.host if target.port == 22 else f"[{target.host}]:{target.port}"

        def transport(sock: Any, **options: Any) -> paramiko.Transport:
            made = paramiko.Transport(sock, **options)
            made.handshake_timeout = target.timeout
            verify.prefer(made, name)
            return made

        client = paramiko.SSHClient()
        client.set_missing_host_key_policy(verify)
        connection.client = client
        connection.connect_timeout = target.timeout
        connection.connect_kwargs = {
            "auth_strategy": _Login(self._keys, _identity(target.user, ssh, settings)),
            "transport_factory": transport,
            # before paramiko's own clock for the whole handshake
            "banner_timeout": target.timeout * 0.8,
            "auth_timeout": max(30.0, target.timeout),
            "channel_timeout": 30.0,
            "sock": self._socket(target, ssh, settings, jump, through),
        }
        try:
            connection.open()
        except Exception as error:
            proxy = connection.connect_kwargs["sock"]
            if isinstance(proxy, ProxySocket) and (failure := proxy.failure()) is not None:
                raise failure from error
            raise
        connection.transport.set_keepalive(KEEPALIVE)
        _give_up_early(connection.transport.sock)
        return connection

    def _socket(
        self,
        target: Target,
        ssh: Ssh,
        settings: Mapping[str, Any],
        jump: str,
        through: tuple[str, ...],
    ) -> Any:
        if jump:
            return self._jump_channel(target, ssh, jump, through)
        text = str(settings.get("proxycommand", "none"))
        command = ssh_config.proxy_command(
            text, host=target.host, port=target.port, user=target.user
        )
        return ProxySocket.start(command) if command else None

    def _jump_channel(
        self, target: Target, ssh: Ssh, jump: str, through: tuple[str, ...]
    ) -> paramiko.Channel:
        hops = jump.split(",")
        last = hops[-1].strip()
        user, _, address = last.rpartition("@")
        host, port = _split(address)
        login = Ssh(
            user=user or _configured(self._ssh_config, host, "user") or ssh.user,
            port=port,
            identity=None if _configured(self._ssh_config, host, "identityfile") else ssh.identity,
            jump=",".join(hops[:-1]) or None,
            known_hosts=ssh.known_hosts,
            connect_timeout=ssh.connect_timeout,
        )
        with self._lock:
            shared = self._jumps.setdefault((host, login), _Jump(threading.Lock()))
        with shared.lock:
            if shared.error is not None:
                raise JumpFailed(jump, shared.error)
            if shared.connection is None or not shared.connection.transport.is_active():
                try:
                    shared.connection = self._open(host, host, login, (*through, address))
                except ConnectError as error:
                    shared.error = error
                    raise JumpFailed(jump, error) from error
            transport = shared.connection.transport
        there = (target.host, target.port)
        channel: paramiko.Channel = transport.open_channel(
            "direct-tcpip", there, ("", 0), timeout=target.timeout
        )
        return channel

    def _known_hosts(self, ssh: Ssh, settings: Mapping[str, Any]) -> KnownHosts:
        if ssh.known_hosts:
            names = [ssh.known_hosts]
        else:
            names = shlex.split(
                str(settings.get("userknownhostsfile", "~/.ssh/known_hosts ~/.ssh/known_hosts2"))
            )
        files = tuple(Path(name).expanduser() for name in [*names, _GLOBAL_KNOWN_HOSTS])
        with self._lock:
            if files not in self._known:
                self._known[files] = KnownHosts(files)
            return self._known[files]


@dataclass(slots=True)
class _Jump:
    lock: threading.Lock
    connection: Any = None
    error: ConnectError | None = None


@dataclass(frozen=True, slots=True)
class _Login:
    """The shape paramiko asks for: something with `authenticate`, called when the host key has been
    verified.
    """

    keys: Keys
    identity: Identity

    def authenticate(self, transport: paramiko.Transport) -> None:
        self.keys.login(self.identity, transport)


def _jump(ssh: Ssh, settings: Mapping[str, Any], through: tuple[str, ...]) -> str:
    if ssh.jump:
        return ssh.jump
    jump = str(settings.get("proxyjump", "none"))
    if jump.lower() == "none":
        return ""
    # A wildcard `ProxyJump` in ~/.ssh/config also matches the jump host; ssh(1) does not jump to
    # itself either.
    return "" if jump.rsplit(",", maxsplit=1)[-1].strip().rpartition("@")[2] in through else jump


def _split(address: str) -> tuple[str, int | None]:
    """Split `HOST`, `HOST:PORT` or `[V6]:PORT`."""
    if address.startswith("["):
        host, _, port = address[1:].partition("]")
        port = port.lstrip(":")
    elif address.count(":") == 1:
        host, _, port = address.partition(":")
    else:
        host, port = address, ""
    return host, int(port) if port.isdigit() else None


def _configured(config: paramiko.SSHConfig, host: str, key: str) -> Any:
    return config.lookup(host).get(key)


def _identity(user: str, ssh: Ssh, settings: Mapping[str, Any]) -> Identity:
    files = (ssh.identity,) if ssh.identity else tuple(settings.get("identityfile", ()))
    only = str(settings.get("identitiesonly", "no")).lower() == "yes"
    return Identity(user=user, files=files, required=bool(ssh.identity), only=only)


def _give_up_early(sock: Any) -> None:
    # paramiko sends keep-alives but waits for no answer; the kernel knows when they are not
    # acknowledged.
    if (
        isinstance(sock, socket.socket)
        and sock.family != socket.AF_UNIX
        and hasattr(socket, "TCP_USER_TIMEOUT")
    ):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED)
