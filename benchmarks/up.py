"""Wall time of `vlaunch up`, against a good shell script with the same docker and ray commands.

    python benchmarks/up.py [INVENTORY] [--rounds 3] [--first]

The default inventory is the lab cluster's (`vlaunch lab up`). Every round begins with empty nodes
(`vlaunch down`, not timed); the derived image exists, except with `--first`, where it is removed,
so that both build it from the same context. The two take turns within a round, in changing order;
after each timed `up` follows one that has nothing to change. The cluster is taken down many times,
and is up at the end; a running server is refused.

The script is that of a careful engineer: one SSH connection per node with the cheap key exchange,
both nodes at once, files written during other waits, the worker started as soon as the head's port
opens, no pause longer than a fifth of a second. Its `docker run` lines are from `vlaunch up
--dry-run`. `--show-script` prints it.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import client
from benchmarks.client import LAB, VLAUNCH
from launcher.core.domain import Inventory, Node
from launcher.inventory.load import load
from launcher.tools import agent_queries
from launcher.tools.shipped import node_files
from launcher.tools.site import Site

GOALS = {"ratio": 1.2, "share": 0.15}

# Runs on a node, in one connection. Standard input: the token's 64 bytes, then the payload's tar.
FILES = """\
set -eu
umask 077
mkdir -p {dir}/secrets {dir}/payload {dir}/server
chmod 711 {dir} && chmod 755 {dir}/payload {dir}/server
head -c 64 > {dir}/secrets/RAY_AUTH_TOKEN
tar -xf - -C {dir}/payload
"""
OPEN = "until (exec 3<>/dev/tcp/{ip}/{port}) 2>/dev/null; do sleep 0.1; done\n"
HEAD = (
    OPEN
    + """\
