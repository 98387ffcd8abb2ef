"""The supervisor of a server, run as Ray runs it, over stand-ins for Ray's dashboard and for vLLM."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.payload.test_head import Server

pytestmark = pytest.mark.processes

FOLDER = Path(__file__).parents[2] / "launcher" / "payload"
ID = f"{os.getpid():08x}"  # nobody else's: tests that run at the same time see each other's processes
JOB, NEXT = f"serve-{ID}-1", f"serve-{ID}-2"
PATIENCE = 20.0

# Stands for vLLM: an API that does what the file `mode` says, ends when the file `exit` is there, and counts.
ENGINE = r"""
import json, os, pathlib, socketserver, sys, time  # and not http.server, which takes longer to import than all the rest
here, port, count = pathlib.Path(sys.argv[1]), int(sys.argv[2]), 0
with open(here / "starts", "a") as file:
    file.write(f"{os.getpid()}\n")
if (here / "exit").exists():
    print("ValueError: there is no such option", flush=True)
    sys.exit(int((here / "exit").read_text()))
class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        global count
        path = self.rfile.readline().split()[1].decode()
        headers = dict(line.lower().split(b":", 1) for line in iter(self.rfile.readline, b"\r\n"))
        self.rfile.read(int(headers.get(b"content-length", 0)))
        mode = (here / "mode").read_text() if (here / "mode").exists() else "ok"
        status, said = 200, ""
        replica = headers.get(b"x-data-parallel-rank", b"").strip()
        if mode in ("busy", "half", "half-busy"):
            count += 1
        if path == "/health":
            status = 503 if mode == "dead" else 200
        elif path == "/metrics":
            said = "" if mode == "uncounted" else (f'vllm:generation_tokens_total{{engine="0"}} {count}.0\n'
                    f'vllm:generation_tokens_total{{engine="1"}} {count if mode == "half-busy" else 0}.0\n'
                    'vllm:request_success_total{finished_reason="abort"} %s\n' % time.time() +
                    'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\n')
        elif path == "/v1/models":
            said = json.dumps({"data": [{"id": "m"}]})
        elif mode in ("hang", "busy", "uncounted") or (mode in ("half", "half-busy") and replica == b"1"):
            time.sleep(3)
        elif mode == "dead":
            status, said = 500, '{"error": "EngineDeadError"}'
        elif mode == "odd":
            status, said = 500, "{}"
        else:
            said = json.dumps({"choices": [{"message": {"content": "Hi"}}], "usage": {"completion_tokens": 1}})
        try:
            self.wfile.write(f"HTTP/1.0 {status} Said\r\n\r\n{said}".encode())
        except OSError:
            pass
