"""Wall time of `vlaunch up`, against the best script written by hand that runs the same docker and
ray commands.

    python benchmarks/up.py [INVENTORY] [--rounds 3] [--first]

The default inventory is the practice cluster's (`vlaunch lab up`). Every round begins with nothing
of the cluster on the nodes (`vlaunch down`, not timed); the derived image is there, except with
`--first`, where it is removed, so that both build it from the same context. The two take turns
within a round, in changing order; after each timed `up` comes one that has nothing to change. The
cluster is taken down many times, and is up in the end; a server that runs in it is refused.

The script is what a careful person would write: one SSH connection per node with the cheap key
exchange, both nodes at once, files written while nothing else can happen, the worker started the
moment that the head's port opens, no pause longer than a fifth of a second. Its `docker run` lines
are taken from `vlaunch up --dry-run`. `--show-script` prints it.
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
from launcher.tools import agent_queries, node_files
from launcher.tools.site import Site

GOALS = {"ratio": 1.2, "share": 0.15}

# What runs on a node, in one connection. Standard input: the token's 64 bytes, then the payload as
# a tar.
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
    """One cluster, the lines that start its containers, and how its derived image is built."""

    inventory: Inventory
    runs: dict[str, str]
    builds: tuple[str, ...]
    tag: str


def call(*argv: str, timeout: float = 1500, env: dict[str, str] | None = None) -> str:
    """Run a command to its end and return what it printed; shows what it said and ends the program
    when it fails.
    """
    done = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **(env or {})},
    )
    if done.returncode != 0:
        sys.exit(
            f"{shlex.join(argv)[:200]} ended with"
            f" {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout


def ssh(node: Node) -> str:
    """Return the fastest careful way to call `ssh`; the quantum-safe key exchange costs a quarter
    of a second of CPU.
    """
    given = node.ssh
    options = [
        "-o",
        "BatchMode=yes",
        "-o",
        "KexAlgorithms=curve25519-sha256",
        "-o",
        "StrictHostKeyChecking=yes",
    ]
    options += ["-i", given.identity, "-o", "IdentitiesOnly=yes"] if given.identity else []
    options += ["-o", f"UserKnownHostsFile={given.known_hosts}"] if given.known_hosts else []
    options += ["-p", str(given.port)] if given.port else []
    options += ["-J", given.jump] if given.jump else []
    return shlex.join(["ssh", *options, f"{given.user}@{node.host}" if given.user else node.host])


def read_dry_run(inventory: Inventory) -> Bench:
    """Take the commands from what `up` would send to nodes that have nothing of the cluster."""
    text = call(VLAUNCH, "up", str(inventory.path), "--dry-run")
    runs, builds = {}, []
    for line in text.splitlines():
        words = line.split(" ")
        if words[0] == "on" and words[2:5] == ["docker", "run", "--detach"]:
            runs[words[1]] = " ".join(words[2:])
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


def script(bench: Bench) -> str:
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


def timed(action: Callable[[], object]) -> float:
    """Return the seconds an action takes."""
    began = time.monotonic()
    action()
    return time.monotonic() - began


def by_hand(bench: Bench) -> float:
    """Time the script."""
    with tempfile.TemporaryDirectory() as folder:
        file, packed = Path(folder) / "up.sh", Path(folder) / "payload.tar"
        file.write_text(script(bench))
        packed.write_bytes(node_files.payload_tar())
        given = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "PAYLOAD": str(packed)}
        return timed(lambda: call("timeout", "600", "bash", str(file), env=given))


def by_vlaunch(
    bench: Bench, stages: dict[str, list[float]] | None = None, *, env: dict[str, str] | None = None
) -> float:
    """Time `vlaunch up`; the seconds of its stages are added to `stages`."""
    said: list[str] = []
    seconds = timed(
        lambda: said.append(call(VLAUNCH, "up", str(bench.inventory.path), "--json", env=env))
    )
    if stages is not None:
        events = [json.loads(line) for line in said[0].splitlines()]
        for event in events:
            if event.get("kind") == "stage" and event.get("state") == "ok":
                stages[event["stage"]].append(event["seconds"])
        stages["of the last: waiting for it to stay true"].append(_held(events))
        stages["everything else (start-up, connecting, looking)"].append(
            seconds
            - sum(
                e["seconds"] for e in events if e.get("kind") == "stage" and e.get("state") == "ok"
            )
        )
    return seconds


def _held(events: list[dict[str, Any]]) -> float:
    """Return the seconds that the last gate stayed green before it was believed."""
    green = [
        e["seconds"]
        for e in events
        if e["kind"] == "wait" and "waiting for it to stay true" in e.get("text", "")
    ]
    believed = [
        e["seconds"]
        for e in events
        if e["kind"] == "finding" and (e.get("data") or {}).get("check") == "ray-nodes"
    ]
    return float(believed[-1] - green[0]) if green and believed else 0.0


def down(inventory: Inventory, *, tag: str = "") -> None:
    """Remove the cluster from the nodes, and its derived image when it is named."""
    call(VLAUNCH, "down", "--yes", str(inventory.path))
    for node in inventory.nodes if tag else ():
        call(
            *shlex.split(ssh(node)),
            f"{shlex.join(node.docker)} rmi --force {shlex.quote(tag)} >/dev/null; true",
        )


def ordinary(bench: Bench, rounds: int) -> None:
    """Compare with the derived image in place, and print the tables."""
    ours, theirs, again = list[float](), list[float](), list[float]()
    stages: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        turns = ["script", "vlaunch"] if number % 2 == 0 else ["vlaunch", "script"]
        for who in turns:
            down(bench.inventory)
            if who == "script":
                theirs.append(by_hand(bench))
            else:
                ours.append(by_vlaunch(bench, stages))
                again.append(by_vlaunch(bench))
            print(
                f"round {number + 1}: {who} {(theirs if who == 'script' else ours)[-1]:.1f} s",
                file=sys.stderr,
            )
    print(
        f"\n`up` of {len(bench.inventory.nodes)} nodes, derived image in place, {rounds} rounds:\n"
    )
    table(ours, theirs, again)
    print("\nWhere the time of `vlaunch up` goes:\n\n| stage | median s |\n|---|---|")
    for stage, seconds in stages.items():
        print(f"| {stage} | {statistics.median(seconds):.1f} |")


def first_ever(bench: Bench, rounds: int) -> None:
    """Compare with the derived image still to be built, wheels already on this machine, and print
    the table.
    """
    from launcher.cluster.up_inputs import cache_dir

    ours, theirs, again = list[float](), list[float](), list[float]()
    for number in range(rounds):
        for who in ("script", "vlaunch") if number % 2 == 0 else ("vlaunch", "script"):
            down(bench.inventory, tag=bench.tag)
            if who == "script":
                building = read_dry_run(bench.inventory)
                if not building.builds:
                    sys.exit(f"{bench.tag} is still on the nodes: nothing would be built")
                theirs.append(by_hand(building))
                continue
            # the image has to be asked again what it has
            with tempfile.TemporaryDirectory() as fresh:
                (Path(fresh) / "vlaunch").mkdir()
                (Path(fresh) / "vlaunch" / "wheels").symlink_to(cache_dir() / "wheels")
                ours.append(by_vlaunch(bench, env={"XDG_CACHE_HOME": fresh}))
            again.append(by_vlaunch(bench))
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
    """Print seconds and ratios; a ratio is the median of the rounds' own."""
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
    client.refuse_servers(inventory, "takes the cluster down")
    # whatever is missing on the way is there then, and both find it
    call(VLAUNCH, "up", str(inventory.path))
    down(inventory)
    bench = read_dry_run(inventory)
    try:
        if args.show_script:
            print(script(bench))
        elif args.first:
            first_ever(bench, args.rounds)
        else:
            ordinary(bench, args.rounds)
    finally:
        call(VLAUNCH, "up", str(inventory.path))


if __name__ == "__main__":
    main()
