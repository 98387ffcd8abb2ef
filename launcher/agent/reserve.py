"""Reserve GPUs in Ray for a server whose ranks run outside of it (`mp`), so that Ray gives them to
no other program.

`python3 -m vlaunch_agent.reserve take NAME IP=GPUS …` creates a detached placement group of that
name, waits until Ray has placed it, and prints the GPU indices of each node as JSON; `free NAME`
removes it. It is a program of its own because it imports Ray.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

_WAIT = 60.0  # seconds for Ray to place it
_PREFIX = "vlaunch-"


def take(name: str, counts: Mapping[str, int]) -> dict[str, list[int]]:
    """Reserve the number of GPUs on each address; return their indices.

    Raises RuntimeError if Ray does not have them.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundles = [{"GPU": float(count), f"node:{ip}": 0.001} for ip, count in counts.items()]
    group = placement_group(bundles, strategy="SPREAD", name=_PREFIX + name, lifetime="detached")
    if not group.wait(_WAIT):
        remove_placement_group(group)
        raise RuntimeError(f"Ray did not reserve {counts} GPUs within {_WAIT:g} s: they are in use")

    @ray.remote(num_cpus=0, max_retries=3)
    def indices() -> list[int]:
        return [int(index) for index in ray.get_gpu_ids()]

    rows = [row for row in ray.nodes() if row["Alive"]]
    total = {row["NodeManagerAddress"]: row["Resources"].get("GPU", 0) for row in rows}
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


def main() -> int:
    """Run the command line; the last line of output is JSON."""
    import ray

    verb, name, *places = sys.argv[1:]
    counts = {ip: int(count) for ip, _, count in (place.rpartition("=") for place in places)}
    ray.init(address="auto", namespace="vlaunch", log_to_driver=False, logging_level="ERROR")
    try:
        free(name)
        print(json.dumps({"gpus": take(name, counts) if verb == "take" else {}}))
    except (RuntimeError, ValueError, ray.exceptions.RayError) as error:
        print(json.dumps({"error": str(error)[:500]}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
