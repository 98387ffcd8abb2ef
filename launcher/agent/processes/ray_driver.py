"""Requests that only a driver of Ray can send.

`python3 -m vlaunch_agent.agent.processes.ray_driver take NAME IP=GPUS …` reserves GPUs in Ray for a
server whose ranks run outside of it (`mp`), so that Ray gives them to no other program: it creates
a detached placement group of that name, waits until Ray has placed it, and prints the GPU indices
of each node as JSON. `free NAME` removes the group. `reach IP …` checks that the GCS reaches these
nodes. It is a program of its own because it imports Ray.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from . import children

_TIMEOUT = 120.0  # seconds for the program, which imports Ray
_WAIT = 60.0  # seconds for Ray to place a group or an actor
_PIN = 0.001  # of a node's own resource, which Ray calls `node:IP`
_PREFIX = "vlaunch-"


def run(*arguments: str) -> tuple[int, str]:
    """Run this module as a program; return its exit code and output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    argv = (sys.executable, "-m", "vlaunch_agent.agent.processes.ray_driver", *arguments)
    return children.run(argv, _TIMEOUT, environment)


def parse_output(output: str) -> dict[str, Any]:
    """Return the last line of the program's output, which is JSON; other text is an `error`."""
    try:
        return dict(json.loads(output.strip().rpartition("\n")[2]))
    except (ValueError, TypeError):
        return {"error": output[-300:]}


def take(name: str, counts: Mapping[str, int]) -> dict[str, list[int]]:
    """Reserve the number of GPUs on each address; return their indices.

    Raises RuntimeError if Ray does not have them.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    rows = ray.nodes()
    dead = {row["NodeManagerAddress"] for row in rows if not row["Alive"]}
    reach([ip for ip in counts if ip in dead])
    bundles = [{"GPU": float(count), f"node:{ip}": _PIN} for ip, count in counts.items()]
    group = placement_group(bundles, strategy="SPREAD", name=_PREFIX + name, lifetime="detached")
    if not group.wait(_WAIT):
        remove_placement_group(group)
        raise RuntimeError(f"Ray did not reserve {counts} GPUs within {_WAIT:g} s: they are in use")

    @ray.remote(num_cpus=0, max_retries=3)
    def indices() -> list[int]:
        return [int(index) for index in ray.get_gpu_ids()]

    total = {
        row["NodeManagerAddress"]: row["Resources"].get("GPU", 0) for row in rows if row["Alive"]
    }
    pending = {}
    for number, (ip, count) in enumerate(counts.items()):
        if total.get(ip, 0) > count:  # of a node that is taken whole there is no choice
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            pending[ip] = indices.options(num_gpus=count, scheduling_strategy=strategy).remote()
    return {ip: ray.get(answer, timeout=_WAIT) for ip, answer in pending.items()}


def free(name: str) -> None:
    """Release a server's reservation, if there is one."""
    from ray.util import get_placement_group
    from ray.util.placement_group import remove_placement_group

    try:
        group = get_placement_group(_PREFIX + name)
    except ValueError:
        return
    remove_placement_group(group)


def reach(addresses: Sequence[str]) -> None:
    """Start an empty actor on each node, and end it.

    The GCS (Ray 2.60) may keep its old connection to a node that has returned. Until gRPC tries
    that connection again, the lease of a placement group fails at once; the GCS then counts the
    node's GPUs as taken, until the node reports a change, and the group stays pending forever. The
    lease of an actor is repeated, and an actor is such a change.

    Raises a RayError if a node is not reached in time.
    """
    import ray

    class Idle:
        """An actor without methods."""

    idle = ray.remote(num_cpus=0)(Idle)
    actors = [idle.options(resources={f"node:{ip}": _PIN}).remote() for ip in addresses]
    ray.get([actor.__ray_ready__.remote() for actor in actors], timeout=_WAIT)


def main() -> int:
    """Run the command line; the last line of output is JSON."""
    import ray

    verb, *arguments = sys.argv[1:]
    ray.init(address="auto", namespace="vlaunch", log_to_driver=False, logging_level="ERROR")
    try:
        print(json.dumps({"gpus": _run_verb(verb, arguments)}))
    except (RuntimeError, ValueError, ray.exceptions.RayError) as error:
        print(json.dumps({"error": str(error)[:500]}))
        return 1
    return 0


def _run_verb(verb: str, arguments: Sequence[str]) -> dict[str, list[int]]:
    """Run a verb; return the reserved GPUs, for `take`."""
    if verb == "reach":
        reach(arguments)
        return {}
    name, *places = arguments
    free(name)
    counts = {ip: int(count) for ip, _, count in (place.rpartition("=") for place in places)}
    return take(name, counts) if verb == "take" else {}


if __name__ == "__main__":
    sys.exit(main())
