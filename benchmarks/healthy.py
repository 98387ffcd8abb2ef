"""Healthy servers on lab hosts under what might be taken for a wedge: the longest G, S, each
verdict that was read, red samples and restarts. The last two must be 0.

    python -m benchmarks.healthy [--only CASE …] [--backend ray|mp] [--seconds N] [--beside 0-9]
    [--report]

The supervisor's record is read each second, and `vlaunch status` asked each 20 seconds. Without
`--seconds` a flood takes 10 minutes, and what else lasts takes 3.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import health
from benchmarks.client import Endpoint
from benchmarks.faults import host_faults
from benchmarks.faults.judge import BAD
from benchmarks.faults.practice import API_KEY, Practice
from benchmarks.faults.traffic import Traffic, ask
from benchmarks.flood import Flood
from benchmarks.health import SERVE, Watch
from launcher.lab.render import MODEL

RESULTS = Path(__file__).with_name("faults") / "healthy.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
_ROOM = 200_000  # tokens that a prompt may have
_ENGINE: dict[str, Any] = {
    "hf_overrides": {"max_position_embeddings": _ROOM},
    "max_model_len": _ROOM,
    "kv_cache_memory_bytes": 512 << 20,
}
_STATUS = 20.0  # seconds between two calls of `vlaunch status`
_RATE = "8mbit"
_BUSY = 40  # processes
_FIRST = 60.0  # seconds of the step before the first answer
_HEAD = (
    "a healthy server",
    "backend",
    "seconds",
    "requests, failed",
    "longest G",
    "S",
    "verdicts read",
    "`status`, exit 1",
    "red samples",
    "restarts",
    "load of the machine",
)


@dataclass(slots=True)
class Stage:
    """A case as it goes: the hosts, how long it takes, and what is written down of it."""

    lab: Practice
    inventory: str
    backend: str
    seconds: float
    tokens: int
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> Endpoint:
        """The server's endpoint."""
        return Endpoint(url=f"http://{self.lab.head.ip}:8000/v1", model=MODEL, key=API_KEY)

    def traffic(self, clients: int = 3) -> Traffic:
        """Return clients that ask without a pause."""
        url = self.target.url
        return Traffic(url, API_KEY, MODEL, clients=clients, pause=0.1, timeout=self.seconds + 300)

    def counted(self, traffic: Traffic) -> None:
        """Write down what became of the requests."""
        self.notes["requests"] = len(traffic.samples)
        self.notes["failed"] = sum(not each.ok for each in traffic.samples)

    def post(self, path: str) -> int:
        """Send an empty request to the server, beside its API; returns the status."""
        url = f"http://{self.lab.head.ip}:8000{path}"
        headers = {"Authorization": f"Bearer {API_KEY}"}
        request = urllib.request.Request(url, b"", headers, method="POST")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


# -- Cases -----------------------------------------------------------------------------------------


def _flood(stage: Stage) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a socket a request
    sent = Flood(stage.target, tokens=16)
    asyncio.run(sent.run(1000, stage.seconds))
    stage.notes |= {
        "requests": sent.answered + sent.failed,
        "failed": sent.failed,
        "open": sent.open,
    }


def _prompt(stage: Stage) -> None:
    """Send one long prompt alone: what else arrives waits for it."""
    began = time.monotonic()
    body = {"model": MODEL, "prompt": [7] * stage.tokens, "max_tokens": 2, "ignore_eos": True}
    request = urllib.request.Request(
        f"{stage.target.url}/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {API_KEY}"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=900) as answer:
            failed = not json.loads(answer.read())["usage"]["completion_tokens"]
    except (OSError, ValueError, KeyError) as error:
        failed, stage.notes["error"] = True, str(error)[:200]
    stage.notes |= {
        "requests": 1,
        "failed": int(failed),
        "tokens": stage.tokens,
        "prompt_seconds": round(time.monotonic() - began, 1),
    }


def _busy_host(stage: Stage) -> None:
    words = [sys.executable, "-c", "while True: pass"]
    hogs = [subprocess.Popen(words) for _ in range(_BUSY)]
    try:
        with stage.traffic() as traffic:
            time.sleep(stage.seconds)
            stage.notes["load_then"] = health.load()
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    stage.counted(traffic)


@contextmanager
def _slow_link(stage: Stage) -> Iterator[None]:
    worker = stage.lab.lab.hosts[1]
    host_faults.slow(worker, _RATE)
    try:
        yield
    finally:
        host_faults.unslow(worker)


def _link(stage: Stage) -> None:
    with _slow_link(stage), stage.traffic() as traffic:
        time.sleep(stage.seconds)
    stage.counted(traffic)


def _link_prompt(stage: Stage) -> None:
    with _slow_link(stage):
        _prompt(stage)


def _paused(stage: Stage) -> None:
    with stage.traffic(1) as traffic:
        stage.notes["pause"] = stage.post("/pause?mode=keep")
        time.sleep(stage.seconds)
        stage.notes["resume"] = stage.post("/resume")
        time.sleep(10)
    stage.counted(traffic)


def _asleep(stage: Stage) -> None:
    stage.notes["sleep"] = stage.post("/sleep?level=1")
    time.sleep(stage.seconds)
    stage.notes["wake_up"] = stage.post("/wake_up")
    time.sleep(10)
    answer = ask(stage.target.url, API_KEY, MODEL, 60)
    stage.notes |= {"requests": 1, "failed": int(not answer.ok)}


