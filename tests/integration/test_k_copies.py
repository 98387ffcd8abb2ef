"""Models on real hosts: copied over limited links while things break, downloaded by one host,
brought to a host that lacks one before it is served.

Four light hosts copy with their own Python; two with the image download and serve. What a program
does by itself is in tests/distribute/node, what they do together in
tests/distribute/test_coordinator.py. When and where something breaks is drawn by a seed:
`VLAUNCH_SEEDS=5` tries five of them.
"""

from __future__ import annotations

import filecmp
import json
import os
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
from tests.integration import outsiders
from tests.integration.conftest import Practice, ended, kill
from tests.integration.servers import serve

pytestmark = [pytest.mark.lab, pytest.mark.long]

MB = 10**6
NAME = "/data/huggingface/copied"
PORT = 29570
RATE = 20 * MB  # bytes a second of each link
# 40 files, 200 MB: shards, and what lies beside them
SIZES = {
    "config.json": 700,
    **{f"model-{number:05}-of-00009.safetensors": 21 * MB + number for number in range(9)},
    **{f"tokenizer/part-{number}.json": 400_000 + number for number in range(29)},
    "empty": 0,
}
TOTAL = sum(SIZES.values())
SEEDS = range(1, 1 + int(os.environ.get("VLAUNCH_SEEDS", "1")))
OTHERS = ("node2", "node3", "node4")


@pytest.fixture(params=SEEDS)
def chance(request: pytest.FixtureRequest) -> random.Random:
    """When it happens, and to whom: neighbouring small numbers draw nearly the same as seeds."""
    return random.Random(request.node.name)


def make(folder: Path, times: int = 1) -> None:
    """Write the model, its shards so many times as large."""
    source = random.Random(1)
    for name, size in SIZES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(source.randbytes(size * (times if size > 20 * MB else 1)))


def limited(practice: Practice, times: int = 1) -> Iterator[Practice]:
    """Limited links; node1 has the model, the others nothing of it."""
    for host in practice.lab.hosts:
        shutil.rmtree(folder(host), ignore_errors=True)
        host_faults.slow(host, f"{RATE * 8 // MB}mbit")
    make(folder(practice.lab.host("node1")), times)
    yield practice
    for host in practice.lab.hosts:
        network.unfilter(host)
        host_faults.unslow(host)
        shutil.rmtree(folder(host), ignore_errors=True)


@pytest.fixture
def four(light: Practice) -> Iterator[Practice]:
    yield from limited(light)


def folder(host: Host) -> Path:
    """Where a host has the model, as this machine sees it."""
    return hosts.hf_home(host) / "copied"


def differing(practice: Practice, name: str) -> list[str]:
    """Return the files of a host's model that are not the source's, byte by byte."""
    source, there = (folder(practice.lab.host(each)) for each in ("node1", name))
    _, wrong, missing = filecmp.cmpfiles(source, there, list(SIZES), shallow=False)
    return sorted([*wrong, *missing])


def same(practice: Practice, *names: str) -> None:
    """Assert that hosts have every byte of the model, and nothing unfinished."""
    for name in names:
        there = folder(practice.lab.host(name))
        assert differing(practice, name) == [], name
        assert [each.name for each in (there / ".vlaunch").iterdir()] == ["records"]


def sums(practice: Practice, name: str) -> str:
    """Return the digests of a host's files, as the host sees them."""
    command = f"cd {NAME} && find . -type f ! -path './.vlaunch/*' ! -path './lost+found/*'"
    return practice.on(name, "sh", "-c", f"{command} | sort | xargs sha256sum")


def sent(host: Host) -> int:
    """Return the bytes that a host has sent so far."""
    (said,) = json.loads(machine.run("ip", "-n", host.netns, "-s", "-j", "link", "show", "eth0"))
    return int(said["stats64"]["tx"]["bytes"])


def received(events: list[dict[str, Any]]) -> dict[str, int]:
    """Return what each node has received, as the end of a copy tells."""
    found: dict[str, int] = events[-1]["data"].get("received", {})
    return found


def start(practice: Practice, chance: random.Random, *words: str) -> subprocess.Popen[str]:
    """Start a copy, and return when the slowest node has some share of it."""
    share = chance.uniform(0.05, 0.7)
    copying = practice.start("model", "copy", NAME, "--json", *words)
    assert copying.stdout is not None
    for line in copying.stdout:
        data = json.loads(line).get("data", {})
        if data.get("total") and data["bytes"] > share * TOTAL and '"wait"' in line:
            return copying
    pytest.fail(ended(copying, 10)[1])