class Api(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
Api(("127.0.0.1", port), Handler).serve_forever()
"""


def rows(*found: dict[str, Any]) -> dict[str, Any]:
    return {"data": {"result": {"result": list(found)}}}


def node(number: int, state: str = "ALIVE", gpus: float = 1.0, id: str = "") -> dict[str, Any]:
    """Return a row of Ray's node table."""
    return {
        "node_id": id or f"id{number}", "node_ip": f"127.0.0.{number}", "state": state, "resources_total": {"GPU": gpus},
        "state_message": "health check failed" if state == "DEAD" else None,
    }  # fmt: skip


def rank(number: int, state: str = "ALIVE", **more: Any) -> dict[str, Any]:
    """Return a row of Ray's actor table."""
    return {
        "actor_id": f"a{number}", "name": f"vllm_Worker_17_PP{number}", "state": state, "job_id": "05000000",
        "node_id": f"id{number + 1}", "placement_group_id": "g", **more,
    }  # fmt: skip


@dataclass
class Stage:
    """A folder of the record, a fake Ray, and the supervisors that were started."""

    ray: Server
    folder: Path
    api: int
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def wanted(self, **policy: float) -> dict[str, Any]:
        """Write down what is wanted."""
        wanted: dict[str, Any] = {
            "version": 1, "id": ID, "backend": "ray", "model": "m", "env": {"MARK": f"of {JOB}"}, "image": "i",
            "argv": [sys.executable, "-c", ENGINE, str(self.folder), str(self.api)], "metadata": {"vlaunch.model": "m"},
            "cluster": {"nodes": {"127.0.0.1": 1, "127.0.0.2": 1}, "needs": 2, "port": 0},
            "api": {"host": "127.0.0.1", "port": self.api}, "dashboard": self.ray.port, "supervise": True, "job": JOB,
            "policy": {
                "canary": 0.1, "timeout": 0.4, "restarts": 2, "window": 3600, "grace": 3, "start_timeout": 8, "stuck": 0.9,
                **policy,
            },
        }  # fmt: skip
        (self.folder / "wanted.json").write_text(json.dumps(wanted))
        return wanted

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start the supervisor; its output is the log of the job."""
        log = (self.folder / f"job-driver-{JOB}.log").open("a")
        process = subprocess.Popen(
            [sys.executable, str(FOLDER / "supervisor.py"), *(words or ("run", "--job", JOB))],
            stdout=log, stderr=subprocess.STDOUT, text=True,
            env={
                **os.environ, "VLAUNCH_STATE": str(self.folder), "VLAUNCH_RAY_LOGS": str(self.folder),
                "VLAUNCH_SECRETS": str(self.folder / "none"), "VLAUNCH_MOUNTS": str(self.folder / "mounts"),
                "VLAUNCH_JOB": JOB if "run" in words or not words else "",
            },
        )  # fmt: skip
        log.close()
        self.started.append(process)
        return process

    @property
    def log(self) -> str:
        """What the supervisor and the engine printed."""
        return (self.folder / f"job-driver-{JOB}.log").read_text()

    @property
    def said(self) -> dict[str, Any]:
        """The record."""
        try:
            found: dict[str, Any] = json.loads((self.folder / "server.json").read_text())
        except FileNotFoundError:
            found = {"state": "", "faults": [], "restarts": []}
        return found

    @property
    def engines(self) -> list[int]:
        """The processes of every engine that was started."""
        file = self.folder / "starts"
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def is_wanted(self) -> bool:
        """Whether wanted.json is there."""
        return (self.folder / "wanted.json").exists()

    def container(self, digit: str) -> None:
        """Be in a container with such an id from now on, as Docker shows it with the host's network, on a disk of its own."""
        volume, own = f"/var/lib/docker/volumes/{'0' * 64}/_data", f"containers/{digit * 64}"
        lines = [
            "267 35 0:65 / / rw,relatime - overlay overlay rw",
            "268 267 0:67 / /proc rw,nosuid - proc proc rw",
            f"284 267 254:0 {volume}/{own}/resolv.conf /etc/resolv.conf rw,relatime - ext4 /dev/vda rw",
            f"285 267 254:0 {volume}/{own}/hostname /etc/hostname rw,relatime - ext4 /dev/vda rw",
        ]
        (self.folder / "mounts").write_text("".join(f"{line}\n" for line in lines))

    def mode(self, mode: str) -> None:
        """Make the engine behave."""
        (self.folder / "mode.new").write_text(mode)
        (self.folder / "mode.new").replace(self.folder / "mode")

    def until(self, true: Callable[[], object], what: str = "") -> None:
        """Wait for a condition."""
        deadline = time.monotonic() + PATIENCE
        while not true():
            assert time.monotonic() < deadline, f"{what or 'waited'}: {self.said}\n{self.log}"
            time.sleep(0.02)

    def until_ready(self, engines: int = 1) -> None:
        """Wait until so many engines were started and the last one has answered, and a canary came back since."""
        since = time.time()
        self.until(lambda: len(self.engines) == engines and self.said["state"] == "ready", f"ready {engines}")
        self.until(lambda: (self.said["canary"] or {"at": 0})["at"] >= since, "a canary")

    def actors(self, *found: dict[str, Any]) -> None:
        """Set Ray's actors: the table is filtered as Ray does."""
        self.ray.tables["/api/v0/actors"] = list(found)


class Dashboard(Server):
    """A server that filters Ray's tables by the query, as the dashboard does."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[str, list[dict[str, Any]]] = {}
        handler: Any = self.http.RequestHandlerClass
        answer = handler._answer

        def filtered(this: Any) -> None:
            path, _, query = this.path.partition("?")
            if path in self.tables:
                words = dict(each.partition("=")[::2] for each in query.split("&"))
                key, value = words.get("filter_keys"), words.get("filter_values")
                self.answers[path] = rows(*(row for row in self.tables[path] if key is None or row.get(key) == value))
            answer(this)

        handler.do_GET = handler.do_POST = filtered


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Dashboard() as ray, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
        free.close()
        made = Stage(ray=ray, folder=tmp_path, api=port)
        ray.tables |= {
            "/api/v0/nodes": [node(1), node(2)],
            "/api/v0/actors": [rank(0), rank(1)],
            "/api/v0/placement_groups": [],
        }
        ray.answers[f"/api/jobs/{JOB}"] = {"submission_id": JOB, "status": "RUNNING", "job_id": "05000000"}
        ray.answers["/api/jobs/"] = []
        made.wanted()
        made.container("a")
        yield made
        for process in made.started:
            process.kill()
            process.wait()
        for pid in made.engines:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def gone(pid: int) -> bool:
    """Return whether a process has ended; who has to reap it may be slow."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_ready_by_a_completion(stage: Stage) -> None:
    """What has answered is remembered; canaries are noted with the requests that were there."""
    stage.start()
    stage.until_ready()
    (last,) = json.loads((stage.folder / "answered.json").read_text())

    assert (last["wanted"]["id"], stage.said["job"], stage.said["restarts_left"]) == (ID, JOB, 2)
    assert (stage.said["faults"], stage.said["canary"]["in_flight"]) == ([], 3)


def test_a_first_start_that_fails_is_not_tried_again(stage: Stage) -> None:
    """A mistake in the arguments is the user's to mend: the job fails with vLLM's own exit code, and nobody wants it again."""
    (stage.folder / "exit").write_text("2")
    process = stage.start()

    assert process.wait(PATIENCE) == 2
    assert (len(stage.engines), stage.said["state"], stage.is_wanted()) == (1, "stopped", False)
    assert "never answered" in stage.said["doing"]


def test_an_image_without_vllm(stage: Stage) -> None:
    """The job ends as a shell would end it."""
    wanted = stage.wanted()
    (stage.folder / "wanted.json").write_text(json.dumps({**wanted, "argv": ["/no/vllm", "serve"]}))
    process = stage.start()

    assert process.wait(PATIENCE) == 127
    assert "/no/vllm: No such file" in stage.log
    assert not stage.is_wanted()
    assert (stage.said["state"], stage.said["doing"]) == ("stopped", "/no/vllm: No such file or directory")


def test_an_engine_that_is_killed_comes_back(stage: Stage) -> None:
    """What happened is written down with how long it took, and the job's log says where another engine begins."""
    stage.start()
    stage.until_ready()
    os.kill(stage.engines[0], signal.SIGKILL)
    stage.until_ready(2)
    (fault,) = stage.said["faults"]

    assert fault["what"] == "vLLM was killed by signal 9"
    assert 0 < fault["ready_again_after"] < PATIENCE
    assert (fault["in_flight"], stage.said["restarts_left"]) == (3, 1)
    assert "vlaunch supervisor: starting the engine again (restart 1 of 2" in stage.log


def test_what_a_recovery_took_is_told_by_phases(stage: Stage) -> None:
    """Each is so many seconds after the fault; of two looks at a cluster that is whole, nobody waits after the second."""
    stage.wanted(canary=1)
    stage.start()
    stage.until_ready()
    os.kill(stage.engines[0], signal.SIGKILL)
    stage.until_ready(2)
    (fault,) = stage.said["faults"]
    phases = fault["phases"]

    assert list(phases) == ["stopped", "whole", "started"]
    assert 0 <= phases["stopped"] < phases["whole"] <= phases["started"] < fault["ready_again_after"]
    assert phases["whole"] - phases["stopped"] < 1.9


def test_every_fault_of_an_outage_ends_with_it(stage: Stage) -> None:
    """A restart that fails is a fault of its own; how long nothing answered is told of the first."""
    stage.wanted(restarts=50)
    stage.start()
    stage.until_ready()
    (stage.folder / "exit").write_text("1")
    os.kill(stage.engines[0], signal.SIGKILL)
    stage.until(lambda: len(stage.said["faults"]) >= 2, "a restart that fails")
    (stage.folder / "exit").unlink()
    stage.until(lambda: stage.said["state"] == "ready", "ready")
    first, *others = [fault["ready_again_after"] for fault in stage.said["faults"]]

    assert first > max(others)


@pytest.mark.parametrize(("mode", "what"), [("dead", "its API answers 500"), ("odd", "its API answers 500")])
def test_an_engine_that_refuses_is_dead(stage: Stage, mode: str, what: str) -> None:
    """EngineDeadError is death at once; an odd 500 is asked again before it is."""
    stage.start()
    stage.until_ready()
    stage.mode(mode)
    stage.until(lambda: stage.said["faults"], "a fault")
    stage.mode("ok")
    stage.until_ready(2)

    assert stage.said["faults"][0]["what"] == what
    assert gone(stage.engines[0])


def test_a_dead_rank_is_named(stage: Stage) -> None:
    """With its node and Ray's own words; that the others were ended with it is no cause."""
    stage.start()
    stage.until_ready()
    ended = {"actor_died_error_context": {"error_message": "The actor is dead because its owner has died."}}
    killed = {"actor_died_error_context": {"error_message": "Worker died: connection error code 2. End of file."}}
    stage.actors(rank(0, "DEAD", death_cause=ended), rank(1, "DEAD", death_cause=killed))
    stage.until(lambda: stage.said["faults"], "a fault")
    stage.actors(rank(0), rank(1))
    stage.until_ready(2)
    fault = stage.said["faults"][0]

    assert (fault["what"], fault["rank"], fault["node"]) == ("a rank is dead", "PP1", "127.0.0.2")
    assert "connection error code 2" in fault["evidence"]


def test_a_node_that_ray_still_thinks_alive_is_named(stage: Stage) -> None:
    """The engine is quicker and has ended its other rank: not that one is to blame, but the node where nobody listens."""
    wanted = stage.wanted()
    wanted["cluster"]["port"] = stage.ray.port  # it listens on 127.0.0.1 alone
    (stage.folder / "wanted.json").write_text(json.dumps(wanted))
    stage.start()
    stage.until_ready()
    ended = {"actor_died_error_context": {"error_message": "The actor is dead because it was killed by `ray.kill`."}}
    stage.actors(rank(0, "DEAD", death_cause=ended), rank(1))
    stage.until(lambda: stage.said["faults"], "a fault")
    fault = stage.said["faults"][0]

    assert (fault["what"], fault["rank"], fault["node"]) == ("a node with ranks is gone", "PP1", "127.0.0.2")


def test_an_engine_that_ends_its_ranks_blames_none(stage: Stage) -> None:
    """All nodes are there: what the log says is the evidence."""
    stage.start()
    stage.until_ready()
    with (stage.folder / f"job-driver-{JOB}.log").open("a") as log:
        log.write("RuntimeError: out of luck\n")
    ended = {"actor_died_error_context": {"error_message": "The actor is dead because its owner has died."}}
    stage.actors(rank(0, "DEAD", death_cause=ended), rank(1, "DEAD", death_cause=ended))
    stage.until(lambda: stage.said["faults"], "a fault")
    fault = stage.said["faults"][0]

    assert (fault["what"], fault["rank"], fault["node"]) == ("the engine has ended its ranks", "", "")
    assert "RuntimeError: out of luck" in fault["evidence"]


def test_a_rank_that_only_the_log_names(stage: Stage) -> None:
    """Its container is back already, and Ray has not missed it: vLLM has, and has ended the other rank."""
    stage.start()
    stage.until_ready()
    with (stage.folder / f"job-driver-{JOB}.log").open("a") as log:
        log.write(
            "(EngineCore pid=2524) ERROR 11-20 17:45:22 [ray_executor_v2.py:522] RayWorkerProc rank=[1] died unexpectedly, "
            "shutting down executor.\n"
        )
    ended = {"actor_died_error_context": {"error_message": "The actor is dead because it was killed by `ray.kill`."}}
    stage.actors(rank(0, "DEAD", death_cause=ended), rank(1))
    stage.until(lambda: stage.said["faults"], "a fault")
    fault = stage.said["faults"][0]

    assert (fault["rank"], fault["node"]) == ("PP1", "127.0.0.2")
    assert "rank=[1] died unexpectedly" in fault["evidence"]


def test_a_node_that_went_away_is_waited_for(stage: Stage) -> None:
    """However long it takes: what is waited for is said, and no restart is used up meanwhile."""
    stage.start()
    stage.until_ready()
    stage.ray.tables["/api/v0/nodes"] = [node(1), node(2, "DEAD")]
    stage.until(lambda: "waiting for 127.0.0.2" in stage.said["doing"], "waiting")
    waiting = stage.said
    stage.ray.tables["/api/v0/nodes"] = [node(2), node(1), node(2, "DEAD")]  # it left its dead row behind
    stage.until_ready(2)

    assert (waiting["state"], waiting["restarts"], len(stage.said["restarts"])) == ("recovering", [], 1)
    assert (waiting["faults"][0]["node"], waiting["faults"][0]["evidence"]) == ("127.0.0.2", "health check failed")


def test_a_spare_node_is_not_waited_for(stage: Stage) -> None:
    """An engine that fits on the others comes back without it, and one that leaves while it starts is no fault."""
    wanted = stage.wanted()
    wanted["cluster"]["needs"] = 1
    (stage.folder / "wanted.json").write_text(json.dumps(wanted))
    stage.actors(rank(0))
    stage.ray.tables["/api/v0/nodes"] = [node(1), node(2, "DEAD")]
    stage.start()
    stage.until_ready()
    stage.mode("hang")
    os.kill(stage.engines[0], signal.SIGKILL)
    stage.until(lambda: len(stage.engines) == 2, "a second engine")
    time.sleep(0.5)
    stage.mode("ok")
    stage.until_ready(2)

    assert len(stage.said["faults"]) == 1


@pytest.mark.parametrize(
    ("needs", "dp", "places", "waits"),
    [
        (2, 1, "", "127.0.0.2"),
        (1, 1, "", ""),
        (1, 2, "127.0.0.1", ""),
        (1, 2, "127.0.0.1,127.0.0.2", "127.0.0.2"),
        (1, 2, "", "127.0.0.2"),
    ],
)
def test_which_nodes_are_missed(stage: Stage, needs: int, dp: int, places: str, waits: str) -> None:
    """All whose GPUs are needed, and those on which replicas are placed; where nobody says where they are, all."""
    wanted = stage.wanted()
    wanted["cluster"]["needs"], wanted["metadata"]["vlaunch.dp"] = needs, str(dp)
    wanted["env"] = {"VLLM_RAY_DP_PLACEMENT_NODE_IPS": places} if places else {}
    stage.ray.tables["/api/v0/nodes"] = [node(1), node(2, "DEAD")]

    assert looking().Look(wanted, JOB).lacking() == (f"waiting for {waits} to be in Ray again" if waits else "")


def test_what_the_dead_server_holds_is_waited_for(stage: Stage) -> None:
    """vLLM would wait for its placement group without a word."""
    stage.start()
    stage.until_ready()
    group = {"state": "CREATED", "creator_job_id": "05000000", "bundles": [{"unit_resources": {"GPU": 1.0}}]}
    stage.ray.tables["/api/v0/placement_groups"] = [group]
    os.kill(stage.engines[0], signal.SIGKILL)
    stage.until(lambda: "has freed 2 GPUs; 1 are free" in stage.said["doing"], "waiting")
    stage.ray.tables["/api/v0/placement_groups"] = [{**group, "state": "REMOVED"}]
    stage.until_ready(2)


def test_the_budget_ends(stage: Stage) -> None:
    """Restarts that fail count; then it gives up with the reason, and a head that restarts does not begin anew."""
    process = stage.start()
    stage.until_ready()
    (stage.folder / "exit").write_text("1")
    os.kill(stage.engines[0], signal.SIGKILL)

    assert process.wait(PATIENCE) == 1
    assert (stage.said["state"], stage.said["restarts_left"], len(stage.engines)) == ("gave-up", 0, 3)
    assert "no restart is left of 2 in 1 h" in stage.said["doing"]
    assert "vlaunch supervisor: GIVING UP" in stage.log
    assert "there is no such option" in stage.said["faults"][-1]["evidence"]
    assert not stage.is_wanted()


@pytest.mark.parametrize("verb", ["run", "boot"])
def test_it_gives_up_at_once(stage: Stage, verb: str) -> None:
    """With no restart left there is nothing that a whole cluster would be good for."""
    stage.wanted(restarts=0)
    process = stage.start()
    stage.until_ready()
    stage.ray.tables["/api/v0/nodes"] = [node(1)]
    if verb == "boot":
        process.kill()
        process = stage.start(verb)

    assert process.wait(PATIENCE) == 1
    assert (stage.said["state"], stage.is_wanted()) == ("gave-up", False)


def test_giving_up_leaves_what_is_asked_for_since(stage: Stage) -> None:
    """Somebody types the same command again: it is the same server, and another job."""
    wanted = stage.wanted(restarts=0)
    process = stage.start()
    stage.until_ready()
    (stage.folder / "wanted.json").write_text(json.dumps({**wanted, "job": NEXT}))
    os.kill(stage.engines[0], signal.SIGKILL)

    assert process.wait(PATIENCE) == 1
    assert (stage.said["state"], stage.is_wanted()) == ("gave-up", True)


def test_a_node_that_leaves_during_a_restart(stage: Stage) -> None:
    """vLLM would wait for it for half an hour."""
    stage.start()
    stage.until_ready()
    stage.mode("hang")
    os.kill(stage.engines[0], signal.SIGKILL)
    stage.until(lambda: len(stage.engines) == 2, "a second engine")
    stage.ray.tables["/api/v0/nodes"] = [node(1), node(2, "DEAD")]
    stage.until(lambda: len(stage.said["faults"]) == 2, "a second fault")

    assert stage.said["faults"][1]["what"] == "a node left Ray while the engine started"


@pytest.mark.parametrize("mode", ["busy", "uncounted"])
def test_a_busy_server_lives(stage: Stage, mode: str) -> None:
    """Canaries come back late, and tokens are counted: nothing is wrong, for longer than a server may stand still.

    Where vLLM counts nothing, nobody can tell it from one that hangs.
    """
    stage.start()
    stage.until_ready()
    stage.mode(mode)
    time.sleep(1.8)

    assert (stage.said["faults"], stage.said["state"], len(stage.engines)) == ([], "ready", 1)


def test_a_server_that_stands_still_is_doubted_first(stage: Stage) -> None:
    """The record says so long before it is ended, and takes it back when a completion comes."""
    stage.wanted(stuck=30)
    stage.start()
    stage.until_ready()
    stage.mode("hang")
    stage.until(lambda: "no completion came back" in stage.said["doing"], "a doubt")
    assert (stage.said["state"], stage.said["faults"]) == ("ready", [])
    stage.mode("ok")
    stage.until(lambda: not stage.said["doing"], "no doubt")

    assert (stage.said["state"], stage.said["faults"]) == ("ready", [])


def test_a_server_that_stands_still_is_dead(stage: Stage) -> None:
    """No answer, and nothing moves but the number of aborted requests, which are the canaries."""
    stage.start()
    stage.until_ready()
    stage.mode("hang")
    stage.until(lambda: stage.said["faults"], "a fault")
    stage.mode("ok")
    stage.until_ready(2)

    assert "no completion came back" in stage.said["faults"][0]["what"]


def replicas(stage: Stage) -> None:
    """Let the server have two replicas, one a node."""
    wanted = stage.wanted()
    wanted["metadata"]["vlaunch.dp"] = "2"
    (stage.folder / "wanted.json").write_text(json.dumps(wanted))
    stage.actors(*(rank(number, name=f"vllm_Worker_17_dp{number}_PP0") for number in range(2)))


def test_a_replica_that_stands_still_is_dead(stage: Stage) -> None:
    """Though the other one answers meanwhile, and counts: half of all requests would never come back."""
    replicas(stage)
    stage.start()
    stage.until_ready()
    stage.mode("half")
    stage.until(lambda: "no completion of replica 1 came back" in stage.said["doing"], "a doubt")
    answered = stage.said["canary"]["at"]
    stage.until(lambda: stage.said["faults"], "a fault")
    stage.mode("ok")
    (fault,) = stage.said["faults"]
    stage.until_ready(2)

    assert fault["what"].startswith("no completion of replica 1 came back for ")
    assert (fault["rank"], fault["node"]) == ("DP1", "127.0.0.2")
    assert fault["last_good"] > answered


def test_a_busy_replica_lives(stage: Stage) -> None:
    """Its own counters say so."""
    replicas(stage)
    stage.start()
    stage.until_ready()
    stage.mode("half-busy")
    time.sleep(1.8)

    assert (stage.said["faults"], stage.said["state"], stage.said["doing"]) == ([], "ready", "")


def test_replicas_that_all_stand_still_are_one_server_that_does(stage: Stage) -> None:
    """It is not each one's turn that is waited for."""
    replicas(stage)
    stage.start()
    stage.until_ready()
    stage.mode("hang")
    stage.until(lambda: stage.said["faults"], "a fault")

    assert stage.said["faults"][0]["what"].startswith("no completion came back for ")


def test_what_stands_still() -> None:
    """A replica by its own answers and counters, from its first late canary on; without counters nobody knows of one."""
    look = looking()
    still = look.Still(0.0, 60.0)

    def counted(*numbers: int) -> Any:
        return look.Counters(tuple(f'vllm:x{{engine="{at}"}} {number}' for at, number in enumerate(numbers)), 0)

    still.late(1, counted(1, 7), counted(2, 7))
    still.answered(0)
    began = dict(still.since)
    still.late(1, counted(3, 7), counted(4, 7))
    assert (list(began), still.since, still.dead) == ([1], began, False)
    still.late(0, counted(4, 7), counted(4, 7))
    assert (set(still.since), still.longest[1]) == ({None, 0, 1}, 1)  # it was the first
    still.late(1, counted(4, 8), counted(4, 8))  # it has moved between the two looks
    assert set(still.since) == {0}
    still.answered(0)
    still.late(0, counted(4, 8), counted(4, 8))
    assert (set(still.since), still.longest[1]) == ({None, 0}, None)
    still.answered(0)
    still.late(1, None, None)
    assert set(still.since) == {None}
    still.late(1, look.Counters((), None), look.Counters((), None))
    assert (still.since, still.said) == ({}, "")


def test_a_dashboard_that_is_silent_is_no_fault(stage: Stage) -> None:
    """The canary's word is enough; only a restart waits for Ray."""
    stage.start()
    stage.until_ready()
    stage.ray.tables.clear()
    stage.ray.answers.clear()
    stage.until_ready()
    os.kill(stage.engines[0], signal.SIGKILL)
    stage.until(lambda: stage.said["doing"] == "waiting for Ray's dashboard to answer", "waiting")

    assert len(stage.said["faults"]) == 1


def test_stop(stage: Stage) -> None:
    """The engine is ended politely, and no fault is made of it."""
    process = stage.start()
    stage.until_ready()
    process.terminate()

    assert process.wait(PATIENCE) == 143
    assert (stage.said["state"], stage.said["faults"]) == ("stopped", [])
    assert gone(stage.engines[0])


def test_a_server_that_nobody_wants_any_more_does_not_come_back(stage: Stage) -> None:
    """It was stopped while it waited for a node."""
    process = stage.start()
    stage.until_ready()
    stage.ray.tables["/api/v0/nodes"] = [node(1)]
    stage.until(lambda: stage.said["state"] == "recovering", "recovering")
    (stage.folder / "wanted.json").unlink()

    assert process.wait(PATIENCE) == 0
    assert (stage.said["state"], len(stage.engines)) == ("stopped", 1)


def test_the_engine_ends_with_its_supervisor(stage: Stage) -> None:
    """However that ends: what nobody looks after must not hold GPUs."""
    process = stage.start()
    stage.until_ready()
    process.kill()
    process.wait()

    stage.until(lambda: gone(stage.engines[0]), "the engine")


def test_a_node_whose_port_is_closed_is_not_there(stage: Stage) -> None:
    """Ray notices some seconds late that a container has died: its word alone is not enough to begin."""
    wanted = stage.wanted()
    wanted["cluster"] = {"nodes": {"127.0.0.1": 1}, "needs": 1, "port": stage.api}
    look = looking().Look(wanted, JOB)

    assert look.lacking() == "waiting for 127.0.0.1 to be in Ray again"


def test_a_port_that_opens_again_is_of_another_node(stage: Stage) -> None:
    """Ray may list the dead one for some seconds more; a start on it would fail, and cost a restart."""
    wanted = stage.wanted()
    wanted["cluster"] = {"nodes": {"127.0.0.1": 1}, "needs": 1, "port": stage.api}
    look = looking().Look(wanted, JOB)
    look.lacking()
    look.wanted["cluster"]["port"] = stage.ray.port

    assert look.lacking() == "waiting for 127.0.0.1 to be in Ray again"
    stage.ray.tables["/api/v0/nodes"] = [node(1, id="new"), node(1)]
    assert look.lacking() == "waiting until Ray has noticed which nodes are dead"
    stage.ray.tables["/api/v0/nodes"] = [node(1, "DEAD"), node(1, id="new")]
    assert look.lacking() == ""


def test_a_node_that_ray_has_not_missed_is_believed_again(stage: Stage) -> None:
    """Its port did not answer for a moment: the network was cut."""
    wanted = stage.wanted()
    wanted["cluster"] = {"nodes": {"127.0.0.1": 1}, "needs": 1, "port": stage.ray.port}
    supervisor_look = looking()
    look = supervisor_look.Look(wanted, JOB)
    look.closed["id1"] = time.monotonic() - supervisor_look.GONE

    assert look.lacking() == ""


def test_nodes_that_change_between_two_looks_are_not_whole(stage: Stage) -> None:
    """Ray had an old one for alive, and has noticed."""
    look = looking().Look(stage.wanted(), JOB)
    counted = []
    for nodes in ([node(1), node(2)], [node(1), node(2, id="new")], [node(1), node(2, id="new")], [node(1)]):
        stage.ray.tables["/api/v0/nodes"] = nodes
        look.lacking()
        counted.append(look.steady)

    assert counted == [1, 1, 2, 0]


def test_a_slow_dashboard_keeps_no_server_down(stage: Stage) -> None:
    """A head that is busy answers late, perhaps for ever: whether the cluster is whole is worth waiting for."""
    supervisor_look = looking()
    given = []

    class Patient(supervisor_look.Look):  # type: ignore[misc, name-defined]
        def rows(self, what: str, patience: float = 3, **filters: str) -> list[dict[str, Any]]:
            given.append(patience)
            return super().rows(what, patience, **filters)  # type: ignore[no-any-return]

    assert Patient(stage.wanted(), JOB).lacking() == ""
    assert given == [supervisor_look.PATIENCE] * 3


def test_ranks_of_others_are_not_the_servers(stage: Stage) -> None:
    """Where Ray does not say which driver is ours: the end of a batch job's engines would restart the server."""
    look = looking().Look(stage.wanted(), JOB)
    stage.ray.answers[f"/api/jobs/{JOB}"] = {"submission_id": JOB, "status": "RUNNING"}
    look.meet()
    alone = list(look.ranks)
    stage.actors(rank(0), rank(1, job_id="06000000"))
    look.meet()

    assert (alone, look.ranks) == (["a0", "a1"], {})


def test_many_dead_ranks_are_one_question(stage: Stage) -> None:
    """A dashboard that is slow would be asked for minutes, while the record says that the server is ready."""
    look = looking().Look(stage.wanted(), JOB)
    stage.actors(*(rank(number, node_id="id2") for number in range(64)))
    look.meet()
    ended = {"actor_died_error_context": {"error_message": "The actor is dead because its owner has died."}}
    killed = {"actor_died_error_context": {"error_message": "Worker died: connection error code 2. End of file."}}
    dead = [rank(number, "DEAD", node_id="id2", death_cause=killed if number == 40 else ended) for number in range(64)]
    stage.actors(*dead)
    stage.ray.asked.clear()
    found = look.dead()

    assert (found.what, found.rank, found.node) == ("a rank is dead", "PP40", "127.0.0.2")
    assert len(stage.ray.asked) == 3


def looking() -> Any:
    """Return the module of looks, as its siblings find it."""
    sys.path.insert(0, str(FOLDER))
    try:
        import supervisor_look  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(FOLDER))
    return supervisor_look


