"""OpenSSH's client on this machine: it reads the configuration and passes jump hosts.

`ssh -G` resolves `~/.ssh/config`; the inventory's values are options of that command, so they win.
`ssh -W` carries a connection through a jump host, with OpenSSH's own keys, agents and questions.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from launcher.core.domain import Node
from launcher.core.errors import ConnectError

Terminal = Callable[[], AbstractContextManager[None]]

_TIMEOUT: Final = 10.0  # seconds, unless the inventory says otherwise (`connect_timeout`)
_CONFIG_TIMEOUT: Final = 30.0  # seconds for `ssh -G`: `Match exec` runs commands
_TYPING: Final = 120.0  # seconds for a login in which the user is asked something
_REMEMBERED: Final = 5.0  # seconds for which a jump host that failed is not tried again

# The login ends with this process: its end closes the input. Ctrl-C is not for the login.
_MASTER: Final = (
    'trap "" INT; exec 3<&0; ssh "$@" </dev/null & p=$!; { read -r x <&3; kill $p; } 2>/dev/null &'
    " wait $p"
)
# Lines without a reason.
_NOISE: Final = re.compile(
    "terminating, .* bad configuration|^Connection closed by UNKNOWN|^kex_exchange_identification"
    "|^stdio forwarding failed|^Host key verification failed|^Warning: |^\\*\\* "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A node's login, as the inventory and the configuration of ssh describe it."""

    node: str
    host: str
    port: int
    user: str
    ssh: str  # the command that makes the same connection
    jump: str = ""  # as `ssh -J` takes it
    proxy: str = ""  # a `ProxyCommand`
    identity: str = ""  # the inventory's key
    keys: tuple[str, ...] = ()  # the configuration's keys, or the usual ones
    only_keys: bool = False
    agent: str = ""  # its socket
    known_hosts: tuple[Path, ...] = ()
    alias: str = ""  # `HostKeyAlias`
    timeout: float = _TIMEOUT

    @property
    def known_as(self) -> str:
        """The name in known_hosts files."""
        return self.alias or (self.host if self.port == 22 else f"[{self.host}]:{self.port}")

    @property
    def address(self) -> str:
        """`HOST`, or `HOST:PORT` for ports other than 22."""
        return self.host if self.port == 22 else f"{self.host}:{self.port}"


def resolve(node: Node) -> Target:
    """Return how to log in to a node; raises ConnectError."""
    ssh = node.ssh
    given = {"-l": ssh.user, "-p": ssh.port, "-J": ssh.jump, "-i": ssh.identity}
    options = [word for flag, value in given.items() if value for word in (flag, str(value))]
    settings: dict[str, list[str]] = {}
    for line in _configuration(node, options).splitlines():
        key, _, value = line.partition(" ")
        settings.setdefault(key, []).append("" if value == "none" else value)

    def first(key: str) -> str:
        return settings.get(key, [""])[0]

    host, port, user = first("hostname"), first("port"), first("user")
    tokens = {"h": host, "n": node.host, "p": port, "r": user, "u": getpass.getuser()}
    tokens |= {"%": "%", "d": str(Path.home())}

    def expand(text: str) -> str:
        return re.sub("%([%hnprud])", lambda token: tokens[token[1]], text)

    agent = first("identityagent") if "identityagent" in settings else "SSH_AUTH_SOCK"
    known = (ssh.known_hosts,) if ssh.known_hosts else first("userknownhostsfile").split()
    return Target(
        node=node.name,
        host=host,
        port=int(port),
        user=user,
        ssh=" ".join(["ssh", *options, node.host]),
        jump=ssh.jump or first("proxyjump"),
        proxy=expand(first("proxycommand")),
        identity=ssh.identity or "",
        keys=tuple(expand(file) for file in settings.get("identityfile", ())),
        only_keys=first("identitiesonly") == "yes",
        agent=os.environ.get("SSH_AUTH_SOCK", "") if agent == "SSH_AUTH_SOCK" else agent,
        known_hosts=tuple(
            Path(file).expanduser() for file in (*known, *first("globalknownhostsfile").split())
        ),
        alias=first("hostkeyalias"),
        timeout=ssh.connect_timeout or _TIMEOUT,
    )


