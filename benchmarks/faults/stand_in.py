#!/usr/bin/env python3
"""Stands in for `vllm` inside the containers of the fault campaign: the same processes, names,
actors and endpoints, no model.

An API server talks to one engine a replica over TCP, on its own node or on another's. An engine has
its ranks as vLLM has them: one Ray actor each, named as vLLM names them and in a placement group of
GPUs (`ray`), or one process each, which meet at the master's port (`mp`). A completion passes
through every rank and comes back only then. A dead rank ends its engine, a dead engine the server,
with vLLM's lines in the log. Only `vllm serve` exists. Usage: vllm serve MODEL [options]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import SimpleQueue

ENGINE, WORKER = "--stand-in-engine", "--stand-in-worker"
STARTS = float(os.environ.get("STAND_IN_STARTS", "1"))  # seconds that a rank takes to load
MEETS = 600.0  # seconds for processes to find each other


def title(text: str) -> None:
    try:
        import setproctitle

        setproctitle.setproctitle(text)
    except ImportError:
        pass


def say(text: str) -> None:
    print(f"INFO {time.strftime('%m-%d %H:%M:%S')} [stand_in.py] {text}", flush=True)


def options(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--headless", action="store_true")
    for name in ("--master-addr", "--data-parallel-address"):
        parser.add_argument(name, default="127.0.0.1")
    parser.add_argument("--distributed-executor-backend", default="")
    ones = (
        "--tensor-parallel-size",
        "--pipeline-parallel-size",
        "--data-parallel-size",
        "--nnodes",
    )
    zeros = (
        "--node-rank",
        "--master-port",
        "--data-parallel-rpc-port",
        "--data-parallel-start-rank",
    )
    for default, names in (
        (1, ones),
        (0, zeros),
        (8000, ("--port",)),
        (None, ("--data-parallel-size-local",)),
    ):
        for name in names:
            parser.add_argument(name, type=int, default=default)
    args, _ = parser.parse_known_args(words)
    args.world = args.tensor_parallel_size * args.pipeline_parallel_size
    return args


def start(
    role: str, words: list[str], number: int, where: tuple[str, int]
) -> subprocess.Popen[bytes]:
    """Start an engine or a worker of this server; `where` is whom it talks to."""
    return subprocess.Popen(
        [sys.executable, __file__, role, str(number), where[0], str(where[1]), *words]
    )


def connect(where: tuple[str, int]) -> socket.socket:
    """Connect to whom a process talks to, who may not be there yet."""
    deadline = time.monotonic() + MEETS
    while True:
        try:
            return socket.create_connection(where, timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def accept(server: socket.socket, count: int) -> list[Peer]:
    """Wait until so many processes have said that they are ready; return them by their numbers."""
    found = {}
    while len(found) < count:
        sock, _ = server.accept()
        peer = Peer(sock)
        if (number := peer.lines.get()) is None:
            sys.exit("ERROR a process has ended before it was ready")
        found[int(number)] = peer
    return [found[number] for number in sorted(found)]


class Peer:
    """Another process: lines to it and from it. `lines` gets None when it has gone."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        self.sock, self.lines = sock, SimpleQueue[str | None]()
        self.lock, self.gone = threading.Lock(), threading.Event()
        self.waiting: dict[str, threading.Event] = {}
        self.finished = 0
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        try:
            for line in self.sock.makefile():
                if event := self.waiting.pop(line.strip(), None):
                    event.set()
                else:
                    self.lines.put(line.strip())
        except OSError:
            pass
        self.gone.set()
        self.lines.put(None)

    def say(self, text: object) -> None:
        self.sock.sendall(f"{text}\n".encode())

    def ask(self, text: str) -> bool:
        """Say something that will be said back; false when the other one goes before."""
        event = self.waiting[text] = threading.Event()
        try:
            with self.lock:
                self.say(text)
        except OSError:
            return False
        while not event.wait(0.1):
            if self.gone.is_set():
                return False
        self.finished += 1
        return True


# -- Ranks and engines -----------------------------------------------------------------------------


