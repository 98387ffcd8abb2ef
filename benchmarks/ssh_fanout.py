"""Client CPU to run one command on many hosts over SSH, against other clients.

    python benchmarks/ssh_fanout.py [--hosts 100] [--rounds 5]

The others are bare paramiko threads, `xargs ssh` and ClusterShell. One sshd on loopback stands for
all hosts, each with its own address; its cost is the same for all and does not count. The figure is
user + system time of the client's whole process tree, with the start of the interpreter. The
candidates take turns, several rounds in one run, and the medians are compared: ratios travel
between machines, seconds do not. ClusterShell's `clush` is on PATH, or is installed into a
temporary environment.
"""

from __future__ import annotations

import argparse
import getpass
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

WIDTH = 32

VLAUNCH = """
import sys
from pathlib import Path
from launcher.core.domain import Inventory, Node, Ssh
from launcher.ssh.fleet import Fleet
from launcher.core.transport import Command

hosts, port, user, key, known_hosts = sys.argv[1].split(","), int(sys.argv[2]), *sys.argv[3:]
ssh = Ssh(user=user, port=port, identity=key, known_hosts=known_hosts, connect_timeout=120)
nodes = tuple(Node(name=h, host=h, ip=h, gpus=0, head=h == hosts[0], ssh=ssh) for h in hosts)
inventory = Inventory(path=Path("x"), cluster="bench", image="none", nodes=nodes, cap=WIDTH)
with Fleet(inventory) as fleet:
    answers = list(fleet.run([Command(node=h, argv=("true",), timeout=120) for h in hosts]))
bad = [a for a in answers if not a.ok]
assert len(answers) == len(hosts) and not bad, bad[:3]
"""

PARAMIKO = """
import sys
from concurrent.futures import ThreadPoolExecutor
import paramiko

hosts, port, user, key, known_hosts = sys.argv[1].split(","), int(sys.argv[2]), *sys.argv[3:]

def run(host):
    client = paramiko.SSHClient()
    client.load_host_keys(known_hosts)
    client.set_missing_host_key_policy(paramiko.RejectPolicy())
    client.connect(
        host, port, user, pkey=pkey, allow_agent=False, look_for_keys=False,
        banner_timeout=120, timeout=120,
    )
    _, out, err = client.exec_command("true")
    out.read(), err.read()
    code = out.channel.recv_exit_status()
    client.close()
    return code

pkey = paramiko.Ed25519Key.from_private_key_file(key)
with ThreadPoolExecutor(WIDTH) as pool:
    codes = list(pool.map(run, hosts))
assert len(codes) == len(hosts) and not any(codes), codes
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One client: its argv and standard input."""

    name: str
    argv: list[str]
    stdin: str = ""


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    hosts = [f"127.0.{n // 200}.{n % 200 + 1}" for n in range(options.hosts)]
    with tempfile.TemporaryDirectory(prefix="vlaunch-bench-") as name:
        folder = Path(name)
        port = free_port()
        key, known_hosts = prepare(folder, hosts, port)
        with start(folder, port) as server:
            try:
                table(
                    measure(candidates(folder, hosts, port, key, known_hosts), options.rounds),
                    options.hosts,
                    options.rounds,
                )
            finally:
                server.terminate()


