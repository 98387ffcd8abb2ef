"""Wall time of the scan of 32 hosts, compared with the slowest single probe plus connection set-up.

    python benchmarks/preflight.py [--hosts 32] [--rounds 5]

One sshd on loopback stands for all hosts, each with its own address. This one machine does the work
of all hosts, so that a probe among 32 takes far longer than a probe alone; the figure is the
launcher's overhead. The candidates are `observe` with the survey, as `vlaunch check` calls it, and
a bare paramiko client that sends the same script in two steps: connect to all, then query all. The
reference is its slowest connection plus its slowest probe. They take turns, several rounds in one
run, and the tables show medians; interpreter start and imports do not count. The number of commands
sent to each host is checked too.
"""

from __future__ import annotations

import argparse
import getpass
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from ssh_fanout import free_port, prepare, start

GOAL = 1.3

VLAUNCH = """
import json, sys, time
from collections import Counter
from pathlib import Path
from launcher.core.domain import Inventory, Node, Ssh
from launcher.tools.host import node_probes as observe
from launcher.ssh.fleet import Fleet

hosts, port, user, key, known_hosts = sys.argv[1].split(","), int(sys.argv[2]), *sys.argv[3:]
ssh = Ssh(user=user, port=port, identity=key, known_hosts=known_hosts, connect_timeout=120)
nodes = tuple(Node(name=h, host=h, ip=h, gpus=0, head=h == hosts[0], ssh=ssh) for h in hosts)
inventory = Inventory(path=Path("x"), cluster="bench", image="none", nodes=nodes, accelerator="cpu")


class Counting:
    def __init__(self, fleet):
        self.fleet, self.sent, self.probes = fleet, Counter(), []

    def run(self, commands):
        self.sent.update(command.node for command in commands)
        for answer in self.fleet.run(commands):
            self.probes.append(answer.seconds)
            yield answer


with Fleet(inventory) as fleet:
    began = time.monotonic()
    failed = fleet.connect()
    connected = time.monotonic()
    counting = Counting(fleet)
    facts = observe.observe(inventory, counting, ["none"], survey=True, clock=time.time)
    ended = time.monotonic()
assert not failed and len(facts) == len(hosts), failed
assert all(host.survey is not None and host.survey.nics for host in facts.values())
print(json.dumps({
    "wall": ended - began, "connect": connected - began,
    "probe": max(counting.probes), "sent": max(counting.sent.values()),
}))
"""

PARAMIKO = """
import json, shlex, sys, time
from concurrent.futures import ThreadPoolExecutor
import paramiko
from launcher.tools import host

hosts, port, user, key, known_hosts = sys.argv[1].split(","), int(sys.argv[2]), *sys.argv[3:]
script = shlex.join(host.probe(
    ("docker",), cluster="bench", state_dir="", hf_home="/data/huggingface",
    accelerator="cpu", images=("none",), survey=True,
))
pkey = paramiko.Ed25519Key.from_private_key_file(key)


def connect(host):
    began = time.monotonic()
    client = paramiko.SSHClient()
    client.load_host_keys(known_hosts)
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    client.connect(
        host, port, user, pkey=pkey, allow_agent=False, look_for_keys=False,
        banner_timeout=120, timeout=120,
    )
    return client, time.monotonic() - began


def probe(client):
    began = time.monotonic()
    stdin, out, err = client.exec_command(script)
    stdin.write(f"{time.time():.6f}\\n".encode())
    stdin.channel.shutdown_write()
    output = out.read()
    err.read()
    assert b"@@vlaunch" in output, output[:300]
    return time.monotonic() - began


began = time.monotonic()
with ThreadPoolExecutor(len(hosts)) as pool:
    clients = list(pool.map(connect, hosts))
    probes = list(pool.map(probe, [client for client, _ in clients]))
ended = time.monotonic()
for client, _ in clients:
    client.close()
print(json.dumps({
    "wall": ended - began, "connect": max(took for _, took in clients),
    "probe": max(probes), "sent": 1,
}))
"""

ALL, BARE, ALONE = "`observe`, all hosts", "bare paramiko, all hosts", "`observe`, one host alone"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    hosts = [f"127.0.0.{number + 1}" for number in range(options.hosts)]
    with tempfile.TemporaryDirectory(prefix="vlaunch-bench-") as name:
        folder = Path(name)
        port = free_port()
        key, known_hosts = prepare(folder, hosts, port)
        login = [str(port), getpass.getuser(), str(key), str(known_hosts)]
        with start(folder, port) as server:
            try:
                results = measure(hosts, login, options.rounds)
            finally:
                server.terminate()
    sys.exit(table(results, options.hosts, options.rounds))


def measure(hosts: list[str], login: list[str], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return the results of each candidate in each round; they take turns."""
    candidates = [(ALL, VLAUNCH, hosts), (BARE, PARAMIKO, hosts), (ALONE, VLAUNCH, hosts[:1])]
    results: dict[str, list[dict[str, float]]] = {name: [] for name, _, _ in candidates}
    for number in range(rounds):
        for name, program, targets in (
            candidates[number % len(candidates) :] + candidates[: number % len(candidates)]
        ):
            result = subprocess.run(
                [sys.executable, "-c", program, ",".join(targets), *login],
                capture_output=True,
                text=True,
                check=False,
            )
            if result.returncode != 0:
                raise SystemExit(f"{name} failed ({result.returncode}):\n{result.stderr[-2000:]}")
            results[name].append(json.loads(result.stdout))
            print(f"round {number + 1}: {name}: {results[name][-1]['wall']:.2f} s", file=sys.stderr)
    return results


def table(results: dict[str, list[dict[str, float]]], hosts: int, rounds: int) -> int:
    """Print the medians and the ratios; return the exit code."""
    print(
        f"Look at {hosts} loopback hosts at once, seconds, median of {rounds} rounds"
        " (lowest-highest of the whole):\n"
    )
    print(
        "| | whole | slowest connection | slowest probe | whole against connection + probe |"
        " commands a host |"
    )
    print("|---|---|---|---|---|---|")
    for name, rows in results.items():
        whole = [row["wall"] for row in rows]
        ratio = statistics.median(row["wall"] / (row["connect"] + row["probe"]) for row in rows)
        connect, probe = (
            statistics.median(row[key] for row in rows) for key in ("connect", "probe")
        )
        times = f"{statistics.median(whole):.2f} ({min(whole):.2f}-{max(whole):.2f})"
        sent = max(row["sent"] for row in rows)
        print(f"| {name} | {times} | {connect:.2f} | {probe:.2f} | {ratio:.2f}× | {sent:.0f} |")
    ratios = [
        ours["wall"] / (bare["connect"] + bare["probe"])
        for ours, bare in zip(results[ALL], results[BARE], strict=True)
    ]
    ratio = statistics.median(ratios)
    own = statistics.median(row["wall"] / (row["connect"] + row["probe"]) for row in results[ALL])
    once = all(row["sent"] == 1 for row in results[ALL])
    met = max(own, ratio) <= GOAL and once
    print(
        f"\nThe look at all hosts, goal ≤ {GOAL}×: {own:.2f}× its own connection set-up plus"
        f" slowest probe; {ratio:.2f}× ({min(ratios):.2f}-{max(ratios):.2f}) the bare client's, by"
        f" round. One command a host: {'yes' if once else 'no'}. Goal {'met' if met else 'missed'}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    main()
