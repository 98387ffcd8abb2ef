"""The network proof as a gate where no launcher looks on: runs the probe (`network.py`) of this
node, judges what it saw, agrees with the others, and ends with 0 or 1.

It runs before the server in an exported group (an init container, or the like), with the image and
the rights of the server. All nodes pass, or none: a server whose neighbour was refused would wait
for it for ever. With `--met`, a node that comes alone, because the others are past their gates
(`network_late.py`), passes as well, and says that nothing was proven. Standard library only. Usage:
network_gate.py --rank N --size N --master HOST --require LEVEL … -- OPTION OF THE PROBE…
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import network_late
import network_links
import network_start

ORDER = ("any", "rdma", "gdrdma")
AGREE = 60.0  # seconds for all nodes to tell how they judged
SHOWN = 200  # lines of NCCL's that are printed
PAUSE = 0.5
MESSAGE = "/dev/termination-log"  # what `kubectl describe pod` shows of a container that has ended
UNPROVEN = (
    "so the network of this node is NOT proven again, and it goes on without; to have it proven,"
    " let all start together: delete all pods of the group at once"
)
_LINK = re.compile(r"(?:Channel|Ring) .* via (.+)")
_PROVIDER = re.compile(r"NET/OFI Selected [Pp]rovider is ([\w.;-]{1,60})")


def judge(report: dict[str, object], require: str, log: str) -> list[str]:
    """Say what is wrong with what the probe of this node saw; nothing when the network is proven.

    `require` is the least level of every link between nodes.
    """
    found = [f"the probe: {report['error']}"] if report["error"] else []
    found += [
        f"rank {each['rank']} in phase `{each['phase']}`: {each['error'] or 'it did not end'}"
        for each in report["ranks"]
        if not each["ended"]
    ]
    for each in report["transfers"]:
        way = f"{each['source']} → {each['target']}, local rank {each['local_rank']}"
        if each.get("error"):
            found.append(f"{way}: {each['error']}")
        elif not each.get("correct", True):
            found.append(f"{way}: what came is not what was sent")
    whole = report["collective"]
    if whole is None:
        found.append("no rank came to the all_reduce")
    elif whole.get("error") or not whole.get("correct", True):
        found.append(f"all_reduce: {whole.get('error') or 'its result is wrong'}")
    return found or _below(require, report["backend"], log)


def _below(require: str, backend: str, log: str) -> list[str]:
    """Say which links are worth less than `require`; Gloo's are TCP."""
    if require == "any":
        return []
    if backend != "nccl":
        return [f"Gloo is TCP, and the level must be {require}"]
    kinds = levels(log)
    if not kinds:
        return [f"NCCL tells of no link between nodes, and the level must be {require}"]
    return [
        f"NET/{network} on {count} links is worth `{level}`, and `{require}` is required"
        for (network, level), count in sorted(kinds.items())
        if ORDER.index(level) < ORDER.index(require)
    ]


def levels(log: str) -> dict[tuple[str, str], int]:
    """Count the links between nodes in NCCL's log by network and by what that is worth."""
    providers = _PROVIDER.findall(log)
    found: dict[tuple[str, str], int] = {}
    for path in _LINK.findall(log):
        network, _, gpudirect, local = network_links.via(path)
        if network and not local:
            kind = network_links.kind(network, gpudirect, [each.lower() for each in providers])
            key = (f"{network}{'/GDRDMA' * gpudirect}", network_links.WORTH[kind])
            found[key] = found.get(key, 0) + 1
    return found


def figures(report: dict[str, object]) -> list[str]:
    """Say what was measured, a line for each direction."""
    found = []
    for each in report["transfers"]:
        if each.get("error") or each.get("bandwidth") is None:
            continue
        latency = each.get("latency")
        delay = f", {latency * 1e6:.0f} µs" if latency is not None else ""
        found.append(
            f"{each['source']} → {each['target']}, local rank {each['local_rank']}:"
            f" {each['bandwidth'] / 1e9:.2f} GB/s{delay}"
        )
    whole = report["collective"] or {}
    if whole.get("busbw") is not None:
        ranks, speed = whole["ranks"], whole["busbw"] / 1e9
        found.append(f"all_reduce over {ranks} ranks: {speed:.2f} GB/s bus bandwidth")
    return found


