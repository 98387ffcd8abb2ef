#!/usr/bin/env python3
"""Stands in for `vllm` inside the containers of the fault campaign: the same processes, names, actors and endpoints, no model.

An API server starts an engine as a child; the engine reserves a placement group of GPUs and starts one Ray actor a rank, named
as vLLM names them; a completion passes through every rank and comes back only then. A dead rank ends the engine, a dead engine
the server, with vLLM's lines in the log. Only `vllm serve` exists. Usage: vllm serve MODEL [options]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ENGINE = "--stand-in-engine"
STARTS = float(os.environ.get("STAND_IN_STARTS", "1"))  # seconds that a rank takes to load


def title(text: str) -> None:
    try:
        import setproctitle

        setproctitle.setproctitle(text)
    except ImportError:
        pass


def say(text: str) -> None:
    print(f"INFO {time.strftime('%m-%d %H:%M:%S')} [stand_in.py] {text}", flush=True)


# -- The engine --------------------------------------------------------------------------------------------------------------


def engine(tp: int, pp: int, answers: int) -> None:
    """Hold the ranks; each line of standard input is a number that goes to `answers` when every rank has seen it."""
    title("VLLM::EngineCore")
    threading.Thread(target=end_with_server, daemon=True).start()

    def answer(text: str) -> None:
        os.write(answers, f"{text}\n".encode())

    import ray

    say("Initializing a V1 LLM engine (stand-in)")
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="warning")

    @ray.remote(num_cpus=0, num_gpus=1, max_restarts=0)
    class RayWorkerProc:
        def load(self) -> str:
            time.sleep(STARTS)
            return os.uname().nodename

        def step(self, number: int) -> int:
            return number

        def serve(self) -> None:
            threading.Event().wait()

    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    group = placement_group([{"GPU": 1}] * (tp * pp), strategy="PACK")
    say("Creating a new placement group")
    while not group.wait(10):
        say("Waiting for creating a placement group")
    ranks = []
    for rank in range(tp * pp):
        dims = "".join(f"_{name}{at}" for name, at, size in (("TP", rank % tp, tp), ("PP", rank // tp, pp)) if size > 1)
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        options = {"name": f"vllm_Worker_{os.getpid():05x}{int(time.time())}{dims}", "scheduling_strategy": where}
        ranks.append(RayWorkerProc.options(max_concurrency=3, **options).remote())
    say(f"world_size={tp * pp} rank=0: Starting to load model")
    ray.get([rank.load.remote() for rank in ranks])
    say("CPU KV cache size: 65,536 tokens, Maximum concurrency for 512 tokens per request: 128.00x")
    threading.Thread(target=watch, args=(ray, [rank.serve.remote() for rank in ranks]), daemon=True).start()
    answer("ready")
    while True:
        number = int(REQUESTS.get())
        for rank in ranks:
            ray.get(rank.step.remote(number))
        answer(str(number))


def watch(ray: object, serving: list[object]) -> None:
    """End the engine when a rank ends, as vLLM's executor does."""
    done, _ = ray.wait(serving, num_returns=1)  # type: ignore[attr-defined]
    print(f"ERROR RayWorkerProc rank={serving.index(done[0])} died unexpectedly, shutting down executor.", flush=True)
    print("ERROR EngineCore encountered a fatal error.", flush=True)
    os._exit(1)


def end_with_server() -> None:
    for line in sys.stdin:
        REQUESTS.put(line)
    os._exit(0)


# -- The server --------------------------------------------------------------------------------------------------------------


