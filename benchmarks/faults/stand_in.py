#!/usr/bin/env python3
"""Stand-in for `vllm` in the containers of the fault campaign: the same processes, names, actors
and endpoints, without a model.

An API server talks to one engine per replica over TCP, on its own node or on another's. An engine
has its ranks as vLLM has them: one Ray actor each, with vLLM's names and in a placement group of
GPUs (`ray`), or one process each, which meet at the master's port (`mp`). A completion passes
through every rank. A dead rank ends its engine, a dead engine the server, with vLLM's lines in the
log. Only `vllm serve` exists. Usage: vllm serve MODEL [options]
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
STARTS = float(os.environ.get("STAND_IN_STARTS", "1"))  # seconds to load a rank
MEETS = 600.0  # seconds to connect to another process


def set_title(text: str) -> None:
    try:
        import setproctitle

        setproctitle.setproctitle(text)
    except ImportError:
        pass


def log(text: str) -> None:
    print(f"INFO {time.strftime('%m-%d %H:%M:%S')} [stand_in.py] {text}", flush=True)


def parse_options(argv: list[str]) -> argparse.Namespace:
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
    args, _ = parser.parse_known_args(argv)
    args.world = args.tensor_parallel_size * args.pipeline_parallel_size
    return args


def start(
    role: str, argv: list[str], number: int, address: tuple[str, int]
) -> subprocess.Popen[bytes]:
    """Start an engine or a worker of this server, which connects to `address`."""
    return subprocess.Popen(
        [sys.executable, __file__, role, str(number), address[0], str(address[1]), *argv]
    )


def connect(address: tuple[str, int]) -> socket.socket:
    """Connect to a process that may not be ready."""
    deadline = time.monotonic() + MEETS
    while True:
        try:
            return socket.create_connection(address, timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def accept_peers(server: socket.socket, count: int) -> list[Peer]:
    """Wait until `count` processes are ready; return them by number."""
    peers = {}
    while len(peers) < count:
        sock, _ = server.accept()
        peer = Peer(sock)
        if (number := peer.lines.get()) is None:
            sys.exit("ERROR a process has ended before it was ready")
        peers[int(number)] = peer
    return [peers[number] for number in sorted(peers)]


class Peer:
    """A connection to another process. `lines` ends with None when it exits."""

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

    def send(self, text: object) -> None:
        self.sock.sendall(f"{text}\n".encode())

    def echo(self, text: str) -> bool:
        """Send a line and wait for its echo; return False when the peer exits first."""
        event = self.waiting[text] = threading.Event()
        try:
            with self.lock:
                self.send(text)
        except OSError:
            return False
        while not event.wait(0.1):
            if self.gone.is_set():
                return False
        self.finished += 1
        return True


# -- Ranks and engines -----------------------------------------------------------------------------


def rank_suffix(rank: int, args: argparse.Namespace) -> str:
    tp, pp = args.tensor_parallel_size, args.pipeline_parallel_size
    return "".join(
        f"_{name}{at}"
        for name, at, size in (("TP", rank % tp, tp), ("PP", rank // tp, pp))
        if size > 1
    )


def run_worker(number: int, address: tuple[str, int], args: argparse.Namespace) -> None:
    """Run a rank of `mp`: echo the engine's lines until the engine exits."""
    set_title(f"VLLM::Worker{rank_suffix(number, args)}")
    engine = Peer(connect(address))
    log(f"world_size={args.world} rank={number}: Starting to load model")
    time.sleep(STARTS)
    engine.send(number)
    while (line := engine.lines.get()) is not None:
        engine.send(line)


def exit_engine(rank: int) -> None:
    """Exit the engine when a rank exits, as vLLM's executor does."""
    print(f"ERROR Worker rank={rank} died unexpectedly, shutting down executor.", flush=True)
    print("ERROR EngineCore encountered a fatal error.", flush=True)
    os._exit(1)


