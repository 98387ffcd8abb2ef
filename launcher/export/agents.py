"""Pods whose first process is our agent, as that of a node's container is: the first pod's keeps
the server, that is it starts all ranks together, watches them, and starts them again together.

For where no controller does, and for Ray, which it starts beside. The agents know each other by a
secret.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from launcher import containers
from launcher.export import kubernetes_shape as shape
from launcher.export.kubernetes_shape import Group
from launcher.model import Argv, Node
from launcher.tools import payload, ray

FILE = "server.json"  # among the programs: the server that is kept
POD, ADDRESS = "$(POD_NAME)", "$(VLLM_HOST_IP)"
FIELDS = {"POD_NAME": "metadata.name"}
METRICS = "agent"  # the port's name
WHY: Mapping[str, str] = {
    "readinessProbe:": (
        "ready is what the agent says, who has seen an answer and restarts what is dead"
    ),
}


def server(group: Group) -> str:
    """Return the server that the first pod's agent keeps, its nodes called as pods are."""
    made, names = group.desired, shape.pods(group.target, group.size)
    pods = {node.name: pod for node, (pod, _) in zip(group.nodes, names, strict=True)}
    # Which GPUs a pod has is its device plugin's to say.
    processes = tuple(
        replace(each, node=pods[each.node], gpus=None, env=shape.told(each.env))
        for each in made.processes
    )
    places = {pods[node]: count for node, count in made.places.items()}
    found = replace(made, processes=processes, places=places, addresses=dict(names))
    return json.dumps(found.as_json(), indent=1) + "\n"


def leading(group: Group, node: Node) -> Argv:
    """Return the first process of the first pod, which keeps the server."""
    return _argv(group, node, ("--lead", *_kept(group)))


def following(group: Group, node: Node) -> Argv:
    """Return the first process of any other pod."""
    return _argv(group, node, ())


def alike(group: Group, node: Node) -> Argv:
    """Return the first process of all pods where these come from one template: which of them leads
    is said by its name.
    """
    first, _ = shape.pods(group.target, group.size)[0]
    return _argv(group, node, ("--leader", first, *_kept(group)))


def probe() -> dict[str, object]:
    """Return the one probe of such pods, for the agent restarts what is dead: ready is what the
    first one's says, who has seen an answer and goes on looking.
    """
    looked = {"periodSeconds": 10, "timeoutSeconds": 10, "failureThreshold": 1}
    return {"readinessProbe": {"exec": {"command": list(payload.ready())}, **looked}}


def _kept(group: Group) -> Argv:
    metrics = str(group.inventory.ports.metrics)
    return ("--metrics", metrics, "--server", f"{containers.PAYLOAD}/{FILE}")


def _argv(group: Group, node: Node, told: Argv) -> Argv:
    command: Argv = ()
    inventory = group.inventory
    if not inventory.ray.off:
        here = replace(node, ip=ADDRESS, gpus=group.shares[node.name])
        start = ray.start_head if node.head else ray.start_worker
        command = start(here, inventory)
    return payload.agent(
        command,
        node=POD,
        head=group.leader,
        port=inventory.ports.group,
        metrics=inventory.ports.metrics,
        lead=False,
        private_shm=inventory.shm != "host",
        more=(*told, "--aloud", *(("--stay",) if command else ())),
    )
