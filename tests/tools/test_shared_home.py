"""Nodes whose SSH user has one home on all of them, such as on NFS."""

from __future__ import annotations

import os
import subprocess
from datetime import datetime, timezone
from pathlib import Path

import pytest

from launcher.app.certificates import issue_certificates
from launcher.cluster import secret_files
from launcher.inventory.load import loads
from launcher.tools import diagnosis, host
from launcher.tools.host import HostFacts, host_output
from launcher.tools.shipped import certificates
from launcher.tools.shipped.node_files import certificate_stages
from launcher.tools.site import Site

pytestmark = pytest.mark.processes
INVENTORY = loads(
    "cluster: c\nimage: x:1\naccelerator: cpu\nnodes: [{host: n1, ip: 10.0.0.1, gpus: 1}, {host:"
    " n2, ip: 10.0.0.2, gpus: 1}]\n",
    Path("inventory.yaml"),
)


class Nodes:
    """Two nodes on this machine, which report their own names and the file system's kind."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.home = folder / "home"
        self.home.mkdir()
        self._folder = folder
        for node in INVENTORY.nodes:
            bin_ = folder / node.name
            bin_.mkdir()
            for name, text in (("uname", node.name), ("findmnt", kind)):
                (bin_ / name).write_text(f"#!/bin/sh\necho {text}\n")
                (bin_ / name).chmod(0o755)

    def run(self, node: str, argv: tuple[str, ...], data: bytes = b"") -> str:
        """Run a command on a node."""
        path = f"{self._folder / node}:{os.environ['PATH']}"
        env = {**os.environ, "HOME": str(self.home), "PATH": path}
        return subprocess.run(
            argv, env=env, input=data, capture_output=True, check=True
        ).stdout.decode()

    def probe(self) -> dict[str, HostFacts]:
        """Return the nodes' facts."""
        argv = host.probe(
            ("no-such-docker",),
            cluster="c",
            state_dir="",
            hf_home=str(self.home),
            accelerator="cpu",
            images=(),
        )
        names = [node.name for node in INVENTORY.nodes]
        return {name: host_output.parse_probe(self.run(name, argv)) for name in names}


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "UNKNOWN-0x1234"])
def test_nodes_with_one_home_keep_their_own_files(kind: str, tmp_path: Path) -> None:
    """Such as the certificates of their agents."""
    nodes, now = Nodes(tmp_path, kind), datetime.now(timezone.utc)
    site = Site(INVENTORY, nodes.probe())
    authority, issued = issue_certificates(INVENTORY, now)
    renewal = certificates.Renewal(authority=authority, nodes=issued, reasons={})
    for stage in certificate_stages(site, renewal):
        for step in stage.steps:
            assert step.command.stdin is not None
            nodes.run(step.command.node, step.command.argv, step.command.stdin())
    facts = nodes.probe()

    assert certificates.renewal_reasons(INVENTORY, facts, now) == {}
    folders = {site.state_dir(node) for node in site.nodes}
    assert folders == {f"{nodes.home}/.vlaunch/nodes/{name}/c" for name in ("n1", "n2")}
    for node in site.nodes:
        listed = nodes.run(node.name, secret_files.listing_argv("c", ""))
        assert f"{site.state_dir(node)}/secrets/AGENT_CERTIFICATE" in listed
        log = Path(site.state_dir(node), "server/chat/engine.log")
        log.parent.mkdir(parents=True)
        log.write_text(f"log of {node.name}\n")
    for node in site.nodes:
        argv = diagnosis.query_diagnosis(("false",), mark="@", cluster="c", state_dir="")
        texts = nodes.run(node.name, argv)
        assert [f"log of {name}" in texts for name in ("n1", "n2")] == [
            name == node.name for name in ("n1", "n2")
        ]


def test_a_local_disk_needs_no_folder_of_the_node(tmp_path: Path) -> None:
    """Its path stays the same when the host gets another name."""
    nodes = Nodes(tmp_path, "ext4")

    site = Site(INVENTORY, nodes.probe())
    assert {site.state_dir(node) for node in site.nodes} == {f"{nodes.home}/.vlaunch/c"}