def start_processes(args: argparse.Namespace, argv: list[str]):
    """Start this node's ranks of `mp` and wait for the others'; return a function that sends a line
    through all.
    """
    server = socket.create_server(("", args.master_port) if args.nnodes > 1 else ("127.0.0.1", 0))
    for number in range(args.world // args.nnodes):
        start(WORKER, argv, number, ("127.0.0.1", server.getsockname()[1]))
    ranks = accept_peers(server, args.world)
    for number, rank in enumerate(ranks):
        threading.Thread(
            target=lambda rank=rank, number=number: (rank.gone.wait(), exit_engine(number)),
            daemon=True,
        ).start()

    def step(text: str) -> None:
        for rank in ranks:
            rank.echo(text)

    return step


def start_actors(args: argparse.Namespace):
    """Start the ranks of `ray`; return a function that sends a line through all."""
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
    log("Creating a new placement group")
    while not group.wait(10):
        log("Waiting for creating a placement group")
    ranks = []
    for rank in range(args.world):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        name = f"vllm_Worker_{os.getpid():05x}{int(time.time())}{rank_suffix(rank, args)}"
        ranks.append(
            RayWorkerProc.options(
                max_concurrency=3, name=name, scheduling_strategy=strategy
            ).remote()
        )
    log(f"world_size={args.world} rank=0: Starting to load model")
    ray.get([rank.load.remote() for rank in ranks])
    serving = [rank.serve.remote() for rank in ranks]
    threading.Thread(
        target=lambda: exit_engine(serving.index(ray.wait(serving, num_returns=1)[0][0])),
        daemon=True,
    ).start()
    return lambda _: [ray.get(rank.step.remote()) for rank in ranks]


def run_engine(
    number: int, address: tuple[str, int], args: argparse.Namespace, argv: list[str]
) -> None:
    """Run the ranks of one replica; echo each number of the front end after every rank."""
    set_title("VLLM::EngineCore" + (f"_DP{number}" if args.data_parallel_size > 1 else ""))
    peer = Peer(connect(address))
    threading.Thread(target=lambda: (peer.gone.wait(), os._exit(0)), daemon=True).start()
    log("Initializing a V1 LLM engine (stand-in)")
    if args.distributed_executor_backend == "ray":
        step = start_actors(args)
    elif args.world > 1:
        step = start_processes(args, argv)
    else:
        time.sleep(STARTS)
        step = str
    log("CPU KV cache size: 65,536 tokens, Maximum concurrency for 512 tokens per request: 128.00x")
    peer.send(number)
    while (line := peer.lines.get()) is not None:
        step(line)
        peer.send(line)


def run_headless(args: argparse.Namespace, argv: list[str]) -> None:
    """Run a node without an API: its ranks or its replicas; all exit when one does."""
    if args.data_parallel_size > 1:
        count, first, role = (
            args.data_parallel_size_local or 1,
            args.data_parallel_start_rank,
            ENGINE,
        )
        address = (args.data_parallel_address, args.data_parallel_rpc_port)
    else:
        count = args.world // args.nnodes
        first, role, address = args.node_rank * count, WORKER, (args.master_addr, args.master_port)
    children = [start(role, argv, first + process, address) for process in range(count)]
    while all(process.poll() is None for process in children):
        time.sleep(0.2)
    for process in children:
        process.kill()
    sys.exit("ERROR a process of this node has ended; shutting down")


# -- The server ------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """The endpoints that clients and the supervisor use."""

    protocol_version = "HTTP/1.1"
    engines: tuple[Peer, ...] = ()
    request_count, lock = 0, threading.Lock()
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

    def is_authorized(self) -> bool:
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
            self.reply(503 if any(engine.gone.is_set() for engine in self.engines) else 200, "")
        elif self.path == "/metrics":
            lines = [
                METRICS.format(engine=number, running=len(engine.waiting), finished=engine.finished)
                for number, engine in enumerate(self.engines)
            ]
            self.reply(200, "".join(lines))
        elif self.is_authorized():
            self.reply(
                200,
                {
                    "object": "list",
                    "data": [{"id": self.model, "object": "model", "max_model_len": 512}],
                },
            )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", "0"))) or b"{}")
        if not self.is_authorized():
            return
        with Handler.lock:
            Handler.request_count += 1
            number = Handler.request_count
        chosen = self.engines[
            int(self.headers.get("X-data-parallel-rank", number)) % len(self.engines)
        ]
        if not chosen.echo(str(number)):
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
        count = int(body.get("max_tokens") or 16)
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


def exit_with(peer: Peer) -> None:
    """Exit the server when an engine exits."""
    peer.gone.wait()
    print(
        "ERROR AsyncLLM output_handler failed: EngineDeadError: EngineCore encountered an issue.",
        flush=True,
    )
    time.sleep(1)  # vLLM answers 503 for a while before it exits
    os._exit(1)


def run_server(args: argparse.Namespace, argv: list[str]) -> None:
    log(f"non-default args: {argv}")
    is_parallel = args.data_parallel_size > 1
    listener = socket.create_server(
        ("", args.data_parallel_rpc_port) if is_parallel else ("127.0.0.1", 0)
    )
    local_count = (
        args.data_parallel_size_local
        if args.data_parallel_size_local is not None
        else args.data_parallel_size
    )
    children = [
        start(ENGINE, argv, number, ("127.0.0.1", listener.getsockname()[1]))
        for number in range(local_count)
    ]

    def watch() -> None:
        while all(engine.poll() is None for engine in children):
            time.sleep(0.2)
        if not Handler.engines:
            print(
                "RuntimeError: Engine core initialization failed. See root cause above.", flush=True
            )
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    engines = accept_peers(listener, args.data_parallel_size)
    Handler.model, Handler.engines = args.model, tuple(engines)
    for engine in engines:
        threading.Thread(target=exit_with, args=(engine,), daemon=True).start()
    log("Starting vLLM server")
    server = ThreadingHTTPServer((args.host, args.port), Handler)
    server.daemon_threads = True
    log("Application startup complete.")
    server.serve_forever()


def main(argv: list[str]) -> None:
    if argv[:1] in ([ENGINE], [WORKER]):
        role, number, host, port, *rest = argv
        address, args = (host, int(port)), parse_options(rest)
        (
            run_engine(int(number), address, args, rest)
            if role == ENGINE
            else run_worker(int(number), address, args)
        )
    elif argv[:1] == ["serve"]:
        args = parse_options(argv[1:])
        run_headless(args, argv[1:]) if args.headless else run_server(args, argv[1:])
    else:
        sys.exit("vllm: a stand-in that can only `serve`")


if __name__ == "__main__":
    main(sys.argv[1:])
