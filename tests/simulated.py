"""Nodes in memory: they answer the commands that vlaunch sends as a Docker host with Ray in its
containers would.

`World.answer` is a handler for `FakeTransport`. Commands that change a node are recorded in
`World.changes`, named by their effect and not by the plan they come from. `docker run` is parsed
with Docker's own grammar, so an argument that Docker would misread is misread by `World` as well.
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
    "front-file",
    "front-replace",
)
RAY_IMAGE = FIXTURES / "image" / "vllm-cpu-0.32.0-ray-2.60.0.json"


def query(argv: Argv) -> str:
    """Return the path of a command's request to an agent; empty for other commands."""
    return argv[-1].removeprefix("http://agent/").partition("?")[0] if "curl" in argv else ""


@dataclass
class Machine:
    """One node's disk and Docker; tests change it directly.

    `files` are relative to the cluster's directory. `survey` replaces parts of the survey's answer
    (`None`: the tool is missing); `inside` replaces fields of a container's view, or all of it when
    it is text. `unreadable` is the error in place of a model's files, `model` maps its files to
    sizes, `config` is its `config.json`. `engine_log` has NCCL's lines. `memory` is the RAM-backed
    directory for secrets, `memory_files` its files, `modes` unexpected modes and owners of secret
    files. `compiled` is the compile cache's file system, then its KiB if it has content. `probed`
    replaces parts of the probe's answer, with exit status, `flags` of the report on engine flags.
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
    memory_files: dict[str, bytes] = field(default_factory=dict)
    modes: dict[str, str] = field(default_factory=dict)
    compiled: str = "ext4"
    probed: dict[str, tuple[str, int]] = field(default_factory=dict)
    flags: Json = field(default_factory=dict)
    front: str = ""  # the configuration that HAProxy has read


class World:
    """The nodes of an inventory; each has the image and nothing else until a test adds it."""

    def __init__(self, inventory: Inventory, *, image: bool = True) -> None:
        self.inventory = inventory
        self.machines = {
            node.name: Machine(node=node, gpus=node.gpus, interface=node.interface or "eth0")
            for node in inventory.nodes
        }
        self.changes: list[Command] = []
        self.fail: dict[tuple[str, str], Answer] = {}
        self.responses: dict[str, Json] = {}
        self.links: dict[tuple[str, str], str] = {}
        self.rates: dict[tuple[str, str], float | list[float]] = {}
        self.reports: dict[str, Json | str] = {}
        self.port_probes: dict[tuple[str, str], Json | str] = {}
        self.jobs: list[Json] = []
        # Status fields of a server, by its name; by default it is starting.
        self.observed: dict[str, Json] = {}
        # Called with a submitted job; may change it and the head's files.
        self.driver: Callable[[Json], None] = lambda job: None
        self._container_count = 0
        if image:
            for machine in self.machines.values():
                machine.images[inventory.image] = image_json(inventory.image)

    def answer(self, command: Command) -> Answer | None:
        """Answer one command; None for a command that vlaunch never sends."""
        machine, argv = self.machines[command.node], command.argv
        if argv[:2] == ("sh", "-c"):
            return self._shell(machine, command)
        if argv[:2] == ("python3", "-c"):
            return self._probe_ports(machine, argv)
        docker = machine.node.docker
        if argv[0] == "cat":
            return Answer(
                node=command.node, code=0, out=machine.files[self._relative(argv[1])].decode()
            )
        if argv[:2] == ("rm", "-f"):
            failed = self._change(machine, command, self._verb(command))
            for path in () if failed else argv[2:]:
                if machine.memory and path.startswith(machine.memory):
                    del machine.memory_files[path.rpartition("/")[2]]
                    continue
                machine.files.pop(path.partition(f"/{self.inventory.cluster}/")[2], None)
            return failed or Answer(node=command.node, code=0)
        if argv[: len(docker)] != docker:
            return None
        return self._docker(machine, command, argv[len(docker) :])

    def sent(self) -> list[tuple[str, Argv]]:
        """Return (node, argv) of every change, in order."""
        return [(command.node, command.argv) for command in self.changes]

    def verbs(self) -> list[str]:
        """Return `node: verb` for every change, in order."""
        return [f"{command.node}: {self._verb(command)}" for command in self.changes]

    def container(self, name: str) -> Json:
        """Return the inspect object of the Ray container of a node."""
        return self.machines[name].containers[f"vlaunch-{self.inventory.cluster}-{name}"]

    def stop(self, name: str, *, code: int = 137) -> None:
        """Stop a node's container as `docker kill` would."""
        self.container(name)["State"] = {
            "Status": "exited",
            "ExitCode": code,
            "Error": "",
            "StartedAt": "",
        }

    def _verb(self, command: Command) -> str:
        if command.argv[:2] == ("sh", "-c"):
            return "keys" if command.argv[3] == "once" else command.argv[3]
        if command.argv[:2] == ("rm", "-f"):
            last = command.argv[2].rpartition("/")[2]
            return {"network.json": "forget", "desired.json": "unwant"}.get(last, "rm")
        rest = command.argv[len(self.machines[command.node].node.docker) :]
        if rest[0] != "exec" or "curl" in rest:
            return query(rest) or rest[0]
        if "USR2" in command.argv[-1]:
            return "reload"
        program = next(argument for argument in rest if argument.startswith("/opt/vlaunch/"))
        return rest[rest.index(program) + 1]

    def _change(self, machine: Machine, command: Command, verb: str) -> Answer | None:
        """Record a change; return the failure that the test planned for it, if any."""
        self.changes.append(command)
        return self.fail.get((machine.node.name, verb))

    def _shell(self, machine: Machine, command: Command) -> Answer | None:
        name, script, rest = machine.node.name, command.argv[3], command.argv[4:]
        if script == "probe":
            out = self.probe(machine, *rest)
            if "sh_c compiled" in command.argv[2]:
                out += f"\n@@vlaunch compiled\n{machine.compiled}\n@@vlaunch rc 0\n"
            return Answer(
                node=name,
                code=0,
                out=out + self._survey(machine, command.stdin()) if command.stdin else out,
            )
        if script in ("secrets", "front"):
            out = self._secrets(machine) if script == "secrets" else self._front_files(machine)
            return self.fail.get((name, script), Answer(node=name, code=0, out=out))
        if script == "once":
            return self._docker(machine, command, ("run", "--rm", *rest))
        if script == "model":
            return self._model(machine, command.argv)
        if script == "batches":
            return Answer(
                node=name,
                code=0,
                out="".join(f"{path.name}/\n" for path in Path(rest[0]).glob("*")),
            )
        if script == "logs":
            return Answer(node=name, code=0, out=machine.logs)
        if script == "verdict":
            return Answer(node=name, code=0, out=machine.files.get("network.json", b"").decode())
        if script == "answered":
            texts = [machine.files.get(self._relative(path), b"").decode() for path in rest]
            return Answer(node=name, code=0, out="".join(f"{text}\n\x1e\n" for text in texts))
        if script in _WRITES:
            failed = self._change(machine, command, script)
            if failed is not None:
                return failed
            self._write(machine, command)
            return Answer(node=name, code=0)
        if script == "left":
            lines = [
                f"container {container['Id'][:12]}" for container in machine.containers.values()
            ]
            lines += [f"directory {rest[0]}"] if machine.files else []
            lines += (
                [f"directory {machine.memory}/{self.inventory.cluster}"]
                if machine.memory_files
                else []
            )
            return Answer(node=name, code=0, out="".join(f"{line}\n" for line in lines))
        return None

    def _write(self, machine: Machine, command: Command) -> None:
        """Apply a plan's script to a machine's files."""
        script, rest, stdin = command.argv[3], command.argv[4:], command.stdin
        if script == "unpack":
            assert stdin is not None
            with tarfile.open(fileobj=io.BytesIO(stdin())) as archive:
                for entry in archive:
                    file = archive.extractfile(entry)
                    machine.files[f"payload/{entry.name}"] = file.read() if file else b""
        elif script == "program":
            assert stdin is not None
            machine.files[self._relative(rest[0])] = stdin()
        elif script in ("store", "extend", "keep"):
            assert stdin is not None
            in_memory = machine.memory and rest[0].startswith(machine.memory)
            files, folder = (machine.memory_files, "") if in_memory else (machine.files, "secrets/")
            name = rest[1] if script == "keep" else f"{folder}{rest[1]}"
            files[name] = stdin() + (files.get(name, b"") if script == "extend" else b"")
        elif script == "front-file":
            assert stdin is not None
            machine.files[self._relative("/".join(rest))] = stdin()
        elif script == "front-replace":
            for path in map(self._relative, rest):
                machine.files[path] = machine.files.pop(f"{path}.new")
        elif script == "forget":
            machine.memory_files.clear()
        elif script == "purge":
            machine.compiled = machine.compiled.partition("\n")[0]
        elif script == "want":
            assert stdin is not None
            machine.files[self._relative("/".join(rest))] = stdin()
        elif script == "clear":
            machine.files.clear()

    def _docker(self, machine: Machine, command: Command, argv: Argv) -> Answer | None:
        name, verb = machine.node.name, argv[0]
        if machine.docker_error:
            return Answer(node=name, code=1, err=machine.docker_error)
        if verb == "run" and "--rm" in argv:
            if "--volumes-from" in argv:
                return self._front_program(machine, command, argv)
            return self._run_once(machine, argv)
        if verb in ("run", "pull", "build", "rm"):
            failed = self._change(machine, command, verb)
            return (
                failed if failed is not None else getattr(self, f"_{verb}")(machine, command, argv)
            )
        if verb == "inspect":
            containers = [
                machine.containers[container]
                for container in argv[3:]
                if container in machine.containers
            ]
            err = "".join(
                f"Error: No such container: {container}\n"
                for container in argv[3:]
                if container not in machine.containers
            )
            return Answer(node=name, code=1 if err else 0, out=json.dumps(containers), err=err)
        if verb == "exec":
            rest = argv[2:] if argv[1] == "--interactive" else argv[1:]
            return self._exec(machine, command, rest[0], rest[1:])
        return None

    def _run_once(self, machine: Machine, argv: Argv) -> Answer | None:
        name = machine.node.name
        if any("nvidia-smi" in argument for argument in argv):
            request = _device_requests(argv[argv.index("--gpus") + 1])[0]
            count = request.get("Count") or len(request["DeviceIDs"])
            lines = "".join(
                f"GPU {index}: NVIDIA H100 80GB HBM3 (UUID: GPU-{index})\n"
                for index in range(min(count, machine.gpus or 0))
            )
            return Answer(node=name, code=0, out=lines + "cuInit 0\n")
        if "/opt/vlaunch/network.pyz" in argv:
            return self._measure_network(machine, argv)
        if "model" in argv:
            return self._model(machine, argv)
        if any("haproxy -c" in argument for argument in argv):
            return self.fail.get((name, "haproxy"), Answer(node=name, code=0))
        program = argv[-1]
        if "RLIMIT_MEMLOCK" in program:
            return self._container_view(machine)
        if "--interactive" in argv and "python3" in argv:
            return self._probe_ports(machine, argv)
        if "vlaunch-image" in program:
            return Answer(node=name, code=0, out=RAY_IMAGE.read_text())
        if 'version("ray")' in program:
            return Answer(node=name, code=0, out=json.dumps({"ray": "2.60.0", "python": "3.12.3"}))
        return None

    def _pull(self, machine: Machine, _: Command, argv: Argv) -> Answer:
        machine.images[argv[-1]] = image_json(argv[-1])
        return Answer(node=machine.node.name, code=0, out=argv[-1])

    def _build(self, machine: Machine, command: Command, argv: Argv) -> Answer:
        assert command.stdin is not None
        tag, label = argv[argv.index("--tag") + 1], argv[argv.index("--label") + 1]
        machine.images[tag] = image_json(
            tag, labels=dict([label.split("=", 1)]), layers=hashlib.sha256(command.stdin())
        )
        return Answer(node=machine.node.name, code=0)

    def _rm(self, machine: Machine, _: Command, argv: Argv) -> Answer:
        assert argv[1:3] == ("--force", "--volumes")
        for identifier in argv[3:]:
            matches = [
                name
                for name, container in machine.containers.items()
                if identifier in (name, container["Id"])
            ]
            if not matches:
                return Answer(
                    node=machine.node.name, code=1, err=f"Error: No such container: {identifier}"
                )
            del machine.containers[matches[0]]
        return Answer(node=machine.node.name, code=0)

    def _run(self, machine: Machine, _: Command, argv: Argv) -> Answer:
        container = parse_run(argv)
        name = machine.node.name
        if container["Name"].lstrip("/") in machine.containers:
            return Answer(
                node=name,
                code=125,
                err=f'docker: Conflict. The container name "{container["Name"]}" is already in use',
            )
        if container["Config"]["Image"] not in machine.images:
            return Answer(
                node=name,
                code=125,
                err=f"Unable to find image '{container['Config']['Image']}' locally",
            )
        image = machine.images[container["Config"]["Image"]]["Config"]
        self._container_count += 1
        container["Id"] = hashlib.sha256(f"{name}-{self._container_count}".encode()).hexdigest()
        container["Config"]["Env"] += [
            variable
            for variable in image["Env"]
            if variable.split("=")[0] not in _variable_names(container["Config"]["Env"])
        ]
        container["Config"]["Labels"] = {**image["Labels"], **container["Config"]["Labels"]}
        machine.containers[container["Name"].lstrip("/")] = container
        if container["Name"].endswith("-front"):
            self._load_front(machine)
        return Answer(node=name, code=0, out=container["Id"])

    def _load_front(self, machine: Machine) -> Answer:
        """Let HAProxy read its configuration."""
        machine.front = machine.files["server/.front/haproxy.cfg"].decode()
        return Answer(node=machine.node.name, code=0)

    def _front_files(self, machine: Machine) -> str:
        """Return the digests of the front's files, its certificate, and its keys."""
        names = [name for name in machine.files if name.startswith(("front/", "server/.front/"))]
        lines = [f"{hashlib.sha256(machine.files[name]).hexdigest()}  /x/{name}" for name in names]
        pem = machine.files.get("front/tls.pem", b"").decode().partition("-----BEGIN PRIVATE")[0]
        keys = machine.files.get("server/.front/keys.map")
        listed = [f"key {line}" for line in (keys or b"").decode().splitlines()]
        return "\n".join([*lines, pem, *listed, *(["keys"] if keys is not None else [])])

    def _front_program(self, machine: Machine, command: Command, argv: Argv) -> Answer:
        """Do to the map of keys what the front's program does."""
        name, path = machine.node.name, "server/.front/keys.map"
        front = argv[argv.index("--volumes-from") + 1]
        if front not in machine.containers or path not in machine.files:
            return Answer(node=name, code=125, err=f"Error: No such container: {front}")
        lines = machine.files[path].decode().splitlines()
        verb, *words = argv[argv.index("python3") + 6 :]
        if failed := self.fail.get((name, "key program")):
            return failed
        if verb == "status":
            digest = machine.front.partition("description ")[2][:12]
            info = f"description: {digest}\n" if digest else None
            status = {"keys": machine.files[path].decode(), "info": info}
            return Answer(node=name, code=0, out=json.dumps(status))
        if failed := self._change(machine, command, verb):
            return failed
        if verb == "add":
            lines = list(dict.fromkeys([*lines, " ".join(words)]))
        else:
            gone = {line.split()[0] for line in lines if f" {words[0]}:" in line} | {*words[1:]}
            lines = [line for line in lines if line.split()[0] not in gone]
            lines = list(
                dict.fromkeys([*lines, *(f"# revoked {digest}" for digest in sorted(gone))])
            )
        machine.files[path] = "".join(f"{line}\n" for line in lines).encode()
        return Answer(node=name, code=0)

    def _exec(self, machine: Machine, command: Command, name: str, argv: Argv) -> Answer | None:
        node = machine.node.name
        container = machine.containers.get(name)
        if container is None or container["State"]["Status"] != "running":
            return Answer(
                node=node,
                code=1,
                err=f"Error response from daemon: Container {name} is not running",
            )
        if argv[:2] == ("python3", "-c") and "RLIMIT_MEMLOCK" in argv[2]:
            return self._container_view(machine)
        if "USR2" in argv[-1]:
            return self._change(machine, command, "reload") or self._load_front(machine)
        if argv[:2] == ("python3", "-c") and "peers" in argv[-1]:
            return self._probe_ports(machine, argv)
        if argv[:2] == ("python3", "-c") and "socket" in argv[2]:
            ours = self.inventory.ports
            ports = (
                ours.gcs,
                ours.group,
                *(server["desired"]["port"] for server in self.servers()),
            )
            return Answer(
                node=node, code=0 if any(f", {port})" in argv[2] for port in ports) else 1
            )
        if "/opt/vlaunch/network.pyz" in argv:
            return self._measure_network(machine, argv)
        if argv[0] == "curl":
            return self._answer_request(machine, command, argv)
        if argv[:2] == ("python3", "/opt/vlaunch/batch.pyz"):
            return self._run_desk(machine, command, argv)
        if argv == ("ray", "status"):
            return Answer(node=node, code=0, out=self._ray_status())
        return self._exec_shell(machine, argv)

    def _exec_shell(self, machine: Machine, argv: Argv) -> Answer | None:
        if argv[:2] != ("sh", "-c"):
            return None
        if argv[3] == "model":
            return self._model(machine, argv)
        if "vlaunch-engine-flags" in " ".join(argv):
            return self._flags(machine)
        outputs = {"log": machine.engine_log, "bounded": " ".join(argv[5:]) + "\n"}
        if argv[3] not in outputs:
            return None
        return Answer(node=machine.node.name, code=0, out=outputs[argv[3]])

    def _flags(self, machine: Machine) -> Answer:
        """Answer as `tools/engine_flags/parser.py`."""
        good: Json = {"mark": "vlaunch-engine-flags", "mistakes": [], "similar": {}}
        report = {**good, "vllm": "0.32.0", "ray": "2.60.0", **machine.flags}
        return Answer(node=machine.node.name, code=0, out=f"a log\n{json.dumps(report)}\n")

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
        response = self.responses.get(f"{path} on {name}") or self._payload(path)
        return Answer(
            node=name,
            code=22 if "error" in response and "servers" not in response else 0,
            out=json.dumps(response) + "\n",
        )

    def _relative(self, path: str) -> str:
        """Return a path relative to the cluster's directory: a key of `Machine.files`."""
        return path.partition(f"/{self.inventory.cluster}/")[2]

    def servers(self) -> list[Json]:
        """Return the head's servers: each is starting unless `observed` has another status."""
        servers = []
        for path, data in sorted(self.machines[self.inventory.head.name].files.items()):
            if path.startswith("server/") and path.endswith("/desired.json"):
                spec = json.loads(data)
                status = {key: spec[key] for key in ("name", "id", "asked", "model")} | {
                    "version": 2,
                    "state": "starting",
                    "verdict": "starting",
                }
                status |= self.observed.get(spec["name"], {})
                servers.append(
                    {"name": spec["name"], "desired": spec, "observed": status, "age": 1.0}
                )
        return servers

    def head_report(self) -> Json:
        """Return the head's servers and connected agents."""
        up = [
            name
            for name, machine in self.machines.items()
            if _is_running(self._ray_container(machine))
        ]
        return {"servers": self.servers(), "members": dict.fromkeys(up, 1.0), "agent": 0.5}

    def _ray_container(self, machine: Machine) -> Json:
        return machine.containers.get(f"vlaunch-{self.inventory.cluster}-{machine.node.name}", {})

    def _run_desk(self, machine: Machine, command: Command, argv: Argv) -> Answer:
        """Run the program itself on local files: `hf_home` must be a folder of the test's."""
        node, verb = machine.node.name, argv[2]
        if verb in ("put", "remove"):
            failed = self._change(machine, command, verb)
            if failed is not None:
                return failed
        if verb in self.responses:
            return Answer(
                node=node,
                code=1 if "error" in self.responses[verb] else 0,
                out=json.dumps(self.responses[verb]),
            )
        if verb == "follow":
            return Answer(node=node, code=0, out=json.dumps(self._follow_job(argv)))
        stdin = command.stdin() if command.stdin is not None else b""
        # In this process: starting one per command would take longer than the rest of the test.
        # tests/network/probe starts it as a program.
        out = io.StringIO()
        stream = io.TextIOWrapper(io.BytesIO(stdin))
        with (
            mock.patch.multiple(sys, argv=list(argv[1:]), stdin=stream),
            contextlib.redirect_stdout(out),
        ):
            code = desk.main()
        return Answer(node=node, code=code, out=out.getvalue())

    def _follow_job(self, argv: Argv) -> Json:
        """Answer `follow` with the job's state and its `log`."""
        job_id, offset = argv[argv.index("--job") + 1], int(argv[argv.index("--offset") + 1])
        job = next(
            (entry for entry in self.jobs if entry["submission_id"] == job_id),
            {"status": "ABSENT"},
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

    def network(self, machine: Machine, argv: Argv) -> Json:
        """Return the network probe's report: one rank, links from `links`, TCP by default."""
        nodes = [item.partition("=")[0] for item in argv[argv.index("--nodes") + 1].split(",")]
        name, backend = machine.node.name, argv[argv.index("--backend") + 1]
        peers = [peer for peer in nodes if peer != name]
        logs, rates = {}, {peer: self._rate(peer, name) for peer in peers}
        for peer in peers:
            via = self.links.get((name, peer), self.links.get((peer, name), "NET/Socket/0"))
            direction = (
                "0[0] -> 1[0] [send]"
                if nodes.index(name) < nodes.index(peer)
                else "0[0] -> 1[0] [receive]"
            )
            logs[peer] = f"{name}:7:9 [0] NCCL INFO Channel 00/0 : {direction} via {via}\n"
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
        """Return the bandwidth of one direction; a list gives its next value per measurement."""
        rate = self.rates.get((source, target), 2e9)
        return rate.pop(0) if isinstance(rate, list) else rate

    def _measure_network(self, machine: Machine, argv: Argv) -> Answer:
        name = machine.node.name
        report = self.reports.get(name, {})
        if isinstance(report, str):
            return Answer(node=name, code=1, err=report)
        return Answer(node=name, code=0, out=json.dumps({**self.network(machine, argv), **report}))

    def _container_view(self, machine: Machine) -> Answer:
        good: Json = {
            "memlock": None,
            "memlock_unlimited": True,
            "ipc_lock": True,
            "infiniband": ["uverbs0"],
            "libibverbs": "/usr/lib/libibverbs.so.1",
            "python": "3.12.3",
            "ray": "2.60.0",
            "vllm": "0.32.0",
        }
        if isinstance(machine.inside, str):
            return Answer(node=machine.node.name, code=0, out=machine.inside)
        return Answer(node=machine.node.name, code=0, out=json.dumps({**good, **machine.inside}))

    def _probe_ports(self, machine: Machine, argv: Argv) -> Answer:
        """Answer as `hosts/node/pairs.py`: all ports are open unless `port_probes` differs."""
        request, name, peers = json.loads(argv[-1]), machine.node.name, {}
        for peer in request["peers"]:
            probe = self.port_probes.get((name, peer["name"]), {})
            if isinstance(probe, str):
                return Answer(node=name, code=1, err=probe)
            ports = {str(port): "open" for port in (*peer["ports"], request["port"])}
            good = {
                "ports": ports,
                "bulk": True,
                "largest": request["mtu"],
                "errors": {},
                "heard": True,
            }
            peers[peer["name"]] = {**good, **probe}
        return Answer(node=name, code=0, out=json.dumps({"mtu": request["mtu"], "peers": peers}))

    def _model(self, machine: Machine, argv: Argv) -> Answer:
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
        job = json.loads(command.stdin())
        self.jobs.append({**job, "status": "RUNNING", "message": ""})
        self.driver(self.jobs[-1])
        return Answer(node=machine.node.name, code=0, out="{}")

    def _survey(self, machine: Machine, clock: bytes) -> str:
        """Return a survey's additions to the probe's answer, for a healthy node."""
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
        outputs = {name: (text or "", 127 if text is None else 0) for name, text in parts.items()}
        return "".join(
            f"\n@@vlaunch {name}\n{text}\n@@vlaunch rc {code}\n"
            for name, (text, code) in outputs.items()
        )

    def _secrets(self, machine: Machine) -> str:
        """Return the listing of the secret files: a minute old, with the right modes."""
        state = f"{machine.home}/.vlaunch/{self.inventory.cluster}/secrets"
        on_disk = [
            name.removeprefix("secrets/") for name in machine.files if name.startswith("secrets/")
        ]
        lines = []
        for place, folder, names in (
            ("disk", state, on_disk),
            (
                "memory",
                f"{machine.memory}/{self.inventory.cluster}/secrets",
                [*machine.memory_files],
            ),
        ):
            lines += [f"{place} 700 0 0 940 {folder}"] if names else []
            lines += [
                f"{place} {machine.modes.get(name, '600 0')} 0 940 {folder}/{name}"
                for name in names
            ]
        secrets = {name.removeprefix("secrets/"): data for name, data in machine.files.items()}
        public = _certificates(secrets if "AGENT_CA" in secrets else machine.memory_files)
        return "\n".join(["", "@@secrets 1000 0 -", *lines, "@@secrets end", public])

    def _payload(self, verb: str) -> Json:
        answers: Json = {
            "nodes": {"nodes": self.ray_table(), "status": self._ray_status(), "unreachable": []},
            "jobs": {
                "jobs": self.jobs,
                "nodes": self.ray_table(),
                "actors": [],
                **self.head_report(),
            },
            "servers": self.head_report(),
            "counts": {"apis": {}, **self.head_report()},
            "watch": {"log": "", "offset": 0, "anew": False, **self.head_report()},
        }
        return self.responses[verb] if verb in self.responses else dict(answers[verb])

    def ray_table(self) -> list[Json]:
        """Return Ray's table of nodes: a row per running Ray container, from its command."""
        rows: list[Json] = []
        for machine in self.machines.values():
            container = self._ray_container(machine)
            if (
                not _is_running(container)
                or not machine.joins
                or "--num-gpus" not in (argv := container["Config"]["Cmd"])
            ):
                continue
            resources = {"GPU": float(argv[argv.index("--num-gpus") + 1]), "CPU": 8.0}
            rows.append(
                {
                    "node_id": machine.node.name,
                    "is_head_node": machine.node.head,
                    "state": "ALIVE",
                    "state_message": None,
                    "node_ip": machine.ray_ip or argv[argv.index("--node-ip-address") + 1],
                    "resources_total": resources,
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
        """Return the probe script's output on this machine."""
        images, docker = rest[: int(count)], rest[int(count) :]
        assert docker == machine.node.docker
        assert cluster == self.inventory.cluster
        derived = [
            name
            for name, image in machine.images.items()
            if "vlaunch.image.content" in image["Config"]["Labels"]
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
            ("kept", "\n".join(machine.memory_files), 0 if machine.memory_files else 1),
            (
                "folders",
                f"{machine.memory}/{self.inventory.cluster}" if machine.memory_files else "",
                0,
            ),
            (
                "token",
                (
                    secrets.get("RAY_AUTH_TOKEN") or machine.memory_files.get("RAY_AUTH_TOKEN", b"")
                ).decode(),
                0,
            ),
            ("secrets", "\n".join(secrets), 0),
            (
                "certificates",
                _certificates(secrets if "AGENT_CA" in secrets else machine.memory_files),
                0,
            ),
            (
                "front",
                machine.files.get("front/tls.pem", b"").decode().partition("-----BEGIN PRIVATE")[0],
                0,
            ),
            ("docker", '{"Version": "28.3.0"}' if good else machine.docker_error, 0 if good else 1),
            ("info", json.dumps(info) if good else machine.docker_error, 0 if good else 1),
            *(
                (
                    f"image {name}",
                    json.dumps([machine.images[name]]) if name in machine.images else "[]\nError",
                    0 if name in machine.images else 1,
                )
                for name in dict.fromkeys((*images, *derived))
            ),
            (
                "containers",
                json.dumps(list(machine.containers.values())) if machine.containers else "",
                0,
            ),
        ]
        outputs = {name: (text, code) for name, text, code in parts} | machine.probed
        return "".join(
            f"\n@@vlaunch {name}\n{text}\n@@vlaunch rc {code}\n"
            for name, (text, code) in outputs.items()
        )


def image_json(name: str, *, labels: dict[str, str] | None = None, layers: Any = None) -> Json:
    """Return an image's `docker image inspect`; its layers derive from its name."""
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


def parse_run(argv: Argv) -> Json:
    """Parse `docker run …` as Docker's client does, into the fields of `docker inspect`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--detach", action="store_true")
    parser.add_argument("--privileged", action="store_true")
    for single in (
        "name",
        "network",
        "user",
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
    options = parser.parse_args(argv[1:])
    labels = dict(label.split("=", 1) for label in options.label)
    assert options.detach
    return {
        "Id": "",
        "Name": f"/{options.name}",
        "RestartCount": 0,
        "State": {
            "Status": "running",
            "ExitCode": 0,
            "Error": "",
            "StartedAt": "2026-11-20T19:30:50Z",
        },
        "HostConfig": {
            "NetworkMode": options.network,
            "IpcMode": options.ipc,
            "Tmpfs": options.tmpfs,
            "ShmSize": options.shm_size,
            "Binds": options.volume,
            "RestartPolicy": {"Name": options.restart},
            "CapAdd": options.cap_add,
            "Privileged": options.privileged,
            "LogConfig": {"Type": options.log_driver or "json-file", "Config": options.log_opt},
            "GroupAdd": options.group_add,
            "SecurityOpt": options.security_opt,
            "Ulimits": options.ulimit,
            "Devices": options.device,
            "DeviceRequests": None if options.gpus is None else _device_requests(options.gpus),
        },
        "Config": {
            "Image": options.image,
            "Env": list(options.env),
            "Cmd": options.command,
            "Entrypoint": [options.entrypoint],
            "Labels": labels,
        },
    }


def _certificates(secrets: Mapping[str, bytes]) -> str:
    """Return the certificates without their private keys."""
    texts = (secrets.get(name, b"").decode() for name in ("AGENT_CA", "AGENT_CERTIFICATE"))
    return "".join(text.partition("-----BEGIN PRIVATE KEY")[0] for text in texts)


def _device_requests(gpus: str) -> list[Json]:
    """Return Docker's device requests for a value of `--gpus`."""
    ids = gpus.strip('"').removeprefix("device=").split(",") if "device=" in gpus else None
    devices: Json = {"DeviceIDs": ids} if ids else {"Count": int(gpus)}
    return [{"Driver": "", "Capabilities": [["gpu"]], **devices}]


def _is_running(container: Json) -> bool:
    return bool(container) and container["State"]["Status"] == "running"


def _variable_names(env: list[str]) -> set[str]:
    return {variable.split("=")[0] for variable in env}
