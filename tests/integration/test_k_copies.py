"""Models on real hosts: copied over limited links while things break, downloaded by one host,
brought to a host that lacks one before it is served.

Four light hosts copy with their own Python; two with the image download and serve. What a program
does by itself is in tests/payload/chain, what they do together in tests/test_spread.py.
"""

from __future__ import annotations

import filecmp
import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import host_faults
from launcher.lab import hosts, machine, network
from launcher.lab.layout import Host
from tests.hub_stand_in import COMMIT, Hub
from tests.integration.conftest import Practice, ended, kill
from tests.integration.servers import serve

pytestmark = [pytest.mark.lab, pytest.mark.long]

MB = 10**6
NAME = "/data/huggingface/copied"
RATE = 20 * MB  # bytes a second of each link
# 40 files, 200 MB: shards, and what lies beside them
SIZES = {
    "config.json": 700,
    **{f"model-{number:05}-of-00009.safetensors": 21 * MB + number for number in range(9)},
    **{f"tokenizer/part-{number}.json": 400_000 + number for number in range(29)},
    "empty": 0,
}
TOTAL = sum(SIZES.values())


def make(folder: Path) -> None:
    """Write the model."""
    source = random.Random(1)
    for name, size in SIZES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(source.randbytes(size))


@pytest.fixture
def four(light: Practice) -> Iterator[Practice]:
    """Limited links; node1 has the model, the others nothing of it."""
    for host in light.lab.hosts:
        shutil.rmtree(folder(host), ignore_errors=True)
        host_faults.slow(host, f"{RATE * 8 // MB}mbit")
    make(folder(light.lab.host("node1")))
    yield light
    for host in light.lab.hosts:
        network.unfilter(host)
        host_faults.unslow(host)


def folder(host: Host) -> Path:
    """Where a host has the model, as this machine sees it."""
    return hosts.hf_home(host) / "copied"


def same(practice: Practice, *names: str) -> None:
    """Assert that hosts have every byte of the model, and nothing unfinished."""
    source = folder(practice.lab.host("node1"))
    for name in names:
        there = folder(practice.lab.host(name))
        equal, wrong, missing = filecmp.cmpfiles(source, there, list(SIZES), shallow=False)
        assert (len(equal), wrong, missing) == (len(SIZES), [], []), name
        assert [each.name for each in (there / ".vlaunch").iterdir()] == ["records"]


def sent(host: Host) -> int:
    """Return the bytes that a host has sent so far."""
    (said,) = json.loads(machine.run("ip", "-n", host.netns, "-s", "-j", "link", "show", "eth0"))
    return int(said["stats64"]["tx"]["bytes"])


def received(events: list[dict[str, Any]]) -> dict[str, int]:
    """Return what each node has received, as the end of a copy tells."""
    found: dict[str, int] = events[-1]["data"].get("received", {})
    return found


def push(practice: Practice, *words: str) -> subprocess.Popen[str]:
    """Start a copy, and return when the slowest node has a fifth of it."""
    copying = practice.start("model", "push", NAME, "--json", *words)
    assert copying.stdout is not None
    for line in copying.stdout:
        data = json.loads(line).get("data", {})
        if data.get("total") and data["bytes"] > TOTAL / 5 and '"wait"' in line:
            return copying
    pytest.fail(ended(copying, 10)[1])


def end(copying: subprocess.Popen[str]) -> tuple[int, str]:
    """Await a copy's end; returns its exit code, and what it said."""
    out, err = ended(copying, 240)
    return copying.returncode, out + err


def again(practice: Practice, *words: str) -> list[dict[str, Any]]:
    """Run the same command once more, which must do the rest."""
    ran = practice.vlaunch("model", "push", NAME, "--json", *words)
    assert ran.code == 0, ran.said
    return ran.events


def test_every_byte_is_equal_in_about_the_time_of_one_copy(four: Practice) -> None:
    """And each link carries the model once; a second push moves nothing, also when all is read."""
    before = sent(four.lab.host("node1"))
    ran = four.vlaunch("model", "push", NAME, "--json")

    assert ran.code == 0, ran.said
    same(four, "node2", "node3", "node4")
    assert sent(four.lab.host("node1")) - before < 1.1 * TOTAL
    told = next(each for each in ran.events[::-1] if each["kind"] == "done")
    # One source for all would take three times as long as one copy.
    assert told["seconds"] < 2.2 * TOTAL / RATE
    second = again(four)
    assert second[-1]["data"] == {"changed": 0}
    third = again(four, "--compare")
    assert set(received(third).values()) == {0}


def test_the_launcher_is_killed(four: Practice) -> None:
    """Nothing goes on without it, and the same command does not send again what has come."""
    kill(push(four))
    time.sleep(3)
    for host in four.lab.hosts:
        assert "vlaunch_chain" not in four.on(host.name, "ps", "-ef")
        assert not (folder(host) / "config.json").exists() or host.name == "node1"
    listed = four.vlaunch("status")
    assert f"a copy of {NAME} is not finished" in " ".join(listed.said.split())
    came = received(again(four))

    same(four, "node2", "node3", "node4")
    assert 0 < came["node4"] < 0.9 * TOTAL


def program(practice: Practice, name: str) -> int:
    """Return the process of a host's program, by the number that it has there."""
    return int(practice.on(name, "pgrep", "-o", "-f", "^python3 -c.*").split()[0])


@pytest.mark.parametrize("victim", ["node3", "node1"])
def test_a_nodes_program_is_killed(four: Practice, victim: str) -> None:
    """It is named. Without the source nobody has it all; without another one the others do."""
    copying = push(four)
    four.on(victim, "kill", "-9", str(program(four, victim)))
    code, said = end(copying)

    assert code == 1
    assert victim in said
    if victim != "node1":
        same(four, *{"node2", "node3", "node4"} - {victim})
    again(four)
    same(four, "node2", "node3", "node4")


