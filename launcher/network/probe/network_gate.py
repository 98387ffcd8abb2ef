"""Network check of an exported pod: measures the network between the pods of a group like
`check-nccl` (`network.py`), then replaces itself with the command that needs it.

If the check fails, it prints the reasons and waits, so that its log stays available and the command
never starts. Standard library only. Usage: network.pyz --rank N --size N --master HOST --require
LEVEL OPTION… -- COMMAND…
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from collections.abc import Iterable
from typing import Any

import network
import network_links

from launcher import upstream

LEVELS = ("any", "rdma", "gdrdma")
MAX_LOG_LINES = 200  # lines of NCCL's log
TORCH_TIMEOUT = 120.0  # seconds to import torch, once all pods run
_LINK = re.compile(upstream.text("nccl.channel-path"))
_PROVIDER = re.compile(upstream.text("nccl.libfabric-provider"))


def judge(report: dict[str, Any], require: str, log: str) -> list[str]:
    """Return the problems of a node's measurements; empty if every inter-node link works and
    reaches the level `require`.
    """
    problems = [f"the check: {report['error']}"] if report["error"] else []
    problems += [
        f"rank {rank['rank']} in phase `{rank['phase']}`: {rank['error'] or 'it did not end'}"
        for rank in report["ranks"]
        if not rank["ended"]
    ]
    for transfer in report["transfers"]:
        if transfer.get("error"):
            problems.append(f"{_format_route(transfer)}: {transfer['error']}")
        elif not transfer.get("correct", True):
            problems.append(f"{_format_route(transfer)}: received other bytes than were sent")
    collective = report["collective"]
    if collective is None:
        problems.append("no rank reached the all_reduce")
    elif collective.get("error") or not collective.get("correct", True):
        problems.append(f"all_reduce: {collective.get('error') or 'wrong result'}")
    return problems or _links_below(require, report["backend"], log)


def _format_route(transfer: dict[str, Any]) -> str:
    route = f"{transfer['source']} → {transfer['target']}"
    return f"{route}, local rank {transfer['local_rank']}"


def _links_below(require: str, backend: str, log: str) -> list[str]:
    """Return the links below the level `require`; Gloo's are TCP."""
    if require == "any":
        return []
    if backend != "nccl":
        return [f"Gloo uses TCP, but `{require}` is required"]
    links = count_links(log)
    if not links:
        return [f"NCCL's log names no link between nodes, but `{require}` is required"]
    return [
        f"NET/{network} on {count} links reaches `{level}`, but `{require}` is required"
        for (network, level), count in sorted(links.items())
        if LEVELS.index(level) < LEVELS.index(require)
    ]


def count_links(log: str) -> dict[tuple[str, str], int]:
    """Count the links between nodes in NCCL's log by network and level."""
    providers = [provider.lower() for provider in _PROVIDER.findall(log)]
    links: dict[tuple[str, str], int] = {}
    for path in _LINK.findall(log):
        name, _, gpudirect, local = network_links.parse_path(path)
        if name and not local:
            level = network_links.KIND_LEVELS[network_links.link_kind(name, gpudirect, providers)]
            key = (f"{name}{'/GDRDMA' * gpudirect}", level)
            links[key] = links.get(key, 0) + 1
    return links


def format_measurements(report: dict[str, Any]) -> list[str]:
    """Return the measurements, one line per direction."""
    lines = []
    for transfer in report["transfers"]:
        if transfer.get("error") or transfer.get("bandwidth") is None:
            continue
        latency = transfer.get("latency")
        delay = f", {latency * 1e6:.0f} µs" if latency is not None else ""
        lines.append(f"{_format_route(transfer)}: {transfer['bandwidth'] / 1e9:.2f} GB/s{delay}")
    collective = report["collective"] or {}
    if collective.get("busbw") is not None:
        speed = f"{collective['busbw'] / 1e9:.2f} GB/s bus bandwidth"
        lines.append(f"all_reduce over {collective['ranks']} ranks: {speed}")
    return lines


