"""Local nodes for copies, with a folder and a loopback address per node, and real programs."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.app import certificates
from launcher.core.domain import Answer, Node
from launcher.core.events import Event
from launcher.core.transport import Command
from launcher.distribute import chain
from launcher.distribute.coordinator import Connections, CopyResult, MemberSpec, coordinate_copy
from launcher.distribute.node.files import CopyManifest, ManifestFile
from launcher.ssh.background import BackgroundCommand
from launcher.ssh.fleet import Fleet, Line
from tests.ssh import sshd

MB = 10**6
CHUNK, STREAMS = 128 * 1024, 2
SIZES = {
    "model-1.safetensors": 9 * MB + 17,
    "model-2.safetensors": 3 * MB,
    "sub/tokenizer.json": 700,
    "empty": 0,
    "config.json": 20,
}


def make_model(folder: Path, seed: int = 1) -> Path:
    """Write files of random bytes, with old times."""
    source = random.Random(seed)
    for name, size in SIZES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(source.randbytes(size))
        os.utime(path, ns=(0, 1_700_000_000_123_456_789))
    return folder


def rows(folder: Path) -> list[ManifestFile]:
    """Return a folder's files as in a manifest."""
    return [
        ManifestFile(name, (folder / name).stat().st_size, (folder / name).stat().st_mtime_ns)
        for name in SIZES
    ]


def content(folder: Path) -> dict[str, bytes]:
    """Return a model's files by name, without vlaunch's state."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".vlaunch" not in path.parts
    }


def in_memory(path: Path) -> int:
    """Return the number of a file's bytes in the page cache (mincore(2))."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
        resident = (ctypes.c_ubyte * pages)()
        buffer = ctypes.c_char.from_buffer(view)
        assert ctypes.CDLL(None).mincore(ctypes.byref(buffer), ctypes.c_size_t(size), resident) == 0
        del buffer
    return sum(page & 1 for page in resident) * mmap.PAGESIZE


def on_a_disk(path: Path) -> bool:
    """Return whether a file is on a disk; drop it from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)
    return in_memory(path) == 0


@dataclass
class Chain:
    """Nodes below `base`; `n0` is the source, `rate` limits each node's bytes per second."""

    base: Path
    count: int
    rate: int = 0
    roots: dict[str, Path] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in self.names:
            self.roots.setdefault(name, self.base / name / "m")
            self.roots[name].parent.mkdir(parents=True, exist_ok=True)

    @property
    def names(self) -> list[str]:
        """Nodes, the source first."""
        return [f"n{number}" for number in range(self.count)]

    def pid(self, name: str) -> int:
        """Return the process ID of a node's program."""
        return int((self.base / name / "pid").read_text())

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a node's program."""
        os.kill(self.pid(name), how)

    def run(
        self,
        manifest: CopyManifest | None = None,
        *,
        at: Callable[[str, float], None] = lambda name, has: None,
        names: list[str] | None = None,
        links: list[list[str]] | None = None,
        pushes: bool = False,
        **fields: Any,
    ) -> CopyResult:
        """Run a copy; raises like `coordinate_copy`."""
        names = names or self.names
        manifest = manifest or CopyManifest(rows(self.roots[names[0]]), CHUNK)
        nodes = tuple(
            Node(
                name=name,
                host="localhost",
                ip="127.0.0.1",
                gpus=0,
                head=name == names[0],
                connection="local",
            )
            for name in names
        )
        fields = {
            "certificate": certificates.make_certificate("copy"),
            "encrypt": False,
            **fields,
        }
        specs = [
            self._part(name, manifest, names[0], links or [], pushes, fields) for name in names
        ]
        with Fleet(sshd.inventory(*nodes)) as fleet:

            def start(command: Command) -> Any:
                is_local = pushes and command.node == names[0]
                program = fleet.hold_local(command) if is_local else fleet.hold(command)
                return _Watched(command.node, program, manifest.total_bytes, at)

            connections = Connections(
                start=start,
                tunnel=lambda name, port: fleet.forward(name, "127.0.0.1", port).port,
            )
            run = coordinate_copy(specs, connections, total=manifest.total_bytes)
            while True:
                try:
                    event = next(run)
                except StopIteration as ended:
                    return ended.value  # type: ignore[no-any-return]
                self.events.append(event)

    def _part(
        self,
        name: str,
        manifest: CopyManifest,
        source: str,
        links: list[list[str]],
        pushes: bool,
        fields: dict[str, Any],
    ) -> MemberSpec:
        only_pushes = pushes and name == source
        request = chain.copy_request(
            node=name,
            root=str(self.roots[name]),
            manifest=manifest,
            streams=STREAMS,
            listen=None if only_pushes else ("127.0.0.1", 0),
            source=name == source,
            rate=self.rate,
            label="files",
            links=links,
            **fields,
        )
        program_argv = chain.node_runtime(sshd.inventory()).argv
        pid = self.base / name / "pid"
        argv = ("sh", "-c", 'echo $$ > "$1"; shift; exec "$@"', "sh", str(pid), *program_argv)
        command = Command(
            node=name,
            argv=argv,
            timeout=120,
            stdin=lambda: chain.program_input(request),
            hold_stdin=True,
            interactive=True,
        )
        return MemberSpec(name=name, command=command, host="127.0.0.1", pushes=only_pushes)


def when(share: float, action: Callable[[], None]) -> Callable[[str, float], None]:
    """Call a function once, when the last node, `n3`, has this share of all bytes."""
    done: list[float] = []

    def at(name: str, has: float) -> None:
        if not done and name == "n3" and has >= share:
            done.append(has)
            action()

    return at


class _Watched:
    """A program that passes its progress events to a callback."""

    def __init__(
        self, name: str, inner: BackgroundCommand, total: int, at: Callable[[str, float], None]
    ) -> None:
        self._name, self._inner, self._total, self._at = name, inner, total, at

    @property
    def over(self) -> Answer | None:
        return self._inner.over

    def next(self, timeout: float) -> Any:
        message = self._inner.next(timeout)
        if isinstance(message, Line) and '"progress"' in message.text:
            self._at(self._name, json.loads(message.text)["have"] / self._total)
        return message

    def say(self, line: str) -> None:
        self._inner.say(line)

    def end(self) -> None:
        self._inner.end()