def _first(stage: Stage) -> None:
    """Nothing to do: the first request was long."""
    stage.notes["first_start"] = stage.lab.record("observed.json").get("first_start")
    answer = ask(stage.target.url, API_KEY, MODEL, 60)
    stage.notes |= {"requests": 1, "failed": int(not answer.ok)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Something that a healthy server meets; `seconds` is how long by default."""

    what: str
    do: Callable[[Stage], None]
    backend: str
    seconds: float = 180.0
    tokens: int = 0
    engine: Mapping[str, Any] = field(default_factory=dict)
    first: bool = False


CASES = {
    "flood": Case(what="1,000 requests at once", do=_flood, backend="ray", seconds=600),
    "prefill": Case(
        what="a prompt that prefills in chunks", do=_prompt, backend="ray", tokens=150_000
    ),
    "step": Case(
        what="a prompt that prefills in one step",
        do=_prompt,
        backend="mp",
        tokens=150_000,
        engine={"max_num_batched_tokens": _ROOM},
    ),
    "load": Case(what=f"{_BUSY} busy processes on the machine", do=_busy_host, backend="ray"),
    "link": Case(what="a link of 8 Mbit/s, three clients", do=_link, backend="mp"),
    "link-prompt": Case(
        what="a link of 8 Mbit/s, a long prompt in one step",
        do=_link_prompt,
        backend="mp",
        tokens=16_000,
        engine={"max_num_batched_tokens": _ROOM},
    ),
    "first": Case(
        what="a first request with a step of 60 s (injected)", do=_first, backend="mp", first=True
    ),
    "paused": Case(what="paused (`/pause`), a request waits", do=_paused, backend="ray"),
    "asleep": Case(
        what="asleep (`/sleep`)", do=_asleep, backend="mp", engine={"enable_sleep_mode": True}
    ),
}


# -- A run -----------------------------------------------------------------------------------------


def run(
    lab: Practice, name: str, case: Case, backend: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Serve, do what the case is, and watch meanwhile; the server is stopped afterwards."""
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    engine = {**_ENGINE, **case.engine}
    # S is kept for servers of the same fingerprint: no case may profit from the one before
    engine["max_model_len"] -= list(CASES).index(name)
    inventory = health.inventory(lab, f"healthy-{name}", env=env, engine=engine)
    health.must(lab, inventory, "up")
    seconds = args.seconds or case.seconds
    stage = Stage(lab, inventory, backend, seconds, args.tokens or case.tokens)
    line: dict[str, Any] = {"case": name, "backend": backend, "seconds": seconds}
    line |= {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "load": health.load()}
    codes: list[int] = []
    over = threading.Event()
    with ExitStack() as stack:
        watch = stack.enter_context(Watch(lab)) if case.first else None
        if case.first:
            for host in lab.lab.hosts:
                health.trigger(host).write_text(f"1 c {min(seconds, _FIRST)}\n")
        health.must(lab, inventory, *SERVE[backend], timeout=900)
        watch = watch or stack.enter_context(Watch(lab))

        def ask_status() -> None:
            while not over.wait(_STATUS):
                codes.append(lab.vlaunch(inventory, "status", timeout=120).code)

        thread = threading.Thread(target=ask_status, daemon=True)
        thread.start()
        time.sleep(5)
        case.do(stage)
        time.sleep(10)
        over.set()
        thread.join(130)
        codes.append(lab.vlaunch(inventory, "status", timeout=120).code)
    looks = [each for each in watch.looks if each.verdict]
    line |= health.summary(looks) | {"statuses": len(codes), "exits": sum(map(bool, codes))}
    line["reasons"] = sorted({each.reason for each in looks if each.verdict in (*BAD, "quiet")})[:5]
    line |= stage.notes | {"load_after": health.load()}
    line["ok"] = not (line["red"] or line["restarts"] or line["faults"] or line["exits"])
    for host in lab.lab.hosts:
        health.trigger(host).unlink(missing_ok=True)
    lab.vlaunch(inventory, "stop", timeout=180)
    return line


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for the last run of each case and backend."""
    rows = health.header(_HEAD)
    last = {(line["case"], line["backend"]): line for line in lines}
    for name, backend in ((name, backend) for name in CASES for backend in SERVE):
        if line := last.get((name, backend)):
            seconds = line.get("prompt_seconds") or line["seconds"]
            told = ", ".join(f"{verdict} {count}" for verdict, count in line["verdicts"].items())
            cells = (
                CASES[name].what,
                backend,
                f"{seconds:.0f}",
                f"{line.get('requests', 0):,}, {line.get('failed', 0)}",
                f"{line['longest_g']:.0f} s",
                f"{line['s']:.1f} s",
                told,
                f"{line['exits']} of {line['statuses']}",
                str(line["red"]),
                str(line["restarts"]),
                f"{line['load']:.0f}–{line['load_after']:.0f}",
            )
            rows.append(health.row(cells))
    return "\n".join(rows)


def main() -> int:
    """Run the cases; the exit code is 1 when a healthy server was called red or was restarted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(CASES), metavar="CASE")
    parser.add_argument("--backend", choices=list(SERVE), help="instead of the case's own")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=0, help="of a long prompt")
    parser.add_argument("--beside", type=int, default=0, choices=range(10), metavar="0-9")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="run nothing; write the table")
    args = parser.parse_args()
    if args.report:
        text = table(health.read_lines(args.results))
        PAGE.write_text(health.between(PAGE.read_text(), "healthy", text))
        return 0
    good = True
    with tempfile.TemporaryDirectory(prefix="healthy-") as temporary:
        lab = health.prepare(args.folder or Path(temporary), args.beside)
        for name in args.only or CASES:
            case = CASES[name]
            line = run(lab, name, case, args.backend or case.backend, args)
            health.append(args.results, line)
            good = good and line["ok"]
            print(json.dumps(line), file=sys.stderr, flush=True)
        lab.vlaunch("real.yaml", "down", timeout=180)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