def measure(args: argparse.Namespace, own_host: str) -> dict[str, Any]:
    """Run the probe of this pod and return its report; exit if the pod is being deleted.

    The first pod's name is resolved at each attempt to connect: it may be published late, or still
    have the address of a deleted pod.
    """
    master = own_host if args.rank == 0 else args.master
    pods = {f"pod{rank}": own_host if rank == args.rank else master for rank in range(args.size)}
    argv = [
        *("--node", f"pod{args.rank}", "--node-rank", str(args.rank)),
        *("--nodes", ",".join(f"{name}={host}" for name, host in pods.items())),
        *("--master", master, "--port", str(args.port), "--nonce", args.nonce),
        *("--backend", args.backend, "--ranks-per-node", str(args.ranks_per_node)),
        *("--deadline", str(args.deadline + args.wait), "--reach", str(args.wait)),
        *("--torch", str(args.wait + TORCH_TIMEOUT)),
    ]
    # The probe ends with its standard input, which is closed in a pod.
    read, _ = os.pipe()
    os.dup2(read, 0)
    program = (sys.executable, "-B", sys.argv[0])
    probe = network.NodeProbe(network.parse_args(argv), program, argv, certificate="")
    report = probe.run()
    exit_on_signals()
    if probe.signal:
        sys.exit(128 + probe.signal)
    return report


def check_network(args: argparse.Namespace) -> list[str]:
    """Measure, print the measurements, and return the problems."""
    own_host = os.environ.get("VLLM_HOST_IP", "")
    if not own_host:
        return ["VLLM_HOST_IP is not set"]
    report = measure(args, own_host)
    log = "".join(report["pair_logs"].values()) or report["log"]
    for line in log.splitlines()[:MAX_LOG_LINES]:
        print(line)
    print_lines("     ", format_measurements(report))
    links = sorted(count_links(log).items())
    print_lines(
        "     ", [f"NET/{name} on {count} links: `{level}`" for (name, level), count in links]
    )
    return judge(report, args.require, log)


def print_lines(label: str, lines: Iterable[str]) -> None:
    """Print lines."""
    for line in lines:
        print(f"{label} {line}", flush=True)


def exit_on_signals() -> None:
    """Exit when the pod is deleted, except while the probe handles signals itself."""
    # The kernel ignores a signal to a container's first process that has no handler.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="network.pyz")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True, help="number of pods")
    parser.add_argument("--master", required=True, help="name or address of the first pod")
    parser.add_argument("--port", type=int, required=True, help="port of the first pod")
    parser.add_argument("--nonce", required=True, help="name of the group")
    parser.add_argument("--ranks-per-node", type=int, required=True)
    parser.add_argument("--backend", choices=("nccl", "gloo"), required=True)
    parser.add_argument("--require", choices=LEVELS, required=True, help="level of every link")
    parser.add_argument("--wait", type=float, required=True, help="seconds for all pods to come")
    parser.add_argument("--deadline", type=float, required=True, help="seconds after that")
    end = argv.index("--") if "--" in argv else len(argv)
    args = parser.parse_args(argv[:end])
    args.command = argv[end + 1 :]
    if not args.command:
        parser.error("no command after `--`")
    return args


def main() -> None:
    """Check the network, then become the command."""
    args = parse_args(sys.argv[1:])
    exit_on_signals()
    print_lines("look", [f"network check of pod {args.rank} of {args.size}"])
    if problems := check_network(args):
        print_lines("FAIL", problems)
        print_lines(
            "FAIL", [f"`{args.command[0]}` is not started; this log stays until the pod restarts"]
        )
        while True:
            signal.pause()
    print_lines("PASS", [f"every link between the {args.size} pods reaches `{args.require}`"])
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    os.execvp(args.command[0], args.command)  # noqa: S606 - the command of this very container


if __name__ == "__main__":
    main()
