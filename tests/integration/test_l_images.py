"""Images on real hosts with real Dockers: copied over limited links, to hosts that have none, some
or all of the layers, while things break.

What a program does by itself is in tests/distribute/node, what they do together in
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
from tests.integration.conftest import Practice, ended, kill

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


def image(name: str, layers: int, env: str = "A=1") -> bytes:
    """An image of the first layers, as `docker save` writes it."""
    some = LAYERS[:layers]
    diffs = [f"sha256:{hashlib.sha256(each).hexdigest()}" for each in some]
    about = {"architecture": "amd64", "os": "linux", "config": {"Env": [env]}}
    config = json.dumps({**about, "rootfs": {"type": "layers", "diff_ids": diffs}}).encode()
    files = {f"l{number}/layer.tar": each for number, each in enumerate(some)}
    rows = [{"Config": "config.json", "RepoTags": [name], "Layers": list(files)}]
    return tar_of({**files, "config.json": config, "manifest.json": json.dumps(rows).encode()})


def load(practice: Practice, host: str, data: bytes) -> None:
    """Give an image to a host's Docker, past SSH."""
    argv = hosts.docker_argv(practice.lab.host(host), "load", "--quiet")
    subprocess.run(argv, input=data, capture_output=True, timeout=120, check=True)


@pytest.fixture
def four(light: Practice) -> Iterator[Practice]:
    """Limited links; node1 has the image, the others nothing of it."""
    for host in light.lab.hosts:
        if ids := light.docker(host.name, "images", "--quiet", "--no-trunc").split():
            light.docker(host.name, "rmi", "--force", *set(ids))
        light.on(host.name, "rm", "-rf", "/var/tmp/vlaunch-0")
        host_faults.slow(host, f"{RATE * 8 // MB}mbit")
    load(light, "node1", image(NAME, 4))
    yield light
    for host in light.lab.hosts:
        network.unfilter(host)
        host_faults.unslow(host)


def same(practice: Practice, *names: str) -> None:
    """Assert that Dockers have the image, and nothing of a copy is left beside it."""
    wanted = practice.docker("node1", "images", "--quiet", "--no-trunc", NAME)
    for name in names:
        assert practice.docker(name, "images", "--quiet", "--no-trunc", NAME) == wanted != "", name
        assert practice.on(name, "ls", "/var/tmp") == ""


def again(practice: Practice, *words: str) -> dict[str, Any]:
    """Run a copy to its end; returns what it told at last."""
    ran = practice.vlaunch("image", "copy", NAME, "--json", *words)
    assert ran.code == 0, ran.said
    done: dict[str, Any] = ran.events[-1]["data"]
    return done


def start(practice: Practice) -> subprocess.Popen[str]:
    """Start a copy, and return when the slowest node has a fifth of it."""
    copying = practice.start("image", "copy", NAME, "--json")
    assert copying.stdout is not None
    for line in copying.stdout:
        data = json.loads(line).get("data", {})
        if data.get("total") and data["bytes"] > TOTAL / 5 and '"wait"' in line:
            return copying
    pytest.fail(ended(copying, 10)[1])


def test_only_missing_layers_travel(four: Practice) -> None:
    """To hosts that have none, half, and all of them; then nothing does."""
    load(four, "node3", image("half:1", 2))
    load(four, "node4", image("all:1", 4, env="A=2"))
    half = sum(map(len, LAYERS[2:]))

    assert again(four, "--to", "node4")["received"]["node4"] < 30_000
    assert half < again(four, "--to", "node3")["received"]["node3"] < half + 30_000
    assert again(four)["received"]["node2"] > TOTAL
    same(four, "node1", *OTHERS)
    assert again(four) == {"changed": 0}


def sent(host: Host) -> int:
    """Return the bytes that a host has sent so far."""
    (said,) = json.loads(machine.run("ip", "-n", host.netns, "-s", "-j", "link", "show", "eth0"))
    return int(said["stats64"]["tx"]["bytes"])


def test_the_source_sends_one_copy(four: Practice) -> None:
    """However many hosts get it."""
    before = sent(four.lab.host("node1"))
    again(four)

    same(four, *OTHERS)
    assert sent(four.lab.host("node1")) - before < 1.1 * TOTAL


def test_the_launcher_is_killed(four: Practice) -> None:
    """Nothing passes for the image; the same command does the rest."""
    kill(start(four))
    assert four.docker("node4", "images", "--quiet", NAME) == ""
    assert "of incomplete copies" in four.vlaunch("image", "list").out
    done = again(four)

    assert done["received"]["node4"] < 0.9 * TOTAL
    same(four, *OTHERS)


def test_a_nodes_program_is_killed(four: Practice) -> None:
    """It is named, the others have the image, the same command brings it the rest."""
    copying = start(four)
    four.on("node3", "pkill", "-9", "-f", "^python3 -c")
    out, err = ended(copying, 240)

    assert (copying.returncode, "node3" in out + err) == (1, True)
    same(four, "node2", "node4")
    done = again(four)
    assert list(done["received"]) == ["node3"]
    same(four, "node3")


def test_a_disk_is_too_small(four: Practice) -> None:
    """Which is said before anything is sent."""
    host = four.lab.host("node3")
    host_faults.small_disk(host, "/var/tmp", TOTAL // MB // 2)
    try:
        ran = four.vlaunch("image", "copy", NAME)
        assert ran.code == 1
        assert "node3: has too little disk space for the image" in ran.said
        assert four.docker("node2", "images", "--quiet", NAME) == ""
        again(four, "--to", "node2", "--to", "node4")
        same(four, "node2", "node4")
    finally:
        host_faults.remove_disk(host, "/var/tmp")