def test_a_node_is_gone_for_good(four: Practice) -> None:
    """The others have it."""
    victim = four.lab.host("node3")
    copying = push(four)
    host_faults.power_off(victim)
    try:
        code, said = end(copying)
        assert (code, "node3" in said) == (1, True)
        same(four, "node2", "node4")
    finally:
        host_faults.power_on(four.lab, victim)


@pytest.mark.parametrize("victim", ["node2", "node4"])
def test_a_cable_is_cut_for_a_while(four: Practice, victim: str) -> None:
    """At most one repetition brings the rest."""
    host = four.lab.host(victim)
    copying = push(four)
    host_faults.unplug(host)
    time.sleep(5)
    host_faults.plug(host)
    code, said = end(copying)

    assert code == 0 or victim in said
    same(four, *{"node2", "node3", "node4"} - {victim})
    again(four)
    same(four, "node2", "node3", "node4")


def test_a_disk_is_filled(four: Practice) -> None:
    """The others have it; when there is room again, the same command does the rest."""
    host = four.lab.host("node3")
    host_faults.small_disk(host, NAME, 2 * TOTAL // MB)
    try:
        copying = push(four)
        host_faults.fill(host, NAME)
        code, said = end(copying)
        assert (code, "No space left on device" in said) == (1, True)
        same(four, "node2", "node4")
        host_faults.drain(host, NAME)
        again(four)
        command = f"cd {NAME} && find . -type f ! -path './.vlaunch/*' | sort | xargs sha256sum"
        there = four.on("node3", "sh", "-c", command)
        assert there == four.on("node1", "sh", "-c", command)
    finally:
        host_faults.remove_disk(host, NAME)


def test_nothing_is_left(four: Practice) -> None:
    """Of a model that is removed, nor of a copy that was interrupted."""
    kill(push(four))
    ran = four.vlaunch("model", "remove", NAME, "--yes")

    assert ran.code == 0, ran.said
    for host in four.lab.hosts:
        assert not folder(host).exists()
        assert "vlaunch_chain" not in four.on(host.name, "ps", "-ef")
        assert ":29570" not in four.on(host.name, "ss", "-ltn")
    assert four.vlaunch("down").code == 0


# --- hosts with the image


@pytest.fixture
def pair(practice: Practice) -> Iterator[Practice]:
    """Two hosts of which nothing is up, and which have nothing of the hub's."""
    practice.write()
    assert practice.vlaunch("down").code == 0
    yield practice
    for host in practice.lab.hosts:
        shutil.rmtree(hosts.hf_home(host) / "hub", ignore_errors=True)
    practice.write()
    assert practice.vlaunch("down").code == 0


def of_hub(address: str) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        document["env"]["HF_ENDPOINT"] = address

    return change


def without_ray(document: dict[str, Any]) -> None:
    document["ray"] = "none"


FILES = {
    "config.json": b"{}",
    "README.md": b"# A model",
    "model.safetensors": random.Random(2).randbytes(30 * MB),
    "pytorch_model.bin": b"x" * MB,
}


def test_one_host_downloads_for_all(pair: Practice) -> None:
    """From a hub that is busy at first, keeps large files elsewhere, and breaks off in the middle;
    without its token, it says that the model is gated.
    """
    gateway = pair.lab.gateway
    keeps = Hub(FILES, broken=1)
    hub = Hub(FILES, busy=1, elsewhere=keeps.start(gateway))
    pair.write(of_hub(hub.start(gateway)))
    ran = pair.vlaunch("model", "pull", "org/m", "--json")

    assert ran.code == 0, ran.said
    assert hub.by == keeps.by == {pair.lab.host("node1").ip}
    for host in pair.lab.hosts:
        snapshot = hosts.hf_home(host) / "hub/models--org--m/snapshots" / COMMIT
        there = {each.name: each for each in snapshot.iterdir()}
        assert set(there) == {*FILES} - {"pytorch_model.bin"}
        for name, each in there.items():
            assert str(each.readlink()).startswith("../../blobs/")
            assert each.read_bytes() == FILES[name]
    deep = pair.vlaunch("model", "verify", "org/m", "--deep")
    assert deep.code == 0, deep.said
    gated = Hub(FILES, token="hf_another")
    pair.write(of_hub(gated.start(gateway)))
    ran = pair.vlaunch("model", "pull", "org/m", "--revision", "other")

    assert ran.code == 1
    assert "ask for access on the model's page" in " ".join(ran.err.split())


def test_a_model_that_one_host_lacks_is_brought_and_served(pair: Practice) -> None:
    """Without the flag it is refused, with the command; with it, the answer tells of both."""
    two = hosts.hf_home(pair.lab.host("node2")) / "tiny-llama"
    away = two.with_name(".tiny-llama-away")
    pair.write(without_ray)
    assert pair.vlaunch("up", timeout=400).code == 0
    two.rename(away)
    try:
        refused = pair.vlaunch("serve", "--skip-network-check")
        assert refused.code == 1
        assert "`vlaunch model push /data/huggingface/tiny-llama`, or add" in refused.err
        ran = serve(pair, "--skip-network-check", "--fetch", "--json")
        assert ran.events[-1]["data"]["fetch_seconds"] > 0
        assert filecmp.cmpfiles(away, two, [each.name for each in away.iterdir()], False)[1:] == (
            [],
            [],
        )
        assert pair.vlaunch("stop").code == 0
    finally:
        shutil.rmtree(two, ignore_errors=True)
        away.rename(two)