# ---- a head that restarts ----------------------------------------------------------------------------------------------------


def had_answered(stage: Stage, restarts: int = 0) -> None:
    """Leave behind what a server that answered leaves, when its head is switched off."""
    wanted = json.loads((stage.folder / "wanted.json").read_text())
    (stage.folder / "answered.json").write_text(json.dumps([{"at": 1, "wanted": wanted}]))
    kept = {
        "id": ID, "state": "ready", "faults": [], "restarts": [time.time()] * restarts, "canary": {"in_flight": 4},
        "container": "a" * 64,
    }  # fmt: skip
    (stage.folder / "server.json").write_text(json.dumps(kept))


def submitted(stage: Stage) -> list[dict[str, Any]]:
    return [body for verb, path, _, body in stage.ray.asked if (verb, path) == ("POST", "/api/jobs/")]


def test_boot_brings_the_server_back(stage: Stage) -> None:
    """Under the next number, with the same labels, when the cluster is whole; the restart counts."""
    had_answered(stage)
    stage.ray.tables["/api/v0/nodes"] = [node(1)]
    process = stage.start("boot")
    stage.until(lambda: "waiting for 127.0.0.2" in stage.said.get("doing", ""), "waiting")
    assert submitted(stage) == []
    stage.ray.tables["/api/v0/nodes"] = [node(1), node(2)]

    assert process.wait(PATIENCE) == 0
    (body,) = submitted(stage)
    assert (body["submission_id"], body["metadata"]) == (NEXT, {"vlaunch.model": "m"})
    assert body["entrypoint"].startswith(f"exec env VLAUNCH_JOB={NEXT} python3 ")
    assert body["entrypoint"].endswith(f"/supervisor.py run --job {NEXT} --again")
    assert json.loads((stage.folder / "wanted.json").read_text())["env"] == {"MARK": f"of {NEXT}"}
    assert (stage.said["state"], len(stage.said["restarts"]), stage.said["faults"][0]["in_flight"]) == ("recovering", 1, 4)
    assert list(stage.said["faults"][0]["phases"]) == ["whole"]


