"""Stands in for `vllm serve` on one node: prints, answers, and misbehaves as files in a folder say.

Usage: stand_in_engine.py FOLDER RANK PORT. Files: `typo` (it ends at once), `hang` (no completion comes back), `busy` (the
engine's counters move), `half` (replica 1 hangs, and the other one's counters move), `broken` (completions are errors),
`stubborn` (it ignores the polite signal), `child` (it has one), `brittle` (rank 0's ends when another one has).
"""

from __future__ import annotations

import os
import signal
import sys
import time

FOLDER, RANK, PORT = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
PARENT = os.getppid()


def there(name: str) -> bool:
    """True when the folder has the file."""
    return os.path.exists(f"{FOLDER}/{name}")  # noqa: PTH110 - it starts often: pathlib takes long to import


def note(name: str, text: object) -> None:
    """Add a line to a file of the folder."""
    with open(f"{FOLDER}/{name}", "a", encoding="utf-8") as file:  # noqa: PTH123
        file.write(f"{text}\n")


def serve() -> None:
    """Answer as vLLM does with a model that cannot chat."""
    import json
    import threading
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    class Api(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Health, models and counters."""
            steps = time.monotonic() if there("busy") or there("half") else 1.0
            counters = {"generation_tokens_total": steps, "num_requests_running": 2.0}
            lines = [f'vllm:{name}{{engine="0"}} {number}\n' for name, number in counters.items()]
            lines.append('vllm:generation_tokens_total{engine="1"} 1.0\n')
            models = json.dumps({"data": [{"id": "m"}]})
            self._say(200, {"/health": "", "/v1/models": models, "/metrics": "".join(lines)}[self.path])

        def do_POST(self) -> None:
            """A completion."""
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/chat/completions":
                return self._say(400, "default chat template is no longer allowed")
            if there("broken"):
                return self._say(500, "EngineDeadError")
            other = self.headers["X-data-parallel-rank"] == "1"
            while there("hang") or (other and there("half")):
                time.sleep(0.02)
            return self._say(200, json.dumps({"choices": [{"text": "x"}]}))

        def _say(self, status: int, text: str) -> None:
            try:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())
            except OSError:
                pass

        def log_message(self, *_: object) -> None:
            """Nothing: only the engine prints."""

    threading.Thread(target=ThreadingHTTPServer(("127.0.0.1", PORT), Api).serve_forever, daemon=True).start()


if there("typo"):
    sys.exit("ValueError: the model `m0del` does not exist")
if there("stubborn"):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if there("child"):
    note(f"child{RANK}", os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60"))
if RANK == 0:
    serve()
note(f"engine{RANK}", os.getpid())
sys.stdout.write(f"the engine of rank {RANK} runs\n")
sys.stdout.flush()
# As in a container, where the end of the first process is everybody's.
while os.getppid() == PARENT:
    time.sleep(0.02)
    if RANK == 0 and there("brittle") and there("engine1"):
        with open(f"{FOLDER}/engine1", encoding="utf-8") as lines:  # noqa: PTH123
            last = lines.read().split()[-1]
        if not os.path.isdir(f"/proc/{last}"):  # noqa: PTH112
            sys.exit("EngineDeadError: another rank has ended")