def end(copying: subprocess.Popen[str]) -> tuple[int, str]:
    """Await a copy's end; returns its exit code, and what it said."""
    out, err = ended(copying, 240)
    return copying.returncode, out + err


def broken(practice: Practice, copying: subprocess.Popen[str], victim: str) -> int:
    """Await the end of a copy in which something broke at a host; returns its exit code.

    Either all have every byte, or the host is named, and those that do not need it have. Nobody
    has half of a model that could be taken for whole.
    """
    code, said = end(copying)
    rest = [name for name in OTHERS if name != victim]
    assert code in (0, 1), said
    assert code == 0 or victim in said, said
    for name in OTHERS:
        if (folder(practice.lab.host(name)) / "config.json").exists():
            assert differing(practice, name) == [], name
    if code == 0:
        same(practice, *OTHERS)
    elif victim != "node1":
        same(practice, *rest)
    return code


def again(practice: Practice, *words: str) -> list[dict[str, Any]]:
    """Run the same command once more, which must do the rest."""
    ran = practice.vlaunch("model", "copy", NAME, "--json", *words)
    assert ran.code == 0, ran.said
    return ran.events


def mended(practice: Practice) -> None:
    """Have the same command once more give everybody everything."""
    again(practice)
    same(practice, *OTHERS)


def test_every_byte_is_equal_in_about_the_time_of_one_copy(four: Practice) -> None:
    """And each link carries the model once; a second copy moves nothing, also when all is read."""
    before = sent(four.lab.host("node1"))
    ran = four.vlaunch("model", "copy", NAME, "--json")

    assert ran.code == 0, ran.said
    same(four, *OTHERS)
    assert sent(four.lab.host("node1")) - before < 1.1 * TOTAL
    told = next(each for each in ran.events[::-1] if each["kind"] == "done")
    # One source for all would take three times as long as one copy.
    assert told["seconds"] < 2.2 * TOTAL / RATE
    second = again(four)
    assert second[-1]["data"] == {"changed": 0}
    third = again(four, "--compare")
    assert set(received(third).values()) == {0}


def test_eight_hosts(light_eight: Practice) -> None:
    """A gigabyte in 40 files, in about the time of one copy."""
    for practice in limited(light_eight, times=5):
        before = sent(practice.lab.host("node1"))
        ran = practice.vlaunch("model", "copy", NAME, "--json", timeout=900)

        assert ran.code == 0, ran.said
        same(practice, *(f"node{number}" for number in range(2, 9)))
        total = sum(each.stat().st_size for each in folder(practice.lab.host("node1")).rglob("*.*"))
        assert sent(practice.lab.host("node1")) - before < 1.1 * total
        done = next(each for each in ran.events[::-1] if each["kind"] == "done")
        assert done["seconds"] < 1.5 * total / RATE


def test_the_launcher_is_killed(four: Practice, chance: random.Random) -> None:
    """Nothing goes on without it, and the same command does not send again what has come."""
    kill(start(four, chance))
    time.sleep(3)
    for host in four.lab.hosts:
        assert "vlaunch_copy" not in four.on(host.name, "ps", "-ef")
        assert not (folder(host) / "config.json").exists() or host.name == "node1"
    listed = four.vlaunch("status")
    assert f"a copy of {NAME} is not finished" in " ".join(listed.said.split())
    came = received(again(four))

    same(four, *OTHERS)
    assert 0 < came["node4"] < TOTAL


def program(practice: Practice, name: str) -> int:
    """Return the process of a host's program, by the number that it has there."""
    return int(practice.on(name, "pgrep", "-o", "-f", "^python3 -c.*").split()[0])


@pytest.mark.parametrize("source", [False, True])
def test_a_nodes_program_is_killed(four: Practice, chance: random.Random, source: bool) -> None:
    """It is named. Without the source nobody has it all; without another one the others do."""
    victim = "node1" if source else chance.choice(OTHERS)
    copying = start(four, chance)
    four.on(victim, "kill", "-9", str(program(four, victim)))

    assert broken(four, copying, victim) == 1
    mended(four)


def test_a_node_is_gone_for_good(four: Practice, chance: random.Random) -> None:
    """The others have it."""
    victim = four.lab.host(chance.choice(OTHERS))
    copying = start(four, chance)
    host_faults.power_off(victim)
    try:
        assert broken(four, copying, victim.name) == 1
    finally:
        host_faults.power_on(four.lab, victim)


@pytest.mark.parametrize("seconds", [5, 0])
def test_a_cable_is_cut(four: Practice, chance: random.Random, seconds: int) -> None:
    """For a while, or until the copy is over; at most one repetition brings the rest."""
    host = four.lab.host(chance.choice(["node1", *OTHERS]))
    copying = start(four, chance)
    host_faults.unplug(host)
    try:
        if seconds:
            time.sleep(seconds)
            host_faults.plug(host)
        code = broken(four, copying, host.name)
        assert seconds or code == 1
    finally:
        host_faults.plug(host)
    mended(four)