def agree(
    rank: int, size: int, master: str, port: int, word: str, wrong: str, seconds: float = AGREE
) -> list[str]:
    """Tell the others how this node judged, and return what is wrong with theirs.

    `word` is equal on all nodes of a run. The first one listens, and tells all what all said.
    """
    if size == 1:
        return []
    until = time.monotonic() + seconds
    try:
        if rank == 0:
            return _gather(size, master, port, word, wrong, until)
        return _tell(rank, master, port, word, wrong, until)
    except (OSError, ValueError, network_start.Unmet) as error:
        return [f"rank 0 does not tell how the others judged: {error}"]


def _gather(size: int, master: str, port: int, word: str, wrong: str, until: float) -> list[str]:
    said: dict[int, str] = {0: wrong}
    family = socket.AF_INET6 if ":" in master else socket.AF_INET
    with contextlib.ExitStack() as callers:
        server = callers.enter_context(
            socket.create_server((master, port), family=family, backlog=size)
        )
        heard: list[socket.socket] = []
        while len(said) < size and (left := until - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                caller = callers.enter_context(server.accept()[0])
                caller.settimeout(network_start.GREETING)
                told = json.loads(_line(caller))
                if told["word"] == word:
                    said[int(told["rank"])] = str(told["wrong"])
                    heard.append(caller)
                else:
                    caller.close()
            except (OSError, ValueError, KeyError, TypeError):
                continue  # a stranger, or nobody more
        missing = {rank: "it does not tell" for rank in range(size) if rank not in said}
        answer = {str(rank): text for rank, text in {**said, **missing}.items() if text}
        for caller in heard:
            with contextlib.suppress(OSError):
                caller.sendall(json.dumps(answer).encode() + b"\n")
    return _others(answer, 0)


def _tell(rank: int, master: str, port: int, word: str, wrong: str, until: float) -> list[str]:
    told = json.dumps({"word": word, "rank": rank, "wrong": wrong}).encode() + b"\n"
    while (left := until - time.monotonic()) > 0:
        with network_start.knock(master, port, left) as head:
            head.settimeout(left + network_start.GREETING)
            try:
                head.sendall(told)
                return _others(json.loads(_line(head)), rank)
            except (OSError, ValueError):
                # The first node's ranks may not have ended yet: their store had the port before.
                time.sleep(PAUSE)
    raise network_start.Unmet("no answer")


def _line(connection: socket.socket) -> str:
    with connection.makefile("rb") as file:
        return file.readline(1 << 20).decode()


def _others(answer: dict[str, str], rank: int) -> list[str]:
    return [f"rank {other}: {text}" for other, text in sorted(answer.items()) if int(other) != rank]


def look_up(name: str, seconds: float) -> str:
    """Return the address of a name, which may be published only later; raises OSError when it is
    not within `seconds`.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        except socket.gaierror as error:
            if time.monotonic() >= until:
                raise OSError(f"{name} has no address after {seconds:.0f} s: {error}") from None
            time.sleep(PAUSE)


def measure(args: argparse.Namespace, own: str) -> tuple[dict[str, object], str]:
    """Run the probe and return its report and NCCL's telling lines; begin again when the first node
    has got another address meanwhile.

    Raises ValueError with what the probe printed instead, and Late.
    """
    while True:
        # The name of a pod that has just ended may still have its address.
        master = own if args.rank == 0 else look_up(args.master, args.reach)
        look = network_late.Look(args.rank, args.master, master, args.met, args.ending)
        printed = probe(args, own, master, look)
        if look.late:
            raise network_late.Late(look.late)
        if not look.moved:
            return reported(printed)
        said([f"{args.master} is no longer {master}"], "look")


def probe(args: argparse.Namespace, own: str, master: str, look: network_late.Look) -> str:
    """Run the probe, its standard input held open, and return what it prints, up to when it ends or
    `look` finds that it waits in vain.
    """
    # Of the others only the first one's address matters, where all meet.
    ips = {args.rank: own}
    nodes = ",".join(f"rank{rank}={ips.get(rank, master)}" for rank in range(args.size))
    here = os.path.dirname(os.path.abspath(__file__))
    process = subprocess.Popen(
        [
            *(sys.executable, "-B", os.path.join(here, "network.py")),
            *("--node", f"rank{args.rank}", "--node-rank", str(args.rank)),
            *("--nodes", nodes, "--master", master, "--running"),
            *args.probe,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    look.start(process.terminate)
    printed = process.stdout.read().decode(errors="replace")
    process.wait()
    look.stop()
    return printed


def reported(printed: str) -> tuple[dict[str, object], str]:
    """Read the probe's report, and NCCL's telling lines in it; raises ValueError."""
    try:
        report = json.loads(printed.strip().rpartition("\n")[2])
        pairs = "".join(report["pair_logs"].values())
        return report, pairs or report["log"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"the probe ended without a report: {printed[-300:]}") from None


def run(args: argparse.Namespace) -> list[str]:
    """Measure, judge and agree; print what was seen, and return what is wrong; raises Late."""
    own = os.environ.get("VLLM_HOST_IP", "")
    if not own:
        return ["VLLM_HOST_IP says no address of this node"]
    try:
        report, log = measure(args, own)
    except (OSError, ValueError) as error:
        return [str(error)]
    for line in log.splitlines()[:SHOWN]:
        print(line)
    said(figures(report), "     ")
    for (network, level), count in sorted(levels(log).items()):
        said([f"NET/{network} on {count} links: `{level}`"], "     ")
    wrong = judge(report, args.require, log)
    master = own if args.rank == 0 else args.master
    theirs = agree(args.rank, args.size, master, args.port, args.nonce, "; ".join(wrong)[:2000])
    return [*wrong, *theirs]


def said(lines: Iterable[str], word: str) -> None:
    """Print lines."""
    for line in lines:
        print(f"{word} {line}", flush=True)


def note(text: str) -> None:
    """Leave a text where the kubelet finds it, if there is one."""
    with contextlib.suppress(OSError), open(MESSAGE, "r+", encoding="utf-8") as file:
        file.write(text)


def parsed(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--master", required=True, help="name or address of the first node")
    parser.add_argument("--require", choices=ORDER, required=True)
    parser.add_argument(
        "--met",
        type=lambda text: [int(each) for each in text.split(",")],
        default=[],
        help="ports of the first node where what starts behind the gates meets: the one to which"
        " the others come, and more on which the first one listens",
    )
    parser.add_argument(
        "--ending", type=float, default=90.0, help="seconds that who is being ended may take"
    )
    own, probe = (argv[: argv.index("--")], argv[argv.index("--") + 1 :])
    args = parser.parse_args(own)
    of_probe = argparse.ArgumentParser()
    of_probe.add_argument("--port", type=int, required=True)
    of_probe.add_argument("--nonce", required=True)
    of_probe.add_argument("--reach", type=float, required=True)
    known, _ = of_probe.parse_known_args(probe)
    args.port, args.nonce, args.reach, args.probe = known.port, known.nonce, known.reach, probe
    return args


def main() -> int:
    """Be the gate."""
    args = parsed(sys.argv[1:])
    node = os.environ.get("NODE_NAME", "")
    said([f"the network of rank {args.rank} of {args.size}{f' on {node}' if node else ''}"], "look")
    try:
        wrong = run(args)
    except network_late.Late as late:
        lines = [f"the others are past their gates: {late}", UNPROVEN]
        said(lines, "LATE")
        note("\n".join(lines))
        return 0
    said(wrong, "FAIL")
    if not wrong:
        said([f"every link between the {args.size} nodes is proven: `{args.require}`"], "PASS")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
