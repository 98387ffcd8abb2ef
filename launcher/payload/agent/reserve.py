"""Sets GPUs aside in Ray for a server whose ranks run outside of it (`mp`), so that Ray gives them
to nobody else.

`python3 -m vlaunch_agent.reserve take NAME IP=GPUS …` makes a detached placement group of that
name, waits until Ray has it, and prints which GPUs of each node they are, as JSON; `free NAME`
removes it. A program of its own, for it imports Ray.
"""

from __future__ import annotations

import json
import sys
from typing import Any

_WAIT = 60.0  # seconds for Ray to place it
_PREFIX = "vlaunch-"


def take(name: str, wanted: dict[str, int]) -> dict[str, list[int]]:
    """Reserve so many GPUs on each address; return their indices.

    Raises RuntimeError when Ray does not have them.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    free(name)
    bundles = [{"GPU": float(count), f"node:{ip}": 0.001} for ip, count in wanted.items()]
    group = placement_group(bundles, strategy="SPREAD", name=_PREFIX + name, lifetime="detached")
    if not group.wait(_WAIT):
        remove_placement_group(group)
        raise RuntimeError(
            f"Ray has not set {wanted} GPUs aside within {_WAIT:g} s: others hold them"
        )

    @ray.remote(num_cpus=0, max_retries=3)
    def indices() -> list[int]:
        return [int(each) for each in ray.get_gpu_ids()]

    total = {
        row["NodeManagerAddress"]: row["Resources"].get("GPU", 0)
        for row in ray.nodes()
        if row["Alive"]
    }
    asked: dict[str, Any] = {}
    for number, (ip, count) in enumerate(wanted.items()):
        if total.get(ip, 0) > count:  # of a node that is taken whole nobody needs to ask
            where = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
            asked[ip] = indices.options(num_gpus=count, scheduling_strategy=where).remote()
    return {ip: ray.get(each, timeout=_WAIT) for ip, each in asked.items()}


def free(name: str) -> None:
    """Give back what was set aside for a server, if anything was."""
    from ray.util import get_placement_group
    from ray.util.placement_group import remove_placement_group

    try:
        group = get_placement_group(_PREFIX + name)
    except ValueError:
        return
    remove_placement_group(group)


def main() -> int:
    """Do what the command line says; the last line of the output is JSON."""
    import ray

    verb, name, *pairs = sys.argv[1:]
    ray.init(address="auto", namespace="vlaunch", log_to_driver=False, logging_level="ERROR")
    try:
        if verb == "free":
            free(name)
            found = dict[str, list[int]]()
        else:
            found = take(
                name, {ip: int(count) for ip, _, count in (each.rpartition("=") for each in pairs)}
            )
    except (RuntimeError, ValueError, ray.exceptions.RayError) as error:
        print(json.dumps({"error": str(error)[:500]}))
        return 1
    print(json.dumps({"gpus": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
