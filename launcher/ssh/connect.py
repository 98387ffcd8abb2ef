"""SSH connections to nodes, as OpenSSH's configuration describes them (`openssh.resolve`).

The login to a jump host is shared by all nodes behind it.
"""

import contextlib
import logging
import random
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import paramiko
from fabric.connection import Config, Connection

from launcher.core.domain import Node, Ssh
from launcher.ssh import openssh
from launcher.ssh.connect_errors import connect_error, resets
from launcher.ssh.known_hosts import KnownHosts, VerifyHostKey
from launcher.ssh.login import Keys

KEEPALIVE: Final = 15  # seconds between keep-alive messages
# milliseconds of unacknowledged data after which Linux drops a connection
_UNANSWERED: Final = 45_000

# Errors reach the user as ConnectError; paramiko's log lines would only repeat them.
if logging.getLogger("paramiko").level == logging.NOTSET:
    logging.getLogger("paramiko").setLevel(logging.CRITICAL)


class Connector:
    """Factory of connections that share one set of keys, and one login per jump host.

    Args:
        accept_new_host_keys: add unknown host keys instead of refusing them.
        terminal: context in which the user may be prompted; None without a terminal.
    """

    def __init__(
        self, *, accept_new_host_keys: bool = False, terminal: openssh.Terminal | None = None
    ) -> None:
        self._accept_new = accept_new_host_keys
        self._ask = _serialise_prompts(terminal) if terminal else None
        self._keys = Keys(self._ask)
        self._known_hosts_cache: dict[tuple[Path, ...], KnownHosts] = {}
        self._jumps: dict[tuple[str, ...], openssh.JumpHost] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="vlaunch-")
        self._lock = threading.Lock()

    def open(self, node: Node) -> Connection:
        """Connect and log in; raises ConnectError."""
        target = openssh.resolve(node)
        try:
            try:
                return self._open(target, node.ssh)
            except Exception as error:
                if not resets(error):
                    raise
            time.sleep(random.uniform(0.2, 0.8))  # noqa: S311 - spreads the retries of many nodes
            return self._open(target, node.ssh)
        except Exception as error:
            raise connect_error(target, error) from error

    def close(self) -> None:
        """Log out of jump hosts and close the connections to agents."""
        with self._lock:
            jumps, self._jumps = list(self._jumps.values()), {}
        for jump in jumps:
            jump.close()
        self._keys.close()
        self._folder.cleanup()

    def _open(self, target: openssh.Target, ssh: Ssh) -> Connection:
        verify = VerifyHostKey(
            self._known_hosts(target), target.host_key_name, accept_new=self._accept_new
        )

        def transport(sock: Any, **options: Any) -> paramiko.Transport:
            transport = paramiko.Transport(sock, **options)
            transport.handshake_timeout = target.timeout
            verify.prefer(transport)
            return transport

        proxy = self._proxy(target, ssh)
        connection = Connection(
            target.host,
            user=target.user,
            port=target.port,
            # Not shared: Fabric temporarily empties the configuration while it connects.
            config=Config(lazy=True, ssh_config=paramiko.SSHConfig()),
            gateway=False,
            connect_kwargs={
                # called when the host key has been verified
                "auth_strategy": SimpleNamespace(authenticate=partial(self._keys.login, target)),
                "transport_factory": transport,
                # must expire before paramiko's timeout for the whole handshake
                "banner_timeout": target.timeout * 0.8,
                "auth_timeout": max(30.0, target.timeout),
                "channel_timeout": 30.0,
                "timeout": target.timeout,
                "sock": proxy,
            },
        )
        connection.client.set_missing_host_key_policy(verify)
        try:
            connection.open()
        except Exception as error:
            connection.client.close()
            if proxy is not None and (failure := proxy.failure()):
                raise failure from error
            raise
        connection.transport.set_keepalive(KEEPALIVE)
        _set_user_timeout(connection.transport.sock)
        return connection

    def _proxy(self, target: openssh.Target, ssh: Ssh) -> openssh.Proxy | None:
        """Return the proxy or jump host connection; None for a direct TCP connection."""
        errors = Path(self._folder.name, f"{target.node}.err")
        if not target.jump:
            return openssh.Proxy(["sh", "-c", target.proxy], errors) if target.proxy else None
        options = []
        if ssh.identity:
            options += ["-i", ssh.identity]
        if ssh.known_hosts:
            options += [f'-oUserKnownHostsFile="{ssh.known_hosts}"']
        if self._accept_new:
            options += ["-oStrictHostKeyChecking=accept-new"]
        with self._lock:
            key = (target.jump, *options)
            if key not in self._jumps:
                self._jumps[key] = openssh.JumpHost(
                    target.jump,
                    options,
                    Path(self._folder.name, f"jump{len(self._jumps)}"),
                    ask=self._ask,
                    timeout=target.timeout,
                )
            jump = self._jumps[key]
        with jump.lock:
            jump.login()
        return jump.open(target, errors)

    def _known_hosts(self, target: openssh.Target) -> KnownHosts:
        with self._lock:
            if target.known_hosts not in self._known_hosts_cache:
                self._known_hosts_cache[target.known_hosts] = KnownHosts(target.known_hosts)
            return self._known_hosts_cache[target.known_hosts]


def _serialise_prompts(terminal: openssh.Terminal) -> openssh.Terminal:
    lock = threading.Lock()

    @contextlib.contextmanager
    def ask() -> Iterator[None]:
        with lock, terminal():
            yield

    return ask


def _set_user_timeout(sock: Any) -> None:
    # paramiko sends keep-alives without waiting for replies; the kernel notices missing ACKs.
    if (
        isinstance(sock, socket.socket)
        and sock.family != socket.AF_UNIX
        and hasattr(socket, "TCP_USER_TIMEOUT")
    ):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNANSWERED)
