"""SSH implementation of Transport for the nodes of an inventory.

One SSH connection per node carries commands, the Docker API, followed logs and tunnels.
Connections open on first use, or all at once with `connect`. Broken connections are reopened on the
next use, failed ones after a short delay.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from launcher.core.domain import Answer, Inventory
from launcher.core.errors import ConnectError, NodeError
from launcher.core.transport import Command
from launcher.ssh import channel, local
from launcher.ssh.background import BackgroundCommand, BoundedQueue, OnStart, RunningCommands
from launcher.ssh.connect import Connector
from launcher.ssh.openssh import Terminal

if TYPE_CHECKING:
    import docker
    import paramiko

    from launcher.ssh.tunnel import Tunnel


_AHEAD: Final = 1000  # unread lines of followed commands
_POLL: Final = 0.5  # seconds between checks for a reader
_REMEMBERED: Final = 5.0  # seconds for which commands share a failure to connect


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Line printed by a followed command; `error` for standard error."""

    node: str
    text: str
    error: bool = False


class Fleet:
    """Nodes of an inventory; use it in a `with` block, which closes all connections.

    Args:
        inventory: at most `inventory.cap` of its nodes are used at once.
        accept_new_host_keys: add unknown host keys instead of refusing them.
        terminal: context in which the user may be prompted for a passphrase; None without a
            terminal.
        explain: returns the error for a known Docker failure of a node.
    """

    def __init__(
        self,
        inventory: Inventory,
        *,
        accept_new_host_keys: bool = False,
        terminal: Terminal | None = None,
        explain: Callable[[str, str], NodeError | None] | None = None,
    ) -> None:
        self.inventory = inventory
        self._explain = explain
        self._nodes = {node.name: node for node in inventory.nodes}
        self._connector = Connector(accept_new_host_keys=accept_new_host_keys, terminal=terminal)
        self._links = {node.name: _Link() for node in inventory.nodes}
        self._marker = f"vlaunch-{secrets.token_hex(8)}"
        self._closing: list[Callable[[], None]] = []

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def connect(self, nodes: Iterable[str] | None = None) -> dict[str, ConnectError]:
        """Connect to all nodes (or to those named) at once and return the errors by node."""
        names = list(nodes) if nodes is not None else list(self._nodes)
        for name in names:
            self._links[name].failed = None
        with ThreadPoolExecutor(self._width(len(names)), thread_name_prefix="connect") as pool:
            pending = {name: pool.submit(self._remote_transport, name) for name in names}
        errors = {}
        for name, future in pending.items():
            try:
                future.result()
            except ConnectError as error:
                errors[name] = error
        return errors

    def run(self, commands: Sequence[Command]) -> Iterator[Answer]:
        """Run all commands and yield each answer as it arrives; see `Transport.run`."""
        for item in self._work(commands, follow=False):
            if isinstance(item, Answer):
                yield item

    def stream(self, commands: Sequence[Command]) -> Iterator[Line | Answer]:
        """Run all commands; yield each line as it is printed, and an empty answer per command.

        With an infinite timeout, this follows until the caller closes the iterator, which stops the
        commands.
        """
        return self._work(commands, follow=True)

    def hold(self, command: Command) -> BackgroundCommand:
        """Start a command in the background; it runs until `end` is called or the fleet closes."""
        return self._hold(command, local=False)

    def hold_local(self, command: Command) -> BackgroundCommand:
        """Start a command in the background on this machine; `command.node` names it in answers."""
        return self._hold(command, local=True)

    def run_local(self, command: Command) -> Answer:
        """Run a command on this machine; `command.node` names it in answers."""
        return self._run(command, RunningCommands(), on_this_machine=True)

    def docker(self, node: str) -> docker.APIClient:
        """Return the Docker API client of `node`; raises ConnectError or NodeError.

        Wrap its calls in `docker_api.errors(node)` to convert their errors as well.
        """
        # takes half a second to import, and few commands need it
        from launcher.ssh import docker_api  # noqa: PLC0415

        link = self._links[node]
        with link.lock:
            transport = self._remote_transport(node)
            if link.docker is None or link.docker_on is not transport:
                try:
                    link.docker = docker_api.connect(self._nodes[node], transport)
                except docker_api.FAILURES as error:
                    argv = (*self._nodes[node].docker, "version")
                    command = Command(node=node, argv=argv, timeout=docker_api.DIAL_TIMEOUT)
                    answer = self._run(command, RunningCommands())
                    output = "" if answer.ok else answer.tail
                    raise docker_api.node_error(
                        node, error, output, explain=self._explain
                    ) from error
                link.docker_on = transport
            return link.docker  # type: ignore[no-any-return]

    def read_file(self, node: str, container: str, path: str) -> Iterator[bytes]:
        """Yield the content of a regular file in a container; raises ConnectError or NodeError."""
        from launcher.ssh import docker_api  # noqa: PLC0415

        return docker_api.read_file(self.docker(node), node, container, path)

    def forward(self, node: str, host: str, port: int, local_port: int = 0) -> Tunnel:
        """Listen on 127.0.0.1:`local_port` (0: any free one) and carry each connection to
        `host`:`port` as seen from `node`.

        Raises ConnectError, or NodeError when the local port is taken. The tunnel ends with the
        fleet or its own `close`.
        """
        from launcher.ssh.tunnel import Tunnel  # noqa: PLC0415 - rarely needed

        tunnel = Tunnel(node, self._remote_transport(node), host, port, local_port)
        self._closing.append(tunnel.close)
        return tunnel

    def _remote_transport(self, node: str) -> paramiko.Transport | None:
        return None if self._nodes[node].connection == "local" else self.transport(node)

    def transport(self, node: str) -> paramiko.Transport:
        """Return the open SSH connection of `node`, connecting if necessary; raises
        ConnectError.
        """
        link = self._links[node]
        with link.lock:
            if link.connection is not None and link.connection.transport.is_active():
                return link.connection.transport  # type: ignore[no-any-return]
            if link.failed is not None and time.monotonic() < link.failed_until:
                raise link.failed
            if link.connection is not None:
                link.connection.client.close()
                link.connection = None
            try:
                link.connection = self._connector.open(self._nodes[node])
            except ConnectError as error:
                link.failed, link.failed_until = error, time.monotonic() + _REMEMBERED
                raise
            link.failed = None
            return link.connection.transport  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close all connections; running commands are stopped."""
        while self._closing:
            self._closing.pop()()
        for link in self._links.values():
            if link.docker is not None:
                link.docker.close()
                link.docker = None
            if link.connection is not None:
                link.connection.client.close()
                link.connection = None
        self._connector.close()

    def _work(self, commands: Sequence[Command], *, follow: bool) -> Iterator[Line | Answer]:
        per_node: dict[str, list[Command]] = {}
        for command in commands:
            per_node.setdefault(command.node, []).append(command)
        if unknown := per_node.keys() - self._nodes.keys():
            raise KeyError(f"no such node: {', '.join(sorted(unknown))}")
        waiting: queue.SimpleQueue[list[Command]] = queue.SimpleQueue()
        for batch in per_node.values():
            waiting.put(batch)
        answers = _Answers(_AHEAD if follow else 0)
        all_at_once = follow or any(command.simultaneous for command in commands)
        width = len(per_node) if all_at_once else self._width(len(per_node))
        for _ in range(width):
            threading.Thread(
                target=self._worker, args=(waiting, answers, follow), daemon=True
            ).start()
        try:
            pending_count = len(commands)
            while pending_count:
                item = answers.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                pending_count -= isinstance(item, Answer)
        finally:
            answers.running.cancel()

    def _worker(
        self, waiting: queue.SimpleQueue[list[Command]], answers: _Answers, follow: bool
    ) -> None:
        running = answers.running
        try:
            while not running.cancelled:
                for command in waiting.get_nowait():
                    if running.cancelled:
                        return
                    answers.put(self._run(command, running, answers if follow else None))
        except queue.Empty:
            return
        # a bug here must reach the caller, not vanish with the thread
        except BaseException as error:
            answers.put(error)

    def _hold(self, command: Command, *, local: bool) -> BackgroundCommand:
        def run(running: RunningCommands, lines: BoundedQueue, talk: OnStart) -> Answer:
            on_start = talk if command.interactive else None
            return self._run(command, running, lines, on_start, on_this_machine=local)

        background = BackgroundCommand(command.node, run)
        self._closing.append(background.end)
        return background

    def _run(
        self,
        command: Command,
        running: RunningCommands,
        lines: _Answers | BoundedQueue | None = None,
        talk: OnStart | None = None,
        *,
        on_this_machine: bool = False,
    ) -> Answer:
        def put(text: str, error: bool) -> None:
            if lines is not None:
                lines.put(Line(node=command.node, text=text, error=error))

        options: dict[str, Any] = {"marker": self._marker, "running": running, "on_talk": talk}
        options["on_line"] = put if lines is not None else None
        if on_this_machine or self._nodes[command.node].connection == "local":
            return local.run(command, **options)
        try:
            transport = self.transport(command.node)
        except ConnectError as error:
            return Answer(node=command.node, code=255, err=f"{error}\n{error.evidence}".strip())
        return channel.run(transport, command, **options)

    def _width(self, count: int) -> int:
        return max(1, min(count, self.inventory.cap))


class _Answers(queue.Queue[Line | Answer | BaseException]):
    """Queue of worker results; a full queue blocks the workers, to bound memory."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.running = RunningCommands()

    def put(self, item: Line | Answer | BaseException) -> None:  # type: ignore[override]
        """Add an item; dropped after cancellation."""
        while not self.running.cancelled:
            with contextlib.suppress(queue.Full):
                super().put(item, timeout=_POLL)
                return


@dataclass(slots=True)
class _Link:
    """Connection to a node, or the error of the last attempt."""

    lock: Any = field(default_factory=threading.RLock)
    connection: Any = None
    docker: Any = None
    docker_on: Any = None  # the connection used by the Docker API
    failed: ConnectError | None = None
    failed_until: float = 0.0
