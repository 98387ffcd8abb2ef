"""Display of the state of lab hosts."""

from __future__ import annotations

import json
from pathlib import Path

from launcher.lab import layout, status
from launcher.lab.status import HostStatus

LAB = layout.make_lab(
    name="vlaunch-lab", directory=Path("/var/lib/x"), subnet="10.77.0.0/24", nodes=1, gpus=1
)


def state(**changes: object) -> HostStatus:
    values: dict[str, object] = {
        "name": "node1",
        "ip": "10.77.0.11",
        "network": True,
        "booted": True,
        "sshd": True,
        "dockerd": True,
        "images": ("vllm-cpu:0.32.0",),
        "containers": 1,
        "disk": 2_400_000_000,
        "memory": 90_000_000,
        **changes,
    }
    return HostStatus(**values)  # type: ignore[arg-type]


def test_the_table_shows_parts_that_are_down() -> None:
    """One line per host."""
    assert status.to_text([state(sshd=False)]).splitlines() == [
        "HOST   IP          NETWORK  BOOTED  SSHD  DOCKERD  CONTAINERS  DISK    MEMORY  IMAGES",
        (
            "node1  10.77.0.11  up       up      down  up       1           2.4 GB  0.1 GB "
            " vllm-cpu:0.32.0"
        ),
    ]


def test_a_single_part_down_is_down() -> None:
    """`up` is true only when nothing is down, for a host and for the lab."""
    document = json.loads(status.to_json(LAB, [state(), state(dockerd=False)]))

    assert [host["up"] for host in document["hosts"]] == [True, False]
    assert document["up"] is False
    assert document["inventory"] == "/var/lib/x/inventory.yaml"