def test_a_disk_is_filled(four: Practice, chance: random.Random) -> None:
    """The others have it; when there is room again, the same command does the rest."""
    host = four.lab.host(chance.choice(OTHERS))
    host_faults.small_disk(host, NAME, 2 * TOTAL // MB)
    try:
        copying = start(four, chance)
        host_faults.fill(host, NAME)
        code, said = end(copying)
        assert (code, host.name in said, "No space left on device" in said) == (1, True, True)
        assert four.on(host.name, "ls", f"{NAME}/config.json") == ""
        same(four, *{*OTHERS} - {host.name})
        host_faults.drain(host, NAME)
        again(four)
        assert sums(four, host.name) == sums(four, "node1")
    finally:
        host_faults.remove_disk(host, NAME)


def test_a_byte_changes_on_a_disk(four: Practice, chance: random.Random) -> None:
    """The node behind finds it, and its node is named; the last one's, or one that was passed on
    already, a second copy with `--compare` finds and repairs.
    """
    host = four.lab.host(chance.choice(OTHERS))
    source = folder(four.lab.host("node1"))
    host_faults.loop_disk(host, NAME, 2 * TOTAL // MB)
    try:
        copying = start(four, chance)
        assert any(host_faults.rot(host, NAME, _block(source, chance)) for _ in range(50))
        code, said = end(copying)
        same(four, *{*OTHERS} - {host.name})
        if code:
            assert host.name in said
            assert four.on(host.name, "ls", f"{NAME}/config.json") == ""
            again(four)
        elif sums(four, host.name) != sums(four, "node1"):
            again(four, "--compare")
        assert sums(four, host.name) == sums(four, "node1")
    finally:
        host_faults.remove_disk(host, NAME)


def _block(source: Path, chance: random.Random) -> bytes:
    """Return some bytes of a shard."""
    with (source / f"model-{chance.randrange(9):05}-of-00009.safetensors").open("rb") as file:
        file.seek(chance.randrange(5000) * 4096)
        return file.read(4096)


@pytest.mark.parametrize("how", ["--encrypt", "--no-encrypt"])
def test_bytes_change_on_their_way(four: Practice, chance: random.Random, how: str) -> None:
    """They do not count, and are fetched again."""
    host = four.lab.host(chance.choice(["node1", "node2", "node3"]))
    host_faults.garble(host, PORT, chance.randint(100, 400))
    try:
        ran = four.vlaunch("model", "copy", NAME, how, "--json")
    finally:
        changed = host_faults.ungarble(host)
    assert changed > 0
    assert ran.code == 0 or host.name in ran.said, ran.said
    if ran.code:
        again(four)
    same(four, *OTHERS)


def test_clients_without_a_valid_certificate_get_nothing(
    four: Practice, chance: random.Random
) -> None:
    """They do not disturb the copy."""
    process = start(four, chance)
    outsiders.assert_refused(four.lab.host("node2"), PORT)
    code, output = end(process)

    assert code == 0, output
    same(four, *OTHERS)


def test_nothing_is_left(four: Practice, chance: random.Random) -> None:
    """Of a model that is removed, nor of a copy that was interrupted."""
    kill(start(four, chance))
    ran = four.vlaunch("model", "remove", NAME, "--yes")

    assert ran.code == 0, ran.said
    for host in four.lab.hosts:
        assert not folder(host).exists()
        assert "vlaunch_copy" not in four.on(host.name, "ps", "-ef")
        assert f":{PORT}" not in four.on(host.name, "ss", "-ltn")
    assert four.vlaunch("down", "--yes").code == 0


# --- hosts with the image


@pytest.fixture
def pair(practice: Practice) -> Iterator[Practice]:
    """Two hosts of which nothing is up, and which have nothing of the hub's."""
    practice.write()
    assert practice.vlaunch("down", "--yes").code == 0
    yield practice
    for host in practice.lab.hosts:
        shutil.rmtree(hosts.hf_home(host) / "hub", ignore_errors=True)
    practice.write()
    assert practice.vlaunch("down", "--yes").code == 0


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
    gated = Hub(FILES, token="hf_another")
    pair.write(of_hub(gated.start(gateway)))
    ran = pair.vlaunch("model", "pull", "org/m", "--revision", "other")

    assert ran.code == 1
    assert "request access on the model's page" in " ".join(ran.err.split())


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
        assert "`vlaunch model copy /data/huggingface/tiny-llama`, or add" in refused.err
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
