"""Good answers to spoil: recorded ones, else the simulated nodes'."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from launcher.agent.observed import EndpointHealth, Wedge
from launcher.core.domain import Inventory, Secret
from launcher.inventory.load import loads
from launcher.tools.host import node_probes
from tests import plan_case as case
from tests import supervision
from tests.simulated import World

FIXTURES = Path(__file__).parents[1] / "fixtures"
NODES = "nodes: [{host: gpu01, ip: 10.0.0.11, gpus: 2}, {host: gpu02, ip: 10.0.0.12, gpus: 2}]"


@cache
def inventory() -> Inventory:
    """Two nodes."""
    return loads(f"cluster: c\nimage: vllm/vllm-openai:v0.32.0\n{NODES}\n", Path("inventory.yaml"))


def world() -> World:
    """A running cluster of two nodes."""
    nodes = World(inventory())
    case.bring_up(inventory(), nodes, {"RAY_AUTH_TOKEN": Secret("tok")})
    return nodes


@cache
def probes() -> tuple[tuple[str, str], ...]:
    """The survey answers of both nodes, by node."""
    nodes = world()
    commands = node_probes.probe_commands(
        inventory(), [inventory().image], survey=True, clock=lambda: 1e9
    )
    return tuple((command.node, nodes.answer(command).out) for command in commands)  # type: ignore[union-attr]


@cache
def surveys() -> tuple[str, ...]:
    """Recorded survey answers of real nodes."""
    return tuple(path.read_text() for path in sorted((FIXTURES / "host").glob("*.txt")))


@cache
def jobs() -> Mapping[str, Any]:
    """The head's answer while two servers and a batch job run."""
    text = (FIXTURES / "ray" / "head-jobs.json").read_text()
    text = text.replace("10.77.0.11", "10.0.0.11").replace("10.77.0.12", "10.0.0.12")
    payload: dict[str, Any] = json.loads(text)
    payload["jobs"] = [
        job("serve-0123-1", {"vlaunch.model": "m"}),
        job(
            "batch-rows-1",
            {"vlaunch.batch": "rows", "vlaunch.work": "/w/rows", "vlaunch.gpus": "1"},
        ),
    ]
    bundle = {"bundle_id": "0", "unit_resources": {"GPU": 1.0, "CPU": 1.0}}
    payload["groups"] = [{"state": "CREATED", "creator_job_id": "01", "bundles": [bundle]}]
    node_id = payload["nodes"][0]["node_id"]
    actor = {
        "name": "vllm_Worker_ab1_TP0_PP1",
        "state": "ALIVE",
        "node_id": node_id,
        "job_id": "01",
        "placement_group_id": None,
        "required_resources": {"GPU": 1.0},
    }
    payload["actors"] = [actor]
    payload |= servers()
    return payload


@cache
def servers() -> Mapping[str, Any]:
    """The head's report of two servers: one ready, one waiting for its restart."""
    fault = supervision.make_fault(node="10.0.0.12", lost=2, phases={"stopped": 0.4, "whole": 2.0})
    works = supervision.make_record(
        load=supervision.make_load(),
        asking=3.0,
        still=95.0,
        endpoints={"gpu01": EndpointHealth(verdict="answering", seconds=0.1)},
        first_answer={"model": "m", "fingerprint": "v-tp2", "seconds": 0.4, "replicas": [0.1]},
        held={"gpu01": {"kv_cache_size_tokens": "1000", "num_gpu_blocks": "10"}},
        wedge=Wedge(since=1.0, rank="TP0", node="gpu01", observations=["x"], stacks=["y"]),
        warning="slow",
        ranks={"gpu01": ["TP0"]},
        restarts=[1e9],
        faults=[fault],
    )
    died = supervision.make_record(
        "embed",
        "pausing",
        doing="waits",
        faults=[fault],
        fault_count=3,
        next_start=supervision.AT + 9,
        restarts_left=2,
    )
    rows = (
        supervision.server_row(supervision.make_spec(), works),
        supervision.server_row(
            supervision.make_spec("embed", backend="mp", node="gpu02", port=8001), died
        ),
    )
    report: dict[str, Any] = json.loads(json.dumps(supervision.head_report(*rows)))
    return report


def job(name: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    """A running Ray job."""
    return {
        "submission_id": name,
        "job_id": "01",
        "status": "RUNNING",
        "message": "",
        "metadata": dict(metadata),
        "driver_exit_code": None,
    }


WATCH: Mapping[str, Any] = {
    "offset": 80,
    "anew": False,
    "listening": True,
    "log": (
        "Starting vLLM API server\nLoading safetensors checkpoint shards: 50% Completed |"
        " 1/2\nValueError: x\n"
    ),
}
PROGRESS: Mapping[str, Any] = {
    "state": "running",
    "text": "",
    "submission": "batch-rows-1",
    "started": 1e9,
    "updated": 1e9 + 60,
    "rows": 1000,
    "done": 10,
    "errors": 1,
    "before": 0,
    "tokens_in": 5,
    "tokens_out": 5,
    "rows_per_second": 3.0,
    "tokens_per_second": 9.0,
    "eta": 300.0,
    "replicas": {"ready": 1, "wanted": 2},
    "restarts": 1,
    "warnings": ["slow"],
    "error": {"message": "no", "evidence": ["a", "b"], "hint": "c"},
}
ENTRY: Mapping[str, Any] = {
    "name": "rows",
    "job": {
        "job": "rows",
        "digest": "d",
        "identity": {"model": "m", "prompt": {"a": 1}},
        "engine": {"tp": 1, "args": {"x": 1}},
    },
    "progress": PROGRESS,
    "summary": {"rows": 1},
    "alive": True,
    "inputs": {"inputs/a.jsonl": 12, "inputs/.b.part": 3},
}
FOLLOW: Mapping[str, Any] = {
    "job": job("batch-rows-1", {}),
    "log": "one\ntwo\n",
    "offset": 8,
    "progress": PROGRESS,
}
OUTPUTS: Mapping[str, Any] = {
    "files": [
        {"path": "rows/part-000001.jsonl", "bytes": 12, "sha256": "ab" * 32},
        {"path": "summary.json", "bytes": 2, "sha256": "cd" * 32},
    ],
}
PAIRS: Mapping[str, Any] = {
    "mtu": 1500,
    "peers": {
        "gpu02": {
            "ports": {"6380": "open", "40123": "timed out"},
            "bulk": True,
            "largest": 1500,
            "errors": {"40123": "no answer"},
            "heard": True,
        }
    },
}
RECORD: Mapping[str, Any] = {
    "incarnation": "ab",
    "taken": "2026-11-20",
    "passed": True,
    "asked": "auto",
    "required": "any",
    "ranks_per_node": 0,
    "collective": True,
    "summary": "1 pair over TCP",
    "link": {"gbps": 1.0, "latency_us": 10.0, "tcp": False},
}
