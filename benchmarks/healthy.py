"""Healthy servers on lab hosts in situations that resemble a rank that hangs: the longest G, S, the
verdicts read, red samples and restarts. The last two must be 0.

    python -m benchmarks.healthy [--only CASE …] [--backend ray|mp] [--seconds N] [--instance 0-9]
    [--report]

The supervisor's record is read every second, and `vlaunch status` runs every 20 seconds. Without
`--seconds`, the flood takes 10 minutes and other cases that last take 3.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
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
from benchmarks.faults.judge import RED_VERDICTS
from benchmarks.faults.testbed import API_KEY, FaultTestbed
from benchmarks.faults.traffic import Traffic, send_request
from benchmarks.flood import Flood
from benchmarks.health import SERVE, Watch
from launcher.lab.host_configs import MODEL

RESULTS = Path(__file__).with_name("faults") / "healthy.jsonl"
PAGE = Path(__file__).parent / "RESULTS.md"
_CONTEXT = 200_000  # tokens
_ENGINE: dict[str, Any] = {
    "hf_overrides": {"max_position_embeddings": _CONTEXT},
    "max_model_len": _CONTEXT,
    "kv_cache_memory_bytes": 512 << 20,
}
_STATUS = 20.0  # seconds between two runs of `vlaunch status`
_RATE = "8mbit"
_PROCESSES = 40  # of the case with a busy machine
_FIRST_STEP = 60.0  # seconds of the step before the first answer
_COLUMNS = (
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
    """A case that runs: its hosts and parameters, and the notes for its line of results."""

    testbed: FaultTestbed
    inventory: str
    backend: str
    seconds: float
    tokens: int
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> Endpoint:
        """The server's endpoint."""
        return Endpoint(url=f"http://{self.testbed.head.ip}:8000/v1", model=MODEL, key=API_KEY)

    def traffic(self, clients: int = 3) -> Traffic:
        """Return clients that send one short request after the other."""
        url = self.target.url
        return Traffic(url, API_KEY, MODEL, clients=clients, pause=0.1, timeout=self.seconds + 300)

    def note_traffic(self, traffic: Traffic) -> None:
        """Note how many requests were sent, and how many failed."""
        self.notes["requests"] = len(traffic.samples)
        self.notes["failed"] = sum(not sample.ok for sample in traffic.samples)

    def note_answer(self) -> None:
        """Send one request, and note whether it failed."""
        answer = send_request(self.target.url, API_KEY, MODEL, 60)
        self.notes |= {"requests": 1, "failed": int(not answer.ok)}

    def post(self, path: str) -> int:
        """Post an empty request to a path outside `/v1`; return the HTTP status."""
        url = f"http://{self.testbed.head.ip}:8000{path}"
        headers = {"Authorization": f"Bearer {API_KEY}"}
        request = urllib.request.Request(url, b"", headers, method="POST")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code


# -- Cases -----------------------------------------------------------------------------------------


def _send_flood(stage: Stage) -> None:
    _, maximum = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (maximum, maximum))  # one socket per request
    flood = Flood(stage.target, tokens=16)
    asyncio.run(flood.run(1000, stage.seconds))
    stage.notes |= {
        "requests": flood.answered + flood.failed,
        "failed": flood.failed,
        "open": flood.open,
    }


def _send_prompt(stage: Stage) -> None:
    """Send one long prompt and nothing else: other requests would wait for it."""
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


def _load_machine(stage: Stage) -> None:
    argv = [sys.executable, "-c", "while True: pass"]
    hogs = [subprocess.Popen(argv) for _ in range(_PROCESSES)]
    try:
        with stage.traffic() as traffic:
            time.sleep(stage.seconds)
            stage.notes["load_then"] = health.read_load()
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    stage.note_traffic(traffic)


@contextmanager
def _slow_link(stage: Stage) -> Iterator[None]:
    worker = stage.testbed.lab.hosts[1]
    host_faults.limit_rate(worker, _RATE)
    try:
        yield
    finally:
        host_faults.unlimit_rate(worker)


def _slow_traffic(stage: Stage) -> None:
    with _slow_link(stage), stage.traffic() as traffic:
        time.sleep(stage.seconds)
    stage.note_traffic(traffic)


def _slow_prompt(stage: Stage) -> None:
    with _slow_link(stage):
        _send_prompt(stage)


def _pause_server(stage: Stage) -> None:
    with stage.traffic(1) as traffic:
        stage.notes["pause"] = stage.post("/pause?mode=keep")
        time.sleep(stage.seconds)
        stage.notes["resume"] = stage.post("/resume")
        time.sleep(10)
    stage.note_traffic(traffic)


def _put_to_sleep(stage: Stage) -> None:
    stage.notes["sleep"] = stage.post("/sleep?level=1")
    time.sleep(stage.seconds)
    stage.notes["wake_up"] = stage.post("/wake_up")
    time.sleep(10)
    stage.note_answer()