class Engine:
    """The engine as its server sees it: a child, and requests that wait for it."""

    def __init__(self, tp: int, pp: int) -> None:
        read, write = os.pipe()
        argv = [sys.executable, __file__, ENGINE, str(tp), str(pp), str(write)]
        self.process = subprocess.Popen(argv, stdin=subprocess.PIPE, pass_fds=(write,))
        os.close(write)
        self.answers = os.fdopen(read)
        self.lock, self.waiting, self.count, self.finished = threading.Lock(), {}, 0, 0

    def ready(self) -> bool:
        if self.answers.readline().strip() != "ready":
            return False
        threading.Thread(target=self.read, daemon=True).start()
        return True

    def read(self) -> None:
        for line in self.answers:
            self.waiting.pop(int(line)).set()
        with self.lock:
            print("ERROR AsyncLLM output_handler failed: EngineDeadError: EngineCore encountered an issue.", flush=True)
        code = self.process.wait()
        print(f"ERROR Engine core proc died with exit code {code}; shutting the server down", flush=True)
        time.sleep(1)  # vLLM says 503 for a while before it ends
        os._exit(1)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def ask(self) -> bool:
        with self.lock:
            self.count += 1
            event = self.waiting[self.count] = threading.Event()
            try:
                self.process.stdin.write(f"{self.count}\n".encode())
                self.process.stdin.flush()
            except OSError:
                return False
        while not event.wait(0.2):
            if not self.alive:
                return False
        self.finished += 1
        return True


class Handler(BaseHTTPRequestHandler):
    """The endpoints that clients and supervisors look at."""

    protocol_version = "HTTP/1.1"
    engine: Engine
    model = ""
    key = os.environ.get("VLLM_API_KEY", "")

    def log_message(self, format: str, *args: object) -> None:
        pass

    def reply(self, code: int, body: object) -> None:
        text = body if isinstance(body, str) else json.dumps(body)
        self.send_response(code)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def allowed(self) -> bool:
        if not self.key or not self.path.startswith("/v1") or self.headers.get("Authorization") == f"Bearer {self.key}":
            return True
        self.reply(401, {"error": "Unauthorized"})
        return False

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(200 if self.engine.alive else 503, "")
        elif self.path == "/metrics":
            running = len(self.engine.waiting)
            self.reply(200, METRICS.format(running=running, finished=self.engine.finished))
        elif self.allowed():
            self.reply(200, {"object": "list", "data": [{"id": self.model, "object": "model", "max_model_len": 512}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or b"{}")
        if not self.allowed():
            return
        if not self.engine.ask():
            self.reply(500, {"error": {"message": "EngineCore encountered an issue.", "type": "EngineDeadError"}})
            return
        count = int(asked.get("max_tokens") or 16)
        text = " word" * count
        chat = self.path.endswith("/chat/completions")
        choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        usage = {"completion_tokens": count, "prompt_tokens": 1, "total_tokens": count + 1}
        common = {"model": self.model, "usage": usage, "system_fingerprint": "stand-in"}
        self.reply(200, {"id": "cmpl-0", "choices": [{"index": 0, "finish_reason": "length", **choice}], **common})


METRICS = """\
vllm:num_requests_running{{engine="0"}} {running}
vllm:num_requests_waiting{{engine="0"}} 0
vllm:request_success_total{{engine="0",finished_reason="length"}} {finished}
vllm:cache_config_info{{engine="0",kv_cache_size_tokens="65536",kv_cache_max_concurrency="128.0"}} 1.0
"""


def serve(words: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=8000)
    args, _ = parser.parse_known_args(words)
    title("VLLM::APIServer")
    say(f"non-default args: {words}")
    Handler.model, Handler.engine = args.model, Engine(args.tensor_parallel_size, args.pipeline_parallel_size)
    if not Handler.engine.ready():
        sys.exit("RuntimeError: Engine core initialization failed. See root cause above.")
    say("Starting vLLM server")
    server = ThreadingHTTPServer((args.host, args.port), Handler)
    server.daemon_threads = True
    say("Application startup complete.")
    server.serve_forever()


if __name__ == "__main__":
    if sys.argv[1:2] == [ENGINE]:
        from queue import SimpleQueue

        REQUESTS: SimpleQueue[str] = SimpleQueue()
        engine(*map(int, sys.argv[2:5]))
    elif sys.argv[1:2] == ["serve"]:
        serve(sys.argv[2:])
    else:
        sys.exit("vllm: a stand-in that can only `serve`")
