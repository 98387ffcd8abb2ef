"""Images on real hosts with real Docker daemons: copied over limited links, to hosts with none,
some or all of the layers, with injected faults.

Tests of single programs are in tests/distribute/node, of their cooperation in
tests/distribute/test_run_copy_images.py.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import subprocess
import tarfile
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.faults import host_faults
from launcher.lab import hosts, machine, network
from launcher.lab.layout import Host
from tests.image_tars import tar_of
from tests.integration.conftest import LabCluster, kill_session, wait_for_output

pytestmark = [pytest.mark.lab, pytest.mark.long]

MB = 10**6
NAME = "copied:1"
RATE = 20 * MB  # bytes a second of each link
OTHERS = ("node2", "node3", "node4")


def _layer(number: int, size: int) -> bytes:
    content = random.Random(number).randbytes(size)
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        entry = tarfile.TarInfo(f"file-{number}")
        entry.size = size
        tar.addfile(entry, io.BytesIO(content))
    return out.getvalue()


LAYERS = [_layer(number, size * MB) for number, size in enumerate((60, 50, 40, 30))]
TOTAL = sum(map(len, LAYERS))


def make_image(name: str, layers: int, env: str = "A=1") -> bytes:
    """Return an image of the first layers, as `docker save` writes it."""
    parts = LAYERS[:layers]
    diffs = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in parts]
    settings = {"architecture": "amd64", "os": "linux", "config": {"Env": [env]}}
    config = json.dumps({**settings, "rootfs": {"type": "layers", "diff_ids": diffs}}).encode()
    files = {f"l{number}/layer.tar": layer for number, layer in enumerate(parts)}
    rows = [{"Config": "config.json", "RepoTags": [name], "Layers": list(files)}]
    return tar_of({**files, "config.json": config, "manifest.json": json.dumps(rows).encode()})


def load_image(lab_cluster: LabCluster, host: str, data: bytes) -> None:
    """Load an image into a host's Docker, without SSH."""
    argv = hosts.docker_argv(lab_cluster.lab.host(host), "load", "--quiet")
    subprocess.run(argv, input=data, capture_output=True, timeout=120, check=True)


@pytest.fixture
def four(light: LabCluster) -> Iterator[LabCluster]:
    """Limited links; only node1 has the image."""
    for host in light.lab.hosts:
        if ids := light.docker(host.name, "images", "--quiet", "--no-trunc").split():
            light.docker(host.name, "rmi", "--force", *set(ids))
        light.on(host.name, "rm", "-rf", "/var/tmp/vlaunch-0")
        host_faults.limit_rate(host, f"{RATE * 8 // MB}mbit")
    load_image(light, "node1", make_image(NAME, 4))
    yield light
    for host in light.lab.hosts:
        network.unfilter(host)
        host_faults.unlimit_rate(host)


def assert_complete(lab_cluster: LabCluster, *names: str) -> None:
    """Assert that hosts have the image, and no leftovers of a copy."""
    image_id = lab_cluster.docker("node1", "images", "--quiet", "--no-trunc", NAME)
    for name in names:
        assert (
            lab_cluster.docker(name, "images", "--quiet", "--no-trunc", NAME) == image_id != ""
        ), name
        assert lab_cluster.on(name, "ls", "/var/tmp") == ""


def run_copy(lab_cluster: LabCluster, *options: str) -> dict[str, Any]:
    """Run a copy; return the data of its last event."""
    result = lab_cluster.vlaunch("image", "copy", NAME, "--json", *options)
    assert result.code == 0, result.output
    done: dict[str, Any] = result.events[-1]["data"]
    return done


def start_copy(lab_cluster: LabCluster) -> subprocess.Popen[str]:
    """Start a copy, and return when the slowest node has a fifth of it."""
    process = lab_cluster.start("image", "copy", NAME, "--json")
    assert process.stdout is not None
    for line in process.stdout:
        data = json.loads(line).get("data", {})
        if data.get("total") and data["bytes"] > TOTAL / 5 and '"wait"' in line:
            return process
    pytest.fail(wait_for_output(process, 10)[1])


def test_only_missing_layers_travel(four: LabCluster) -> None:
    """To hosts with none, half, and all of them; then nothing is sent."""
    load_image(four, "node3", make_image("half:1", 2))
    load_image(four, "node4", make_image("all:1", 4, env="A=2"))
    half = sum(map(len, LAYERS[2:]))

    assert run_copy(four, "--to", "node4")["received"]["node4"] < 30_000
    assert half < run_copy(four, "--to", "node3")["received"]["node3"] < half + 30_000
    assert run_copy(four)["received"]["node2"] > TOTAL
    assert_complete(four, "node1", *OTHERS)
    assert run_copy(four) == {"changed": 0}


def bytes_sent(host: Host) -> int:
    """Return the number of bytes that a host has sent."""
    (link,) = json.loads(machine.run("ip", "-n", host.netns, "-s", "-j", "link", "show", "eth0"))
    return int(link["stats64"]["tx"]["bytes"])


def test_the_source_sends_a_single_copy(four: LabCluster) -> None:
    """For any number of hosts."""
    before = bytes_sent(four.lab.host("node1"))
    run_copy(four)

    assert_complete(four, *OTHERS)
    assert bytes_sent(four.lab.host("node1")) - before < 1.1 * TOTAL


def test_the_launcher_is_killed(four: LabCluster) -> None:
    """No partial copy looks like the image; the same command does the rest."""
    kill_session(start_copy(four))
    assert four.docker("node4", "images", "--quiet", NAME) == ""
    assert "of incomplete copies" in four.vlaunch("image", "list").out
    done = run_copy(four)

    assert done["received"]["node4"] < 0.9 * TOTAL
    assert_complete(four, *OTHERS)


def test_a_nodes_program_is_killed(four: LabCluster) -> None:
    """The node is named, the others have the image, and the same command completes the copy."""
    copying = start_copy(four)
    four.on("node3", "pkill", "-9", "-f", "^python3 -c")
    out, err = wait_for_output(copying, 240)

    assert (copying.returncode, "node3" in out + err) == (1, True)
    assert_complete(four, "node2", "node4")
    done = run_copy(four)
    assert list(done["received"]) == ["node3"]
    assert_complete(four, "node3")


def test_a_disk_is_too_small(four: LabCluster) -> None:
    """The error precedes the copy."""
    host = four.lab.host("node3")
    host_faults.small_disk(host, "/var/tmp", TOTAL // MB // 2)
    try:
        result = four.vlaunch("image", "copy", NAME)
        assert result.code == 1
        assert "node3: has too little disk space for the image" in result.output
        assert four.docker("node2", "images", "--quiet", NAME) == ""
        run_copy(four, "--to", "node2", "--to", "node4")
        assert_complete(four, "node2", "node4")
    finally:
        host_faults.remove_disk(host, "/var/tmp")
