"""The script that `vlaunch up` is measured against."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

from benchmarks import up
from launcher.inventory.load import load
from launcher.tools.shipped import node_files
from launcher.tools.site import Site

INVENTORY = load(Path(__file__).parents[2] / "inventory" / "h100-infiniband.yaml")


def test_the_script_starts_every_node_and_can_be_read_by_bash() -> None:
    """It is only ever run with lab hosts at hand."""
    runs = {
        node.name: f"docker run --detach --name {Site(INVENTORY).container_name(node)} i"
        for node in INVENTORY.nodes
    }
    script = up.render_script(up.Bench(inventory=INVENTORY, runs=runs, builds=(), tag="i"))
    read = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)

    assert (read.returncode, read.stderr) == (0, "")
    assert all(line in script for line in runs.values())


def test_the_script_sends_what_the_containers_run() -> None:
    """The agent, and the program that starts it."""
    with tarfile.open(fileobj=io.BytesIO(node_files.payload_tar())) as archive:
        names = set(archive.getnames())

    assert {"entry.sh", "agent.pyz"} <= names
    assert 'cat "$PAYLOAD"' in up.SCRIPT