@pytest.mark.parametrize("meanwhile", ["a server", "nothing wanted", "another wanted"])
def test_boot_obeys_a_launcher(stage: Stage, meanwhile: str) -> None:
    """Whoever starts or stops something while the head comes up has the last word."""
    had_answered(stage)
    stage.ray.tables["/api/v0/nodes"] = []
    process = stage.start("boot")
    stage.until(lambda: stage.said["state"] == "recovering", "waiting")
    if meanwhile == "a server":
        stage.ray.answers["/api/jobs/"] = [{"submission_id": "x", "status": "PENDING", "metadata": {"vlaunch.model": "o"}}]
    elif meanwhile == "nothing wanted":
        (stage.folder / "wanted.json").unlink()
    else:
        (stage.folder / "wanted.json").write_text('{"id": "other"}')
    stage.ray.tables["/api/v0/nodes"] = [node(1), node(2)]

    assert process.wait(PATIENCE) == 0
    assert submitted(stage) == []


def test_boot_tries_until_ray_takes_the_job(stage: Stage) -> None:
    """A head that has just started answers before it can run jobs."""
    had_answered(stage)
    stage.ray.answers["/api/jobs/"] = lambda body: (500, "No available agent to submit job") if body else []
    process = stage.start("boot")
    stage.until(lambda: len(submitted(stage)) >= 2, "two tries")
    stage.ray.answers["/api/jobs/"] = lambda body: {"submission_id": "x"} if body else []

    assert process.wait(PATIENCE) == 0
    assert len(stage.said["restarts"]) == 1