def candidates(
    folder: Path, hosts: list[str], port: int, key: Path, known_hosts: Path
) -> list[Candidate]:
    """Return the candidates, with the same key, known_hosts and width."""
    user = getpass.getuser()
    arguments = [",".join(hosts), str(port), user, str(key), str(known_hosts)]
    options = [
        *("-F", "none", "-p", str(port), "-l", user, "-i", str(key)),
        *(
            f"-oUserKnownHostsFile={known_hosts}",
            "-oBatchMode=yes",
            "-oIdentitiesOnly=yes",
            "-oConnectTimeout=120",
        ),
    ]
    xargs = ["xargs", f"-P{WIDTH}", "-I{}", "ssh", *options, "{}", "true"]
    clush = [
        *find_clush(folder),
        "-q",
        "-f",
        str(WIDTH),
        "-u",
        "120",
        "-w",
        ",".join(hosts),
        "-o",
        " ".join(options),
        "true",
    ]
    return [
        Candidate(
            name="vlaunch", argv=[sys.executable, "-c", f"WIDTH = {WIDTH}\n{VLAUNCH}", *arguments]
        ),
        Candidate(
            name="paramiko threads",
            argv=[sys.executable, "-c", f"WIDTH = {WIDTH}\n{PARAMIKO}", *arguments],
        ),
        Candidate(name=f"xargs -P{WIDTH} ssh", argv=xargs, stdin="\n".join(hosts)),
        Candidate(name="ClusterShell (clush)", argv=clush),
    ]


def measure(clients: list[Candidate], rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds of each candidate in each round; they take turns."""
    spent: dict[str, list[float]] = {client.name: [] for client in clients}
    for number in range(rounds):
        for client in clients[number % len(clients) :] + clients[: number % len(clients)]:
            spent[client.name].append(measure_cpu(client))
            print(
                f"round {number + 1}: {client.name}: {spent[client.name][-1]:.2f} s",
                file=sys.stderr,
            )
    return spent


def measure_cpu(candidate: Candidate) -> float:
    """Run a candidate and return the user + system seconds of its process tree."""
    process = subprocess.Popen(
        candidate.argv,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(candidate.stdin)
    process.stdin.close()
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    process.stdout.close()
    if process.returncode != 0:
        raise SystemExit(f"{candidate.name} failed ({process.returncode}):\n{output[-2000:]}")
    return usage.ru_utime + usage.ru_stime


def table(spent: dict[str, list[float]], hosts: int, rounds: int) -> None:
    """Print the medians and the ratios."""
    medians = {name: statistics.median(values) for name, values in spent.items()}
    base = medians["paramiko threads"]
    print(
        f"Client CPU, one command on {hosts} loopback hosts, {WIDTH} at a time, median of {rounds}"
        " rounds:\n"
    )
    print("| client | CPU per host | against bare paramiko |\n|---|---|---|")
    for name, value in medians.items():
        print(f"| {name} | {value / hosts * 1000:.1f} ms | {value / base:.2f}× |")


def prepare(folder: Path, hosts: list[str], port: int) -> tuple[Path, Path]:
    """Write keys, the server's configuration and a known_hosts for all addresses."""
    for name in ("key", "host_key"):
        keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(keygen, check=True)
    (folder / "authorized_keys").write_text((folder / "key.pub").read_text())
    kind, blob = (folder / "host_key.pub").read_text().split()[:2]
    known_hosts = folder / "known_hosts"
    known_hosts.write_text("".join(f"[{host}]:{port} {kind} {blob}\n" for host in hosts))
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 0.0.0.0\nHostKey {folder}/host_key\nAuthorizedKeysFile"
        f" {folder}/authorized_keys\nStrictModes no\nUsePAM no\nPidFile"
        " none\nPasswordAuthentication no\nMaxStartups 1000\nPrintMotd no\nUseDNS no\n"
    )
    return folder / "key", known_hosts


def start(folder: Path, port: int) -> subprocess.Popen[bytes]:
    """Start sshd and wait until it listens."""
    binary = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if binary is None:
        raise SystemExit("error: sshd is needed\n\nhint: apt-get install -y openssh-server")
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    log = folder / "log"
    server = subprocess.Popen([binary, "-D", "-E", str(log), "-f", str(folder / "sshd_config")])
    while server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return server
    raise SystemExit(log.read_text())


def find_clush(folder: Path) -> list[str]:
    """Return the argv of clush."""
    clush = shutil.which("clush")
    if clush:
        return [clush]
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "ClusterShell",
    ]
    subprocess.run(install, check=True, capture_output=True)
    return [str(folder / "venv" / "bin" / "clush")]


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