def _configuration(node: Node, options: Sequence[str]) -> str:
    hint, evidence = f"ssh -G {node.host}", ""
    try:
        done = subprocess.run(
            ["ssh", "-G", "-T", *options, "--", node.host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_CONFIG_TIMEOUT,
            check=False,
        )
        if not done.returncode:
            return done.stdout
        message = f"ssh cannot use its configuration for {node.host}"
        evidence = _message(done.stderr) or f"exit status {done.returncode}"
    except FileNotFoundError:
        message = "the program `ssh` is not installed on this machine"
        hint = "sudo apt-get install openssh-client"
    except subprocess.TimeoutExpired:
        message = f"`{hint}`, which runs `Match exec`, timed out after {_CONFIG_TIMEOUT:g}s"
    raise ConnectError(node.name, message, evidence=evidence, hint=hint)


def _message(errors: Path | str) -> str:
    """Return the last line that gives a reason, of a text or of a file."""
    text = errors if isinstance(errors, str) else errors.read_text("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if not _NOISE.search(line)), "".join(lines[-1:]))


class ProxyFailed(Exception):
    """The program that should carry a connection failed; the text is its last line."""


class JumpFailed(Exception):
    """The login to a jump host failed; the text is the last line of ssh."""


class Proxy(socket.socket):
    """A connection that a program carries: the other end is its standard input and output.

    Closing it ends the program. Its standard error goes to the file `errors`.
    """

    def __init__(self, argv: Sequence[str], errors: Path) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(fileno=ours.detach())
        self._errors = errors
        with theirs, errors.open("wb") as file:
            end = theirs.fileno()
            self._process = subprocess.Popen(
                argv, stdin=end, stdout=end, stderr=file, start_new_session=True
            )

    def failure(self) -> ProxyFailed | None:
        """Return the error of a program that failed by itself; the connection is closed."""
        self.close()
        if self._process.returncode in (0, -signal.SIGKILL):
            return None
        return ProxyFailed(_message(self._errors) or f"exit status {self._process.returncode}")

    def close(self) -> None:
        """Close the connection, which ends the program."""
        super().close()
        try:
            self._process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def words(jump: str) -> list[str]:
    """Return the words after `ssh` for the last of the jump hosts."""
    first, _, last = jump.rpartition(",")
    return [*(("-J", first) if first else ()), f"ssh://{last}"]


class JumpHost:
    """One login to a jump host, which all nodes behind it share (`ControlMaster`).

    Args:
        jump: as for `ssh -J`.
        options: further options of ssh.
        path: its control socket; its messages are written beside it.
        ask: a block in which OpenSSH may ask the user; None when that is impossible.
        timeout: seconds for each connection.
    """

    def __init__(
        self, jump: str, options: Sequence[str], path: Path, *, ask: Terminal | None, timeout: float
    ) -> None:
        self.lock = threading.Lock()
        self._path, self._ask, self._there = path, ask, words(jump)
        self._options = [f"-oControlPath={path}", f"-oConnectTimeout={max(1, round(timeout))}"]
        self._options += ["-oServerAliveInterval=15", *options]
        self._deadline = _TYPING if ask else timeout * (2 + jump.count(","))
        self._process: subprocess.Popen[bytes] | None = None
        self._failed: tuple[float, str] = (0.0, "")

    def open(self, target: Target, errors: Path) -> Proxy:
        """Open a connection to a node through the jump host."""
        there = ["-W", f"[{target.host}]:{target.port}", *self._there]
        return Proxy(["ssh", *self._options, "-oBatchMode=yes", *there], errors)

    def login(self) -> None:
        """Log in, unless that is done; raises JumpFailed."""
        if self._process is not None and self._process.poll() is None:
            return
        until, message = self._failed
        if time.monotonic() >= until:
            with self._ask() if self._ask else contextlib.nullcontext():
                message = self._login()
            self._failed = (time.monotonic() + _REMEMBERED if message else 0.0, message)
        if message:
            raise JumpFailed(message)

    def _login(self) -> str:
        """Log in and return "", or the reason why that failed."""
        self.close()
        self._path.unlink(missing_ok=True)
        options = ["-M", "-N", "-oControlPersist=no", "-oClearAllForwardings=yes", *self._options]
        options += [] if self._ask else ["-oBatchMode=yes"]
        errors = self._path.with_suffix(".err")
        with errors.open("wb") as file:
            process = self._process = subprocess.Popen(
                ["sh", "-c", _MASTER, "sh", *options, *self._there],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=file,
                start_new_session=not self._ask,  # without a terminal, no program asks
                env=os.environ | ({} if self._ask else {"SSH_ASKPASS_REQUIRE": "never"}),
            )
        deadline = time.monotonic() + self._deadline
        while process.poll() is None and time.monotonic() < deadline:
            if self._path.exists():
                return ""
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.02)
        late = process.poll() is None
        message = _message(errors)
        self.close()
        if late:
            return message or f"no answer within {self._deadline:g}s"
        return message or f"exit status {process.returncode}"

    def close(self) -> None:
        """Log out."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