def test_boot_gives_up_without_a_restart_left(stage: Stage) -> None:
    """A head that crashes again and again is not served on for ever."""
    had_answered(stage, restarts=2)
    process = stage.start("boot")

    assert process.wait(PATIENCE) == 1
    assert (stage.said["state"], submitted(stage), stage.is_wanted()) == ("gave-up", [], False)


def test_a_head_that_was_replaced(stage: Stage) -> None:
    """Somebody gave it other secrets or another image: no fault, no restart, and none need be left. What comes then counts."""
    had_answered(stage, restarts=2)
    stage.container("b")
    process = stage.start("boot")

    assert process.wait(PATIENCE) == 0
    (body,) = submitted(stage)
    assert body["entrypoint"].endswith(f"/supervisor.py run --job {NEXT} --again")
    assert (stage.said["state"], stage.said["faults"], len(stage.said["restarts"])) == ("recovering", [], 2)
    assert stage.said["container"] == "b" * 64
    assert "the head's container was replaced" in stage.log
    assert stage.start("boot").wait(PATIENCE) == 1
    assert (stage.said["state"], stage.said["faults"][0]["what"]) == ("gave-up", "the head's container was restarted")


@pytest.mark.parametrize("unknown", ["before", "now"])
def test_a_head_of_which_nobody_knows_whether_it_was_replaced(stage: Stage, unknown: str) -> None:
    """Counts as one that crashed: else one that crashes for ever would be served on for ever."""
    had_answered(stage)
    if unknown == "now":
        (stage.folder / "mounts").unlink()
    else:
        stage.container("b")
        (stage.folder / "server.json").write_text(json.dumps({**stage.said, "container": ""}))

    assert stage.start("boot").wait(PATIENCE) == 0
    assert (len(stage.said["faults"]), len(stage.said["restarts"])) == (1, 1)


