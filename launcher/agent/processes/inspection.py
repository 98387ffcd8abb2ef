"""Samples of the ranks of one server on this node: stacks, CPU, context switches, bytes, GPUs, and
reports of NCCL and vLLM's watchdog.

It runs in a thread of its own on the supervisor's orders, and changes nothing: py-spy reads memory
without stopping a process (`--nonblocking`), and no signal is sent. `blame.py` compares samples.
"""

from __future__ import annotations

import contextlib
import glob
import json
import linecache
import os
import re
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ... import upstream
from .. import records
from . import blame, children, process, watchdog
from .blame import NodeSample

EVERY, _SELDOM = 10.0, 30.0  # seconds between two samples: at least, and on a loaded host
PY_SPY = "/opt/vlaunch/py-spy"
_DUMP = 15.0  # seconds for one dump: 0.1, but for a host that is overloaded
_TRIES = 3  # a dump taken while the process works may be unreadable
_SHARE = 0.05  # of the time in which samples may be taken: py-spy uses a core while it runs
_FRAMES = 60
_DUMPS = 3  # files of vLLM's watchdog in one sample
_RANK = re.compile(upstream.text("vllm.rank-title"))
_PLACE = re.compile(r"(DP|TP|PP)(\d+)")
_RAS = ("127.0.0.1", 28028)  # NCCL_RAS_ADDR's default, since NCCL 2.24
_RAS_WAIT = 5  # seconds
# The chapters with problems in NCCL's report (src/ras/client_support.cc).
_CHAPTER = re.compile(r"^(\w[\w ]*)\n=+$", re.MULTILINE)
_PROBLEM_CHAPTERS = ("Errors", "Warnings")
_NVIDIA = (
    "nvidia-smi",
    "--query-gpu=index,utilization.gpu,utilization.memory,power.draw,power.limit",
    "--format=csv,noheader,nounits",
)
_LOAD = ("utilization", "memory", "power_w", "limit_w")  # percent of the time, and watts


@dataclass(frozen=True)
class InspectionTarget:
    """Target of an inspection: an engine's session, Ray's processes for it, and its ranks' GPUs.

    `count` is the number of ranks on this node, `gpus` their GPUs in order (None: all), `argv` the
    engine's command.
    """

    session: int | None
    pids: Collection[int]
    count: int
    gpus: Sequence[int] | None
    argv: Sequence[str]


class Inspection:
    """Sampler of one server's ranks while `tick` gets a target."""

    def __init__(self) -> None:
        self._target: InspectionTarget | None = None
        self.sample: NodeSample | None = None  # the newest
        self._number = 0
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()

    def tick(self, target: InspectionTarget | None) -> None:
        """Start or continue sampling; stop without a target."""
        self._target = target
        if target is None:
            self.sample = None
            self._wake.set()
            return
        self._wake.clear()  # also where the thread has not ended yet: it goes on, with pauses
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (target := self._target) is not None:
            began = time.monotonic()
            self._number += 1
            sample = {"number": self._number, "at": round(began, 1), **take_sample(target)}
            with contextlib.suppress(ValueError):  # a file may have a name that is no text
                parsed = records.parse_record(NodeSample, sample, "inspection")
                self.sample = parsed if self._target is not None else None
            pause = (time.monotonic() - began) / _SHARE
            self._wake.wait(min(max(EVERY, pause), _SELDOM))


def take_sample(target: InspectionTarget) -> dict[str, Any]:
    """Take one sample."""
    processes = list(_processes(target))
    all_gpus = _query_gpus(target)
    dumps = watchdog.list_dumps(target.argv, {rank.pid for rank in processes})
    gpus, helpers = (
        _gpus_by_rank(target, processes, all_gpus),
        _child_ticks({rank.pid for rank in processes}),
    )
    return {
        "bytes": _traffic(),
        "gpus": all_gpus if not gpus and target.count >= len(all_gpus) else [],
        "ranks": [
            {**_sample_rank(rank, gpus.get(rank.pid, [])), "helpers": helpers[rank.pid]}
            for rank in processes
        ],
        "notes": [
            *_query_nccl(),
            *(f"vLLM's watchdog wrote {path[:200]}" for path in dumps[-_DUMPS:]),
        ],
    }


@dataclass(frozen=True)
class _Process:
    """A rank or an engine; `title` is its own process title."""

    pid: int
    title: str
    rank: str
    engine: bool