def place(rank: int, args: argparse.Namespace) -> str:
    tp, pp = args.tensor_parallel_size, args.pipeline_parallel_size
    return "".join(
        f"_{name}{at}"
        for name, at, size in (("TP", rank % tp, tp), ("PP", rank // tp, pp))
        if size > 1
    )


def worker(number: int, front: tuple[str, int], args: argparse.Namespace) -> None:
    """Be a rank of `mp`: say back what the engine says, until it goes."""
    title(f"VLLM::Worker{place(number, args)}")
    engine_ = Peer(connect(front))
    say(f"world_size={args.world} rank={number}: Starting to load model")
    time.sleep(STARTS)
    engine_.say(number)
    while (said := engine_.lines.get()) is not None:
        engine_.say(said)


def dead(rank: int) -> None:
    """End the engine when a rank ends, as vLLM's executor does."""
    print(f"ERROR Worker rank={rank} died unexpectedly, shutting down executor.", flush=True)
    print("ERROR EngineCore encountered a fatal error.", flush=True)
    os._exit(1)


def processes(args: argparse.Namespace, words: list[str]):
    """Start this node's ranks of `mp`, and wait for the others'; return how to pass something
    through all.
    """
    server = socket.create_server(("", args.master_port) if args.nnodes > 1 else ("127.0.0.1", 0))
    for number in range(args.world // args.nnodes):
        start(WORKER, words, number, ("127.0.0.1", server.getsockname()[1]))
    ranks = accept(server, args.world)
    for number, rank in enumerate(ranks):
        threading.Thread(
            target=lambda rank=rank, number=number: (rank.gone.wait(), dead(number)), daemon=True
        ).start()

    def step(text: str) -> None:
        for rank in ranks:
            rank.ask(text)

    return step


def actors(args: argparse.Namespace):
    """Start the ranks of `ray`; return how to pass something through all."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="warning")

    @ray.remote(num_cpus=0, num_gpus=1, max_restarts=0)
    class RayWorkerProc:
        def load(self) -> None:
            time.sleep(STARTS)

        def step(self) -> None:
            pass

        def serve(self) -> None:
            threading.Event().wait()

    group = placement_group([{"GPU": 1}] * args.world, strategy="PACK")
    say("Creating a new placement group")
    while not group.wait(10):
        say("Waiting for creating a placement group")
    ranks = []
    for rank in range(args.world):
        where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        name = f"vllm_Worker_{os.getpid():05x}{int(time.time())}{place(rank, args)}"
        ranks.append(
            RayWorkerProc.options(max_concurrency=3, name=name, scheduling_strategy=where).remote()
        )
    say(f"world_size={args.world} rank=0: Starting to load model")
    ray.get([rank.load.remote() for rank in ranks])
    serving = [rank.serve.remote() for rank in ranks]
    threading.Thread(
        target=lambda: dead(serving.index(ray.wait(serving, num_returns=1)[0][0])), daemon=True
    ).start()
    return lambda _: [ray.get(rank.step.remote()) for rank in ranks]


def engine(number: int, front: tuple[str, int], args: argparse.Namespace, words: list[str]) -> None:
    """Hold the ranks of one replica; each number that the front sends goes back when every rank has
    seen it.
    """
    title("VLLM::EngineCore" + (f"_DP{number}" if args.data_parallel_size > 1 else ""))
    peer = Peer(connect(front))
    threading.Thread(target=lambda: (peer.gone.wait(), os._exit(0)), daemon=True).start()
    say("Initializing a V1 LLM engine (stand-in)")
    if args.distributed_executor_backend == "ray":
        step = actors(args)
    elif args.world > 1:
        step = processes(args, words)
    else:
        time.sleep(STARTS)
        step = str
    say("CPU KV cache size: 65,536 tokens, Maximum concurrency for 512 tokens per request: 128.00x")
    peer.say(number)
    while (said := peer.lines.get()) is not None:
        step(said)
        peer.say(said)


def headless(args: argparse.Namespace, words: list[str]) -> None:
    """Be a node without an API: its ranks, or its replicas; all end when one does."""
    if args.data_parallel_size > 1:
        count, first, role = (
            args.data_parallel_size_local or 1,
            args.data_parallel_start_rank,
            ENGINE,
        )
        where = (args.data_parallel_address, args.data_parallel_rpc_port)
    else:
        count = args.world // args.nnodes
        first, role, where = args.node_rank * count, WORKER, (args.master_addr, args.master_port)
    ours = [start(role, words, first + each, where) for each in range(count)]
    while all(each.poll() is None for each in ours):
        time.sleep(0.2)
    for each in ours:
        each.kill()
    sys.exit("ERROR a process of this node has ended; shutting down")


# -- The server ------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """The endpoints that clients and the keeper look at."""

    protocol_version = "HTTP/1.1"
    engines: tuple[Peer, ...] = ()
    asked, lock = 0, threading.Lock()
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
        if (
            not self.key
            or not self.path.startswith("/v1")
            or self.headers.get("Authorization") == f"Bearer {self.key}"
        ):
            return True
        self.reply(401, {"error": "Unauthorized"})
        return False

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply(503 if any(each.gone.is_set() for each in self.engines) else 200, "")
        elif self.path == "/metrics":
            lines = [
                METRICS.format(engine=number, running=len(each.waiting), finished=each.finished)
                for number, each in enumerate(self.engines)
            ]
            self.reply(200, "".join(lines))
        elif self.allowed():
            self.reply(
                200,
                {
                    "object": "list",
                    "data": [{"id": self.model, "object": "model", "max_model_len": 512}],
                },
            )

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or b"{}")
        if not self.allowed():
            return
        with Handler.lock:
            Handler.asked += 1
            number = Handler.asked
        chosen = self.engines[
            int(self.headers.get("X-data-parallel-rank", number)) % len(self.engines)
        ]
        if not chosen.ask(str(number)):
            self.reply(
                500,
                {
                    "error": {
                        "message": "EngineCore encountered an issue.",
                        "type": "EngineDeadError",
                    }
                },
            )
            return
        count = int(asked.get("max_tokens") or 16)
        text = " word" * count
        chat = self.path.endswith("/chat/completions")
        choice = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        usage = {"completion_tokens": count, "prompt_tokens": 1, "total_tokens": count + 1}
        common = {"model": self.model, "usage": usage, "system_fingerprint": "stand-in"}
        self.reply(
            200,
            {
                "id": "cmpl-0",
                "choices": [{"index": 0, "finish_reason": "length", **choice}],
                **common,
            },
        )


METRICS = """\
vllm:num_requests_running{{engine="{engine}"}} {running}
vllm:num_requests_waiting{{engine="{engine}"}} 0
vllm:request_success_total{{engine="{engine}",finished_reason="length"}} {finished}
vllm:cache_config_info{{engine="{engine}",kv_cache_size_tokens="65536",kv_cache_max_concurrency="128.0"}} 1.0
"""  # noqa: E501


def end_with(peer: Peer) -> None:
    """End the server when an engine ends."""
    peer.gone.wait()
    print(
        "ERROR AsyncLLM output_handler failed: EngineDeadError: EngineCore encountered an issue.",
        flush=True,
    )
    time.sleep(1)  # vLLM says 503 for a while before it ends
    os._exit(1)


def serve(args: argparse.Namespace, words: list[str]) -> None:
    say(f"non-default args: {words}")
    several = args.data_parallel_size > 1
    meeting = socket.create_server(
        ("", args.data_parallel_rpc_port) if several else ("127.0.0.1", 0)
    )
    here = (
        args.data_parallel_size_local
        if args.data_parallel_size_local is not None
        else args.data_parallel_size
    )
    ours = [
        start(ENGINE, words, number, ("127.0.0.1", meeting.getsockname()[1]))
        for number in range(here)
    ]

    def watch() -> None:
        while all(each.poll() is None for each in ours):
            time.sleep(0.2)
        if not Handler.engines:
            print(
                "RuntimeError: Engine core initialization failed. See root cause above.", flush=True
            )
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    engines = accept(meeting, args.data_parallel_size)
    Handler.model, Handler.engines = args.model, tuple(engines)
    for each in engines:
        threading.Thread(target=end_with, args=(each,), daemon=True).start()
    say("Starting vLLM server")
    server = ThreadingHTTPServer((args.host, args.port), Handler)
    server.daemon_threads = True
    say("Application startup complete.")
    server.serve_forever()


def main(words: list[str]) -> None:
    if words[:1] in ([ENGINE], [WORKER]):
        role, number, host, port, *rest = words
        where, args = (host, int(port)), options(rest)
        (
            engine(int(number), where, args, rest)
            if role == ENGINE
            else worker(int(number), where, args)
        )
    elif words[:1] == ["serve"]:
        args = options(words[1:])
        headless(args, words[1:]) if args.headless else serve(args, words[1:])
    else:
        sys.exit("vllm: a stand-in that can only `serve`")


if __name__ == "__main__":
    main(sys.argv[1:])