def test_that_it_gave_up_outlives_its_head(stage: Stage) -> None:
    """Else a restart of the head would turn what needs somebody into nothing at all."""
    stage.wanted(restarts=0)
    had_answered(stage)
    stage.start("boot").wait(PATIENCE)
    stage.container("b")

    assert stage.start("boot").wait(PATIENCE) == 0
    assert (stage.said["state"], stage.is_wanted(), submitted(stage)) == ("gave-up", False, [])
    assert "no restart is left of 0" in stage.said["doing"]


def test_boot_without_anything_wanted(stage: Stage) -> None:
    """A new head knows of no server; what is left of an old one's record would be a lie."""
    had_answered(stage)
    (stage.folder / "wanted.json").unlink()

    assert stage.start("boot").wait(PATIENCE) == 0
    assert not (stage.folder / "server.json").exists()


# ---- a supervisor that is killed ---------------------------------------------------------------------------------------------


def killed(stage: Stage, status: str = "FAILED") -> None:
    """Kill the supervisor of a server that answers; Ray says what became of its job."""
    process = stage.start()
    stage.until_ready()
    process.kill()
    process.wait()
    stage.ray.answers[f"/api/jobs/{JOB}"] = {"submission_id": JOB, "status": status}


def looks(process: subprocess.Popen[str]) -> None:
    """Give a watcher the time for many looks."""
    time.sleep(1.5)
    assert process.poll() is None