alive() {{ {table} 2>/dev/null | grep -o '"state": "ALIVE"' | wc -l; }}
until [ "$(alive)" = {nodes} ]; do sleep 0.2; done
{status}
"""
)
SCRIPT = """\
#!/usr/bin/env bash
set -euo pipefail
{build}
files() {{ printf %s "$RAY_AUTH_TOKEN"; cat "$PAYLOAD"; }}  # PAYLOAD: what `vlaunch payload` prints
{starts}
for job in $(jobs -p); do wait "$job"; done
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One cluster, the commands that start its containers, and the build of its derived image."""

    inventory: Inventory
    runs: dict[str, str]
    builds: tuple[str, ...]
    tag: str


def run_command(*argv: str, timeout: float = 1500, env: dict[str, str] | None = None) -> str:
    """Run a command and return its output; exit when it fails."""
    completed = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
    )
    if completed.returncode != 0:
        sys.exit(
            f"{shlex.join(argv)[:200]} ended with"
            f" {completed.returncode}:\n{completed.stdout[-2000:]}{completed.stderr[-2000:]}"
        )
    return completed.stdout


def ssh(node: Node) -> str:
    """Return the fastest careful `ssh` command; the quantum-safe key exchange costs a quarter of a
    second of CPU.
    """
    settings = node.ssh
    options = [
        "-o",
        "BatchMode=yes",
        "-o",
        "KexAlgorithms=curve25519-sha256",
        "-o",
        "StrictHostKeyChecking=yes",
    ]
    options += ["-i", settings.identity, "-o", "IdentitiesOnly=yes"] if settings.identity else []
    options += ["-o", f"UserKnownHostsFile={settings.known_hosts}"] if settings.known_hosts else []
    options += ["-p", str(settings.port)] if settings.port else []
    options += ["-J", settings.jump] if settings.jump else []
    return shlex.join(
        ["ssh", *options, f"{settings.user}@{node.host}" if settings.user else node.host]
    )


def read_dry_run(inventory: Inventory) -> Bench:
    """Read the commands of `up --dry-run` for empty nodes."""
    text = run_command(VLAUNCH, "up", str(inventory.path), "--dry-run")
    runs, builds = {}, []
    for line in text.splitlines():
        fields = line.split(" ")
        if fields[0] == "on" and fields[2:5] == ["docker", "run", "--detach"]:
            runs[fields[1]] = " ".join(fields[2:])
        elif line.startswith("tar ") and " docker build " in line:
            builds.append(line)
    if set(runs) != {node.name for node in inventory.nodes}:
        sys.exit(f"the dry run starts {sorted(runs)}, not every node once:\n{text}")
    argv = shlex.split(runs[inventory.head.name])
    return Bench(
        inventory=inventory,
        runs=runs,
        builds=tuple(builds),
        tag=argv[argv.index("/opt/vlaunch/entry.sh") - 1],
    )


def render_script(bench: Bench) -> str:
    """Write the script for a cluster."""
    inventory, starts = bench.inventory, []
    head = inventory.head
    name = Site(inventory).container_name(head)
    for node in inventory.nodes:
        text = FILES.format(dir=Site(inventory).state_dir(node))
        opened = OPEN.format(ip=head.ip, port=inventory.ports.gcs)
        run = bench.runs[node.name] + " >/dev/null\n"
        if node.head:
            table = shlex.join(["docker", "exec", name, *agent_queries.nodes(inventory.ports, ())])
            text += run + HEAD.format(
                ip=head.ip,
                port=inventory.ports.gcs,
                table=table,
                nodes=len(inventory.nodes),
                status=shlex.join(["docker", "exec", name, "ray", "status"]),
            )
        else:
            text += opened + run
        starts.append(f"files | {ssh(node)} {shlex.quote(shlex.join(['bash', '-c', text]))} &")
    build = ""
    if bench.builds:
        on = "\n".join(
            f'  {node.name}) shift; {ssh(node)} "$(printf "%q " "$@")" ;;'
            for node in inventory.nodes
        )
        build = "\n".join(
            [
                f"on() {{ case $1 in\n{on}\nesac; }}",
                *bench.builds,
                'for job in $(jobs -p); do wait "$job"; done',
            ]
        )
    return SCRIPT.format(build=build, starts="\n".join(starts))


def measure_seconds(action: Callable[[], object]) -> float:
    """Return the seconds of an action."""
    began = time.monotonic()
    action()
    return time.monotonic() - began


def time_script(bench: Bench) -> float:
    """Time the script."""
    with tempfile.TemporaryDirectory() as folder:
        file, packed = Path(folder) / "up.sh", Path(folder) / "payload.tar"
        file.write_text(render_script(bench))
        packed.write_bytes(node_files.payload_tar())
        env = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "PAYLOAD": str(packed)}
        return measure_seconds(lambda: run_command("timeout", "600", "bash", str(file), env=env))


def time_vlaunch(
    bench: Bench, stages: dict[str, list[float]] | None = None, *, env: dict[str, str] | None = None
) -> float:
    """Time `vlaunch up`; the seconds of its stages are added to `stages`."""
    output: list[str] = []
    seconds = measure_seconds(
        lambda: output.append(
            run_command(VLAUNCH, "up", str(bench.inventory.path), "--json", env=env)
        )
    )
    if stages is not None:
        events = [json.loads(line) for line in output[0].splitlines()]
        for event in events:
            if event.get("kind") == "stage" and event.get("state") == "ok":
                stages[event["stage"]].append(event["seconds"])
        stages["of the last: waiting for it to stay true"].append(_stable_seconds(events))
        stages["everything else (start-up, connecting, looking)"].append(
            seconds
            - sum(
                e["seconds"] for e in events if e.get("kind") == "stage" and e.get("state") == "ok"
            )
        )
    return seconds


def _stable_seconds(events: list[dict[str, Any]]) -> float:
    """Return the seconds for which the last gate had to stay green."""
    green = [
        e["seconds"]
        for e in events
        if e["kind"] == "wait" and "waiting for it to stay true" in e.get("text", "")
    ]
    accepted = [
        e["seconds"]
        for e in events
        if e["kind"] == "finding" and (e.get("data") or {}).get("check") == "ray-nodes"
    ]
    return float(accepted[-1] - green[0]) if green and accepted else 0.0


def down(inventory: Inventory, *, tag: str = "") -> None:
    """Remove the cluster from the nodes, and its derived image `tag`, if any."""
    run_command(VLAUNCH, "down", "--yes", "-i", str(inventory.path))
    for node in inventory.nodes if tag else ():
        run_command(
            *shlex.split(ssh(node)),
            f"{shlex.join(node.docker)} rmi --force {shlex.quote(tag)} >/dev/null; true",
        )


def compare_repeated(bench: Bench, rounds: int) -> None:
    """Compare with the derived image in place, and print the tables."""
    ours, theirs, again = list[float](), list[float](), list[float]()
    stages: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        candidates = ["script", "vlaunch"] if number % 2 == 0 else ["vlaunch", "script"]
        for candidate in candidates:
            down(bench.inventory)
            if candidate == "script":
                theirs.append(time_script(bench))
            else:
                ours.append(time_vlaunch(bench, stages))
                again.append(time_vlaunch(bench))
            seconds = (theirs if candidate == "script" else ours)[-1]
            print(f"round {number + 1}: {candidate} {seconds:.1f} s", file=sys.stderr)
    print(
        f"\n`up` of {len(bench.inventory.nodes)} nodes, derived image in place, {rounds} rounds:\n"
    )
    table(ours, theirs, again)
    print("\nWhere the time of `vlaunch up` goes:\n\n| stage | median s |\n|---|---|")
    for stage, times in stages.items():
        print(f"| {stage} | {statistics.median(times):.1f} |")


def compare_first(bench: Bench, rounds: int) -> None:
    """Compare with the build of the derived image, wheels already on this machine, and print the
    table.
    """
    from launcher.cluster.up_inputs import cache_dir

    ours, theirs, again = list[float](), list[float](), list[float]()
    for number in range(rounds):
        for candidate in ("script", "vlaunch") if number % 2 == 0 else ("vlaunch", "script"):
            down(bench.inventory, tag=bench.tag)
            if candidate == "script":
                building = read_dry_run(bench.inventory)
                if not building.builds:
                    sys.exit(f"{bench.tag} is still on the nodes: nothing would be built")
                theirs.append(time_script(building))
                continue
            # an empty cache: the contents of the image are queried again
            with tempfile.TemporaryDirectory() as fresh:
                (Path(fresh) / "vlaunch").mkdir()
                (Path(fresh) / "vlaunch" / "wheels").symlink_to(cache_dir() / "wheels")
                ours.append(time_vlaunch(bench, env={"XDG_CACHE_HOME": fresh}))
            again.append(time_vlaunch(bench))
        print(
            f"round {number + 1}: script {theirs[-1]:.1f} s, vlaunch {ours[-1]:.1f} s",
            file=sys.stderr,
        )
    print(
        f"\nFirst `up` of {len(bench.inventory.nodes)} nodes, derived image built, {rounds}"
        " rounds:\n"
    )
    table(ours, theirs, again)


def table(ours: list[float], theirs: list[float], again: list[float]) -> None:
    """Print seconds and ratios; a ratio is the median of the rounds' ratios."""
    ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
    share = statistics.median(a / b for a, b in zip(again, ours, strict=True))
    print("| | median s | lowest–highest | ratio | goal |\n|---|---|---|---|---|")
    rows = (
        ("script by hand", theirs, "1", ""),
        (
            "`vlaunch up`",
            ours,
            f"{ratio:.2f}× the script",
            f"≤ {GOALS['ratio']}× {_met(ratio <= GOALS['ratio'])}",
        ),
        (
            "`vlaunch up` again",
            again,
            f"{share:.1%} of the first",
            f"< {GOALS['share']:.0%} {_met(share < GOALS['share'])}",
        ),
    )
    for name, seconds, figure, goal in rows:
        print(
            f"| {name} | {statistics.median(seconds):.1f} | {min(seconds):.1f}–{max(seconds):.1f} |"
            f" {figure} | {goal} |"
        )


def _met(yes: bool) -> str:
    return "met" if yes else "missed"


def main() -> None:
    """Prepare, measure, and leave the cluster up."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("inventory", nargs="?", type=Path, default=LAB)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--first",
        action="store_true",
        help="measure the first `up` ever, which builds the derived image",
    )
    parser.add_argument(
        "--show-script", action="store_true", help="print the script, and measure nothing"
    )
    args = parser.parse_args()
    inventory = load(args.inventory)
    client.require_no_servers(inventory, "takes the cluster down")
    # warms all caches, for both
    run_command(VLAUNCH, "up", str(inventory.path))
    down(inventory)
    bench = read_dry_run(inventory)
    try:
        if args.show_script:
            print(render_script(bench))
        elif args.first:
            compare_first(bench, args.rounds)
        else:
            compare_repeated(bench, args.rounds)
    finally:
        run_command(VLAUNCH, "up", str(inventory.path))


if __name__ == "__main__":
    main()