def _read_first_start(stage: Stage) -> None:
    """Note the duration of the first start; its long step is over by now."""
    stage.notes["first_start"] = stage.testbed.record("observed.json").get("first_start")
    stage.note_answer()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A situation of a healthy server, with its defaults for the options of the command line."""

    title: str
    run: Callable[[Stage], None]
    backend: str
    seconds: float = 180.0
    tokens: int = 0  # of a long prompt
    engine: Mapping[str, Any] = field(default_factory=dict)
    first: bool = False  # inject a long step before the first answer


CASES = {
    "flood": Case(title="1,000 requests at once", run=_send_flood, backend="ray", seconds=600),
    "prefill": Case(
        title="a prompt that prefills in chunks", run=_send_prompt, backend="ray", tokens=150_000
    ),
    "step": Case(
        title="a prompt that prefills in one step",
        run=_send_prompt,
        backend="mp",
        tokens=150_000,
        engine={"max_num_batched_tokens": _CONTEXT},
    ),
    "load": Case(
        title=f"{_PROCESSES} busy processes on the machine", run=_load_machine, backend="ray"
    ),
    "link": Case(title="a link of 8 Mbit/s, three clients", run=_slow_traffic, backend="mp"),
    "link-prompt": Case(
        title="a link of 8 Mbit/s, a long prompt in one step",
        run=_slow_prompt,
        backend="mp",
        tokens=16_000,
        engine={"max_num_batched_tokens": _CONTEXT},
    ),
    "first": Case(
        title="a first request with a step of 60 s (injected)",
        run=_read_first_start,
        backend="mp",
        first=True,
    ),
    "paused": Case(title="paused (`/pause`), a request waits", run=_pause_server, backend="ray"),
    "asleep": Case(
        title="asleep (`/sleep`)",
        run=_put_to_sleep,
        backend="mp",
        engine={"enable_sleep_mode": True},
    ),
}


# -- A run -----------------------------------------------------------------------------------------


def run(
    testbed: FaultTestbed, name: str, case: Case, backend: str, args: argparse.Namespace
) -> dict[str, Any]:
    """Serve a model, run a case while the verdicts are read, and stop the server."""
    env = {"VLLM_SERVER_DEV_MODE": "1"}
    engine = {**_ENGINE, **case.engine}
    # S is remembered per engine configuration: a different length keeps cases independent
    engine["max_model_len"] -= list(CASES).index(name)
    inventory = health.write_inventory(testbed, f"healthy-{name}", env=env, engine=engine)
    health.run_command(testbed, inventory, "up")
    seconds = args.seconds or case.seconds
    stage = Stage(testbed, inventory, backend, seconds, args.tokens or case.tokens)
    line: dict[str, Any] = {"case": name, "backend": backend, "seconds": seconds}
    line |= {"at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "load": health.read_load()}
    codes: list[int] = []
    done = threading.Event()
    with ExitStack() as stack:
        watch = stack.enter_context(Watch(testbed)) if case.first else None
        if case.first:
            for host in testbed.lab.hosts:
                health.trigger_file(host).write_text(f"1 c {min(seconds, _FIRST_STEP)}\n")
        health.run_command(testbed, inventory, *SERVE[backend], timeout=900)
        watch = watch or stack.enter_context(Watch(testbed))

        def run_status() -> None:
            while not done.wait(_STATUS):
                codes.append(testbed.vlaunch(inventory, "status", timeout=120).code)

        thread = threading.Thread(target=run_status, daemon=True)
        thread.start()
        time.sleep(5)
        case.run(stage)
        time.sleep(10)
        done.set()
        thread.join(130)
        codes.append(testbed.vlaunch(inventory, "status", timeout=120).code)
    readings = [reading for reading in watch.readings if reading.verdict]
    line |= health.summarize(readings) | {"statuses": len(codes), "exits": sum(map(bool, codes))}
    warnings = [reading for reading in readings if reading.verdict in (*RED_VERDICTS, "quiet")]
    line["reasons"] = sorted({reading.reason for reading in warnings})[:5]
    line |= stage.notes | {"load_after": health.read_load()}
    line["ok"] = not (line["red"] or line["restarts"] or line["faults"] or line["exits"])
    for host in testbed.lab.hosts:
        health.trigger_file(host).unlink(missing_ok=True)
    testbed.vlaunch(inventory, "stop", timeout=180)
    return line


def format_table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for the last run of each case and backend."""
    rows = health.format_header(_COLUMNS)
    last = {(line["case"], line["backend"]): line for line in lines}
    for name, backend in itertools.product(CASES, SERVE):
        if line := last.get((name, backend)):
            seconds = line.get("prompt_seconds") or line["seconds"]
            counts = (f"{verdict} {count}" for verdict, count in line["verdicts"].items())
            cells = (
                CASES[name].title,
                backend,
                f"{seconds:.0f}",
                f"{line.get('requests', 0):,}, {line.get('failed', 0)}",
                f"{line['longest_g']:.0f} s",
                f"{line['s']:.1f} s",
                ", ".join(counts),
                f"{line['exits']} of {line['statuses']}",
                str(line["red"]),
                str(line["restarts"]),
                f"{line['load']:.0f}–{line['load_after']:.0f}",
            )
            rows.append(health.format_row(cells))
    return "\n".join(rows)


def main() -> int:
    """Run the cases; exit with 1 when a healthy server was reported red or was restarted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", choices=list(CASES), metavar="CASE")
    parser.add_argument("--backend", choices=list(SERVE), help="instead of the case's own")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=0, help="of a long prompt")
    parser.add_argument("--instance", type=int, default=0, choices=range(10), metavar="0-9")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--report", action="store_true", help="run nothing; write the table")
    args = parser.parse_args()
    if args.report:
        table = format_table(health.read_lines(args.results))
        PAGE.write_text(health.replace_table(PAGE.read_text(), "healthy", table))
        return 0
    all_good = True
    with tempfile.TemporaryDirectory(prefix="healthy-") as temporary:
        testbed = health.prepare_testbed(args.folder or Path(temporary), args.instance)
        for name in args.only or CASES:
            case = CASES[name]
            line = run(testbed, name, case, args.backend or case.backend, args)
            health.append_line(args.results, line)
            all_good = all_good and line["ok"]
            print(json.dumps(line), file=sys.stderr, flush=True)
        testbed.vlaunch("real.yaml", "down", "--yes", timeout=180)
    return 0 if all_good else 1


if __name__ == "__main__":
    sys.exit(main())