def test_a_supervisor_that_is_killed_is_started_again(stage: Stage) -> None:
    """With one restart less, and what is left of its engine is ended first."""
    watcher = stage.start("watch")
    killed(stage)
    stage.until(lambda: submitted(stage), "a job")
    (body,) = submitted(stage)
    (fault,) = stage.said["faults"]

    assert body["entrypoint"].endswith(f"/supervisor.py run --job {NEXT} --again")
    assert (fault["what"], fault["in_flight"], len(stage.said["restarts"])) == ("the supervisor died", 3, 1)
    assert gone(stage.engines[0])
    looks(watcher)
    assert len(submitted(stage)) == 1


def test_another_supervisor_says_where_its_engine_begins(stage: Stage) -> None:
    """Whoever watches takes what it read before for the dead engine's, and the first start of all says nothing."""
    stage.start()
    stage.until_ready()
    assert "starting the engine again" not in stage.log
    stage.started[0].kill()
    stage.until(lambda: gone(stage.engines[0]), "the engine")
    stage.start("run", "--job", JOB, "--again")
    stage.until_ready(2)

    assert stage.log.count("vlaunch supervisor: starting the engine again (restart 0 of 2") == 1


def test_the_watcher_survives_what_lies_in_its_files(stage: Stage) -> None:
    """And goes on with what comes after it; a job that Ray ends before its supervisor has written is handed over again."""
    (stage.folder / "wanted.json").write_text('{"policy": {"canary": 0.1}, "supervise": true, "backend": "ray", "id": 7}')
    (stage.folder / "server.json").write_text('{"id": 7, "state": "ready", "canary": null}')
    watcher = stage.start("watch")
    looks(watcher)
    stage.wanted()
    killed(stage)
    stage.ray.answers[f"/api/jobs/{NEXT}"] = {"submission_id": NEXT, "status": "FAILED"}
    stage.until(lambda: len(submitted(stage)) >= 2, "another job")

    assert watcher.poll() is None


