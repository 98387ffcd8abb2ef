"""OpenSSH's client on this machine, for its configuration and for jump hosts.

`ssh -G` resolves `~/.ssh/config`; the inventory's values are passed as options, so they take
precedence. `ssh -W` tunnels through a jump host with OpenSSH's own keys, agents and prompts.
"""

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
_TYPING: Final = 120.0  # seconds for a login that may prompt the user
_REMEMBERED: Final = 5.0  # seconds before a failed jump host is tried again

# Closing the input, also by the death of this process, ends the login. Ctrl-C must not reach it.
_MASTER: Final = (
    'trap "" INT; exec 3<&0; ssh "$@" </dev/null & p=$!; { read -r x <&3; kill $p; } 2>/dev/null &'
    " wait $p"
)
# Lines that give no reason.
_NOISE: Final = re.compile(
    "terminating, .* bad configuration|^Connection closed by UNKNOWN|^kex_exchange_identification"
    "|^stdio forwarding failed|^Host key verification failed|^Warning: |^\\*\\* "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Login of a node, resolved from the inventory and the ssh configuration."""

    node: str
    host: str
    port: int
    user: str
    ssh: str  # equivalent command line
    jump: str = ""  # as `ssh -J` takes it
    proxy: str = ""  # a `ProxyCommand`
    identity: str = ""  # key from the inventory
    keys: tuple[str, ...] = ()  # keys from the configuration, or OpenSSH's defaults
    only_keys: bool = False
    agent: str = ""  # socket
    known_hosts: tuple[Path, ...] = ()
    alias: str = ""  # `HostKeyAlias`
    timeout: float = _TIMEOUT

    @property
    def host_key_name(self) -> str:
        """Name in known_hosts files."""
        return self.alias or (self.host if self.port == 22 else f"[{self.host}]:{self.port}")

    @property
    def address(self) -> str:
        """`HOST`, or `HOST:PORT` for ports other than 22."""
        return self.host if self.port == 22 else f"{self.host}:{self.port}"


def resolve(node: Node) -> Target:
    """Resolve the login of a node; raises ConnectError."""
    ssh = node.ssh
    overrides = {"-l": ssh.user, "-p": ssh.port, "-J": ssh.jump, "-i": ssh.identity}
    options = [part for flag, value in overrides.items() if value for part in (flag, str(value))]
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
    user_files = (ssh.known_hosts,) if ssh.known_hosts else first("userknownhostsfile").split()
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
            Path(file).expanduser()
            for file in (*user_files, *first("globalknownhostsfile").split())
        ),
        alias=first("hostkeyalias"),
        timeout=ssh.connect_timeout or _TIMEOUT,
    )


def _configuration(node: Node, options: Sequence[str]) -> str:
    hint, evidence = f"ssh -G {node.host}", ""
    try:
        result = subprocess.run(
            ["ssh", "-G", "-T", *options, "--", node.host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_CONFIG_TIMEOUT,
            check=False,
        )
        if not result.returncode:
            return result.stdout
        message = f"ssh cannot use its configuration for {node.host}"
        evidence = _message(result.stderr) or f"exit status {result.returncode}"
    except FileNotFoundError:
        message = "the program `ssh` is not installed on this machine"
        hint = "sudo apt-get install openssh-client"
    except subprocess.TimeoutExpired:
        message = f"`{hint}`, which runs `Match exec`, timed out after {_CONFIG_TIMEOUT:g}s"
    raise ConnectError(node.name, message, evidence=evidence, hint=hint)


def _message(errors: Path | str) -> str:
    """Return the last line that gives a reason, from a text or a file."""
    text = errors if isinstance(errors, str) else errors.read_text("utf-8", "replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if not _NOISE.search(line)), "".join(lines[-1:]))


class ProxyFailed(Exception):
    """Failure of a ProxyCommand or `ssh -W`; the text is its last line."""


class JumpFailed(Exception):
    """Failed login to a jump host; the text is the last line of ssh."""


class Proxy(socket.socket):
    """Socket connected to the standard input and output of a program.

    Closing it ends the program. The file `errors` receives the program's standard error.
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
        """Close the connection and return the error of a program that failed by itself."""
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


def jump_argv(jump: str) -> list[str]:
    """Return the arguments of `ssh` for the last of the jump hosts."""
    earlier, _, last = jump.rpartition(",")
    return [*(("-J", earlier) if earlier else ()), f"ssh://{last}"]


class JumpHost:
    """Login to a jump host, shared by all nodes behind it (`ControlMaster`).

    Args:
        jump: as for `ssh -J`.
        options: further options of ssh.
        path: control socket; messages are written next to it.
        ask: context in which OpenSSH may prompt the user; None without a terminal.
        timeout: seconds per connection.
    """

    def __init__(
        self, jump: str, options: Sequence[str], path: Path, *, ask: Terminal | None, timeout: float
    ) -> None:
        self.lock = threading.Lock()
        self._path, self._ask, self._jump_argv = path, ask, jump_argv(jump)
        self._options = [f"-oControlPath={path}", f"-oConnectTimeout={max(1, round(timeout))}"]
        self._options += ["-oServerAliveInterval=15", *options]
        self._deadline = _TYPING if ask else timeout * (2 + jump.count(","))
        self._process: subprocess.Popen[bytes] | None = None
        self._failed: tuple[float, str] = (0.0, "")

    def open(self, target: Target, errors: Path) -> Proxy:
        """Open a connection to a node through the jump host."""
        forward = ["-W", f"[{target.host}]:{target.port}", *self._jump_argv]
        return Proxy(["ssh", *self._options, "-oBatchMode=yes", *forward], errors)

    def login(self) -> None:
        """Log in if necessary; raises JumpFailed."""
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
        """Log in; return the reason for a failure, else an empty string."""
        self.close()
        self._path.unlink(missing_ok=True)
        options = ["-M", "-N", "-oControlPersist=no", "-oClearAllForwardings=yes", *self._options]
        options += [] if self._ask else ["-oBatchMode=yes"]
        errors = self._path.with_suffix(".err")
        with errors.open("wb") as file:
            process = self._process = subprocess.Popen(
                ["sh", "-c", _MASTER, "sh", *options, *self._jump_argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=file,
                start_new_session=not self._ask,  # without a terminal, no program can prompt
                env=os.environ | ({} if self._ask else {"SSH_ASKPASS_REQUIRE": "never"}),
            )
        deadline = time.monotonic() + self._deadline
        while process.poll() is None and time.monotonic() < deadline:
            if self._path.exists():
                return ""
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.02)
        timed_out = process.poll() is None
        message = _message(errors)
        self.close()
        if timed_out:
            return message or f"no answer within {self._deadline:g}s"
        return message or f"exit status {process.returncode}"

    def close(self) -> None:
        """Log out."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
