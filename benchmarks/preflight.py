"""Wall time of the preflight's look at 32 hosts, against the slowest single probe plus connection
set-up.

    python benchmarks/preflight.py [--hosts 32] [--rounds 5]

One sshd on loopback stands for all hosts, each with an address of its own. The processors of this
one machine do the work of all hosts, so that a probe among 32 takes far longer than a probe alone:
the question is what the launcher adds to it. The candidates are `observe` with the survey, as
`vlaunch check` calls it, and a bare paramiko client that sends the same script in two steps:
connect to all, then ask all. Its slowest connection plus its slowest probe is the time that is
compared with. They take turns, several rounds in one run, and medians are shown; interpreter start
and imports are not counted. The commands that are sent to each host are counted too.
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
from launcher.tools import node_probes as observe
from launcher.ssh.fleet import Fleet

hosts, port, user, key, known = sys.argv[1].split(","), int(sys.argv[2]), *sys.argv[3:]
ssh = Ssh(user=user, port=port, identity=key, known_hosts=known, connect_timeout=120)
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
assert all(each.survey is not None and each.survey.nics for each in facts.values())
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

hosts, port, user, key, known = sys.argv[1].split(","), int(sys.argv[2]), *sys.argv[3:]
script = shlex.join(host.probe(
    ("docker",), cluster="bench", state_dir="", hf_home="/data/huggingface",
    accelerator="cpu", images=("none",), survey=True,
))
pkey = paramiko.Ed25519Key.from_private_key_file(key)


def connect(host):
    began = time.monotonic()
    client = paramiko.SSHClient()
    client.load_host_keys(known)
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    client.connect(
        host, port, user, pkey=pkey, allow_agent=False, look_for_keys=False,
        banner_timeout=120, timeout=120,
    )
    return client, time.monotonic() - began


def ask(client):
    began = time.monotonic()
    stdin, out, err = client.exec_command(script)
    stdin.write(f"{time.time():.6f}\\n".encode())
    stdin.channel.shutdown_write()
    said = out.read()
    err.read()
    assert b"@@vlaunch" in said, said[:300]
    return time.monotonic() - began


began = time.monotonic()
with ThreadPoolExecutor(len(hosts)) as pool:
    clients = list(pool.map(connect, hosts))
    probes = list(pool.map(ask, [client for client, _ in clients]))
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
    given = parser.parse_args()
    hosts = [f"127.0.0.{number + 1}" for number in range(given.hosts)]
    with tempfile.TemporaryDirectory(prefix="vlaunch-bench-") as name:
        folder = Path(name)
        port = free_port()
        key, known = prepare(folder, hosts, port)
        login = [str(port), getpass.getuser(), str(key), str(known)]
        with start(folder, port) as server:
            try:
                found = measure(hosts, login, given.rounds)
            finally:
                server.terminate()
    sys.exit(table(found, given.hosts, given.rounds))


def measure(hosts: list[str], login: list[str], rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return what each candidate said in each round; they take turns."""
    these = [(ALL, VLAUNCH, hosts), (BARE, PARAMIKO, hosts), (ALONE, VLAUNCH, hosts[:1])]
    found: dict[str, list[dict[str, float]]] = {name: [] for name, _, _ in these}
    for number in range(rounds):
        for name, program, asked in these[number % len(these) :] + these[: number % len(these)]:
            ran = subprocess.run(
                [sys.executable, "-c", program, ",".join(asked), *login],
                capture_output=True,
                text=True,
                check=False,
            )
            if ran.returncode != 0:
                raise SystemExit(f"{name} failed ({ran.returncode}):\n{ran.stderr[-2000:]}")
            found[name].append(json.loads(ran.stdout))
            print(f"round {number + 1}: {name}: {found[name][-1]['wall']:.2f} s", file=sys.stderr)
    return found


def table(found: dict[str, list[dict[str, float]]], hosts: int, rounds: int) -> int:
    """Print the medians and how they compare; return the exit code."""
    print(
        f"Look at {hosts} loopback hosts at once, seconds, median of {rounds} rounds"
        " (lowest-highest of the whole):\n"
    )
    print(
        "| | whole | slowest connection | slowest probe | whole against connection + probe |"
        " commands a host |"
    )
    print("|---|---|---|---|---|---|")
    for name, rows in found.items():
        whole = [row["wall"] for row in rows]
        ratio = statistics.median(row["wall"] / (row["connect"] + row["probe"]) for row in rows)
        connect, probe = (
            statistics.median(row[key] for row in rows) for key in ("connect", "probe")
        )
        said = f"{statistics.median(whole):.2f} ({min(whole):.2f}-{max(whole):.2f})"
        sent = max(row["sent"] for row in rows)
        print(f"| {name} | {said} | {connect:.2f} | {probe:.2f} | {ratio:.2f}× | {sent:.0f} |")
    ratios = [
        ours["wall"] / (bare["connect"] + bare["probe"])
        for ours, bare in zip(found[ALL], found[BARE], strict=True)
    ]
    ratio = statistics.median(ratios)
    own = statistics.median(row["wall"] / (row["connect"] + row["probe"]) for row in found[ALL])
    once = all(row["sent"] == 1 for row in found[ALL])
    met = max(own, ratio) <= GOAL and once
    print(
        f"\nThe look at all hosts, goal ≤ {GOAL}×: {own:.2f}× its own connection set-up plus"
        f" slowest probe; {ratio:.2f}× ({min(ratios):.2f}-{max(ratios):.2f}) the bare client's, by"
        f" round. One command a host: {'yes' if once else 'no'}. Goal {'met' if met else 'missed'}"
    )
    return 0 if met else 1


if __name__ == "__main__":
    main()