def test_an_engine_that_outlives_its_supervisor_is_ended(stage: Stage) -> None:
    """One that hangs does not hear the polite signal, and holds what the next one needs."""
    wanted = stage.wanted(grace=0.5)
    deaf = ENGINE.replace("class Handler", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nclass Handler")
    wanted["argv"][2] = deaf
    (stage.folder / "wanted.json").write_text(json.dumps(wanted))
    stage.start("watch")
    killed(stage)
    stage.until(lambda: submitted(stage), "a job")

    assert gone(stage.engines[0])


def test_the_watcher_obeys_the_budget(stage: Stage) -> None:
    """A supervisor that is killed again and again is not started for ever."""
    stage.wanted(restarts=0)
    stage.start("watch")
    killed(stage)
    # Both, as the watcher writes the one down before it does the other.
    stage.until(lambda: stage.said["state"] == "gave-up" and not stage.is_wanted(), "the end")

    assert submitted(stage) == []
    assert "the last fault: the supervisor died" in stage.said["doing"]


@pytest.mark.parametrize(
    "why", ["it lives", "stopped", "replaced", "served again", "never answered", "Ray stopped it", "Ray knows no job"]
)
def test_the_watcher_leaves_alone_what_is_not_its_own(stage: Stage, why: str) -> None:
    """A launcher that stops, replaces or starts, a supervisor that lives or ends by itself, and a first start."""
    wanted = stage.wanted(grace=0.3)
    process = stage.start()
    stage.until_ready()
    if why == "stopped":
        (stage.folder / "wanted.json").unlink()
    elif why == "replaced":
        (stage.folder / "wanted.json").write_text(json.dumps({**wanted, "id": "other", "job": "serve-other-1"}))
    elif why == "served again":
        (stage.folder / "wanted.json").write_text(json.dumps({**wanted, "job": NEXT}))
    if why != "it lives":
        process.kill()
        process.wait()
    if why == "never answered":
        (stage.folder / "server.json").write_text(json.dumps({**stage.said, "state": "starting"}))
    for job in (JOB, NEXT, "serve-other-1"):
        stage.ray.answers[f"/api/jobs/{job}"] = {"status": "STOPPED" if why == "Ray stopped it" else "FAILED"}
    if why == "Ray knows no job":
        del stage.ray.answers[f"/api/jobs/{JOB}"]
    looks(stage.start("watch"))

    assert (submitted(stage), stage.said["faults"]) == ([], [])
    assert (process.poll() is None) == (why == "it lives")
