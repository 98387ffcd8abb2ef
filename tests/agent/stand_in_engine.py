"""A fake `vllm serve` on one node, scripted by files in a folder.

Usage: stand_in_engine.py FOLDER RANK PORT; rank 0 has the API. Files: `typo` (exit at once), `slow`
(never complete), `broken` (answer completions with 500), `dead` (`/health` too, with 503), `asleep`
(report sleep, answer nothing), `bound` (never complete once another rank has exited), `brittle`
(rank 0 exits once another rank has), `stubborn` (ignore SIGTERM), `child` (start a child that
ignores it), `orphan` (leave a child that exits at once).
"""

from __future__ import annotations

import os
import signal
import sys
import time

FOLDER, RANK, PORT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
PARENT = os.getppid()


def exists(name: str) -> bool:
    """Return whether the folder has a file."""
    return os.path.exists(f"{FOLDER}/{name}")  # noqa: PTH110 - it starts often: pathlib takes long to import


def note(name: str, text: object) -> None:
    """Append a line to a file of the folder."""
    with open(f"{FOLDER}/{name}", "a", encoding="utf-8") as file:  # noqa: PTH123
        file.write(f"{text}\n")


def alone() -> bool:
    """Return whether another rank's process has exited."""
    if not exists("engine1"):
        return False
    with open(f"{FOLDER}/engine0", encoding="utf-8") as lines:  # noqa: PTH123
        starts = len(lines.read().split())
    with open(f"{FOLDER}/engine1", encoding="utf-8") as lines:  # noqa: PTH123
        others = lines.read().split()
    if len(others) < starts:
        return False  # it has not started yet
    last = others[-1]
    try:
        with open(f"/proc/{last}/stat", encoding="utf-8") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def serve() -> None:
    """Answer as vLLM does with a model without a chat template."""
    import json
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    done = [0]

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer for health, models and counters."""
            counters = {
                "generation_tokens_total": done[0],
                "num_requests_running": 2,
                "num_requests_waiting": 1,
            }
            payload = {
                "/health": (503 if exists("dead") else 200, ""),
                "/v1/models": (200, json.dumps({"data": [{"id": "m"}]})),
                "/metrics": (
                    200,
                    "".join(
                        f'vllm:{name}{{engine="0"}} {number}.0\n'
                        for name, number in counters.items()
                    ),
                ),
                "/is_sleeping": (200, json.dumps({"is_sleeping": exists("asleep")})),
            }
            self._say(*payload.get(self.path, (404, "")))

        def do_POST(self) -> None:
            """Answer a completion."""
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/chat/completions":
                return self._say(400, "default chat template is no longer allowed")
            if exists("broken") or exists("dead"):
                return self._say(500, "EngineDeadError" if exists("dead") else "no luck")
            while exists("slow") or exists("asleep") or (exists("bound") and alone()):
                time.sleep(0.02)
            done[0] += 1
            completion = {"choices": [{"text": "x"}], "usage": {"completion_tokens": 1}}
            return self._say(200, json.dumps(completion))

        def _say(self, status: int, text: str) -> None:
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())
            except OSError:
                pass

        def log_message(self, *_: object) -> None:
            """Do not log: only the engine prints."""

    ThreadingHTTPServer.daemon_threads = True
    threading.Thread(
        target=ThreadingHTTPServer(("127.0.0.1", PORT), Api).serve_forever, daemon=True
    ).start()


if exists("typo"):
    sys.exit("ValueError: the model `m0del` does not exist")
if exists("stubborn"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if exists("child"):
    note(f"child{RANK}", os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", "trap '' TERM; exec sleep 60"))
if exists("orphan") and not os.fork():
    if orphan := os.fork():
        note("orphans", orphan)
    os._exit(0)
if RANK == 0:
    serve()
note(f"engine{RANK}", os.getpid())
sys.stdout.write(f"the engine of rank {RANK} runs\n")
sys.stdout.flush()
# As in a container, where the end of the first process is everybody's.
while os.getppid() == PARENT:
    time.sleep(0.02)
    if RANK == 0 and exists("brittle") and alone():
        sys.exit("RuntimeError: Executor failed: another rank has ended")
