"""Specs of servers, for tests of the agent."""

from __future__ import annotations

from typing import Any

from launcher.agent.desired import Desired, Policy, ProcessSpec, Ray

# Intervals of tests with a manual clock.
POLICY = Policy(canary=5.0, stuck=360.0, start_timeout=100.0, grace=1.0)
HEADLESS = ("vllm", "serve", "m", "--headless")  # a process without an API


def process(node: str, *argv: str, **fields: Any) -> ProcessSpec:
    """Return one process of an engine on a node."""
    return ProcessSpec(node=node, argv=argv or ("vllm", "serve", "m"), **fields)


def mp(*nodes: str, **fields: Any) -> Desired:
    """Return an `mp` server: a process with one GPU per node; the first has the API."""
    settings: dict[str, Any] = {
        "name": "chat",
        "id": "abcd1234",
        "model": "m",
        "backend": "mp",
        "processes": (process(nodes[0]), *(process(node, *HEADLESS) for node in nodes[1:])),
        "host": "127.0.0.1",
        "port": 8000,
        "places": dict.fromkeys(nodes, 1),
        "asked": 1.0,
        "policy": POLICY,
    }
    return Desired(**{**settings, **fields})


def ray(*nodes: str, **fields: Any) -> Desired:
    """Return a server of one process on the first node, with Ray's ranks on all nodes."""
    settings: dict[str, Any] = {
        "backend": "ray",
        "processes": (process(nodes[0]),),
        "ray": Ray(dashboard=1, node_manager=2, gpus=len(nodes)),
        "addresses": {node: f"10.0.0.{number}" for number, node in enumerate(nodes, 1)},
    }
    return mp(*nodes, **{**settings, **fields})


def hybrid(*nodes: str, **fields: Any) -> Desired:
    """Return a server with one replica, and an API, per node."""
    processes = tuple(process(node, replicas=(at, 1)) for at, node in enumerate(nodes))
    addresses = {node: f"10.0.0.{number}" for number, node in enumerate(nodes, 1)}
    settings = {"processes": processes, "replicas": len(nodes), "addresses": addresses}
    return mp(*nodes, **{**settings, "host": "0.0.0.0", **fields})


TWO = mp("gpu1", "gpu2")
AWAY = mp("gpu2", "gpu3")  # no process on the head
RAY = ray("gpu1", "gpu2")