def _processes(target: InspectionTarget) -> Iterator[_Process]:
    """Yield the ranks and engines on this node; an engine without workers of its own is a rank."""
    titles = {
        pid: process.process_title(pid) for pid in {*target.pids, *_session_pids(target.session)}
    }
    named = {pid: match for pid, title in titles.items() if (match := _RANK.match(title))}
    workers = any(match[1] == "Worker" for match in named.values()) or bool(target.pids)
    for pid in sorted({*named, *target.pids}):
        match = named.get(pid)
        place = dict(_PLACE.findall(match[2])) if match else {}
        rank = " ".join(f"{key}{place[key]}" for key in ("DP", "TP", "PP") if key in place)
        engine = match is not None and match[1] == "EngineCore" and (workers or not target.count)
        if engine:
            rank = f"{blame.ENGINE} {rank}".strip()
        yield _Process(
            pid, titles[pid].strip(), rank or ("" if match is None else "the only rank"), engine
        )


def _session_pids(session: int | None) -> list[int]:
    return [] if session is None else process.session_pids(session)


def _sample_rank(rank: _Process, gpus: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a process and the stack of its working thread, or the reason for a missing one."""
    thread, why = _dump_stack(rank.pid)
    number, frames = int(thread.get("os_thread_id") or rank.pid), thread.get("frames", ())
    return {
        "pid": rank.pid,
        "title": rank.title[:80],
        "rank": rank.rank,
        "engine": rank.engine,
        "frames": blame.inner_frames([_format_frame(frame) for frame in frames])[:_FRAMES],
        "line": _source_line(frames[0]) if frames else "",
        "why": why,
        "thread": number,
        **_thread_counters(rank.pid, number),
        "gpus": gpus,
    }


def _dump_stack(pid: int) -> tuple[Mapping[str, Any], str]:
    """Return the working thread from py-spy's JSON, or an error."""
    program = PY_SPY if os.path.exists(PY_SPY) else "py-spy"  # Ray brings one
    why = ""
    for _ in range(_TRIES):
        code, out = children.run(
            (program, "dump", "--nonblocking", "--json", "--pid", str(pid)), _DUMP
        )
        if code == 127:
            return {}, "py-spy is not in the container: run `vlaunch up` with a package index"
        try:
            threads = json.loads(out[out.index("[") :]) if code == 0 else []
        except ValueError:
            threads = []
        if code == 0 and (thread := _working_thread(threads)):
            return thread, ""
        why = out.strip().splitlines()[0][:200] if code and out.strip() else "unreadable"
        if code == 124:
            break
    return {}, why


def _working_thread(threads: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the thread that does the rank's work: of several, the one that waits least."""
    stacks = [(thread, [_format_frame(frame) for frame in thread["frames"]]) for thread in threads]
    ranked = [
        (blame.classify_stack(frames, _source_line(thread["frames"][0])), thread)
        for thread, frames in stacks
        if blame.is_work_stack(frames)
    ]
    return max(ranked, key=lambda pair: pair[0])[1] if ranked else {}


def _format_frame(frame: Mapping[str, Any]) -> str:
    file = frame.get("short_filename") or frame.get("filename")
    return f"{frame.get('name')} ({file}:{frame.get('line')})"[:160]


def _source_line(frame: Mapping[str, Any]) -> str:
    """Return the source line of a frame."""
    return linecache.getline(str(frame.get("filename")), int(frame.get("line") or 0)).strip()[:120]


def _thread_counters(pid: int, thread: int) -> dict[str, Any]:
    """Return the kernel's counters of a thread; zeros if it is gone."""
    counters: dict[str, Any] = {
        "ticks": 0,
        "voluntary": 0,
        "involuntary": 0,
        "state": "",
        "wchan": "",
    }
    folder = f"/proc/{pid}/task/{thread}"
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = _read_text(f"{folder}/stat").rpartition(")")[2].split()
        counters["state"], counters["ticks"] = fields[0], int(fields[11]) + int(fields[12])
        switches = dict(re.findall(r"(\w+)_ctxt_switches:\s+(\d+)", _read_text(f"{folder}/status")))
        counters["voluntary"] = int(switches["voluntary"])
        counters["involuntary"] = int(switches["nonvoluntary"])
        counters["wchan"] = _read_text(f"{folder}/wchan")[:40]
    return counters


def _child_ticks(pids: Collection[int]) -> dict[int, int]:
    """Return the ticks of every process's children, such as compilers, without other ranks."""
    parents, ticks = dict[int, int](), dict.fromkeys(pids, 0)
    used = dict[int, int]()
    for path in glob.glob("/proc/[0-9]*/stat"):
        with contextlib.suppress(ValueError, IndexError):
            fields = _read_text(path).rpartition(")")[2].split()
            pid = int(path.split("/")[2])
            parents[pid], counts = int(fields[1]), [int(field) for field in fields[11:15]]
            # of a rank only the CPU of its exited children
            used[pid] = sum(counts[2:] if pid in ticks else counts)
    for pid, count in used.items():
        owner = pid
        while owner and owner not in ticks:
            owner = parents.get(owner, 0)
        if owner:
            ticks[owner] += count
    return ticks


def _traffic() -> dict[str, list[int]]:
    """Return bytes received and sent, by network interface and RDMA port."""
    interfaces = {}
    for name, counts in re.findall(
        r"^\s*(\S+?):\s*(.*)$", _read_text("/proc/net/dev"), re.MULTILINE
    ):
        fields = counts.split()
        interfaces[name] = [int(fields[0]), int(fields[8])]
    for port in glob.glob("/sys/class/infiniband/*/ports/*"):
        fields = [
            _read_text(f"{port}/counters/port_{direction}_data").strip()
            for direction in ("rcv", "xmit")
        ]
        if all(field.isdigit() for field in fields):  # in units of four bytes
            interfaces["/".join(port.split("/")[4::2])] = [4 * int(field) for field in fields]
    return interfaces


def _query_gpus(target: InspectionTarget) -> list[dict[str, Any]]:
    """Return the load and power of the ranks' GPUs, if `nvidia-smi` answers."""
    code, out = children.run(_NVIDIA, _DUMP)
    rows = [[field.strip() for field in line.split(",")] for line in out.splitlines()]
    gpus = [
        {"index": int(row[0]), **dict(zip(_LOAD, map(_parse_number, row[1:]), strict=True))}
        for row in rows
        if code == 0 and len(row) == 1 + len(_LOAD) and row[0].isdigit()
    ]
    return [gpu for gpu in gpus if target.gpus is None or gpu["index"] in target.gpus]


def _gpus_by_rank(
    target: InspectionTarget, processes: Sequence[_Process], gpus: Sequence[dict[str, Any]]
) -> dict[int, list[dict[str, Any]]]:
    """Return the GPU of every rank, if known.

    The driver knows processes by other PIDs than a container does. vLLM gives its n-th worker on a
    node the n-th GPU that it may use; Ray gives its ranks GPUs in any order.
    """
    workers = [
        rank.pid for rank in processes if not rank.engine and rank.title.startswith("VLLM::")
    ]
    if target.pids or len(workers) > len(gpus):
        return {}
    return {pid: [gpu] for pid, gpu in zip(workers, gpus, strict=False)}


def _query_nccl() -> list[str]:
    """Return the problems that NCCL's RAS reports, if its library answers."""
    with contextlib.suppress(OSError), socket.create_connection(_RAS, 1) as sock:
        sock.settimeout(_RAS_WAIT + 2)
        with sock.makefile("rw", encoding="utf-8", errors="replace", newline="\n") as stream:
            protocol = f"{upstream.text('nccl.ras-protocol')} 2"
            for command in (protocol, f"TIMEOUT {_RAS_WAIT}"):
                stream.write(f"{command}\n")
                stream.flush()
                if not stream.readline().startswith(("SERVER PROTOCOL", "OK")):
                    return []
            stream.write(f"{upstream.text('nccl.ras-status')}\n")
            stream.flush()
            report = stream.read(1 << 18)
        return [f"NCCL RAS: {line[:200]}" for line in _problem_lines(report)][:20]
    return []


def _problem_lines(report: str) -> list[str]:
    """Return the problem lines of NCCL's report.

    Different numbers of launched operations are usual for a moment: only equal numbers in two
    samples mean that one rank waits for another.
    """
    _, *chapters = _CHAPTER.split(report)
    texts = [
        text
        for name, text in zip(chapters[::2], chapters[1::2], strict=True)
        if name in _PROBLEM_CHAPTERS
    ]
    return [line.strip() for text in texts for line in text.splitlines() if line.strip()]


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None  # `[N/A]`


def _read_text(path: str) -> str:
    """Return the text of a small file; empty if unreadable."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 16)
    except OSError:
        return ""
