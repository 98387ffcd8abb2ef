"""Models on real hosts: copied over limited links with injected faults, downloaded by one host,
fetched by a host before a server starts.

Four light hosts copy with their own Python; two with the image download and serve. Tests of single
programs are in tests/distribute/node, of their cooperation in tests/distribute/test_coordinator.py.
A seed chooses time and place of a fault: `VLAUNCH_SEEDS=5` tries five.
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
from tests.integration.conftest import LabCluster, kill_session, wait_for_output
from tests.integration.servers import serve

pytestmark = [pytest.mark.lab, pytest.mark.long]

MB = 10**6
NAME = "/data/huggingface/copied"
PORT = 29570
RATE = 20 * MB  # bytes a second of each link
# 40 files, 200 MB: shards and small files
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
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random choices of a test; its name is the seed, because small similar seeds give similar
    numbers.
    """
    return random.Random(request.node.name)


def write_model(folder: Path, times: int = 1) -> None:
    """Write the model, its shards `times` as large."""
    source = random.Random(1)
    for name, size in SIZES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(source.randbytes(size * (times if size > 20 * MB else 1)))


def limited_links(lab_cluster: LabCluster, times: int = 1) -> Iterator[LabCluster]:
    """Limited links; only node1 has the model."""
    for host in lab_cluster.lab.hosts:
        shutil.rmtree(model_dir(host), ignore_errors=True)
        host_faults.limit_rate(host, f"{RATE * 8 // MB}mbit")
    write_model(model_dir(lab_cluster.lab.host("node1")), times)
    yield lab_cluster
    for host in lab_cluster.lab.hosts:
        network.unfilter(host)
        host_faults.unlimit_rate(host)
        shutil.rmtree(model_dir(host), ignore_errors=True)


@pytest.fixture
def four(light: LabCluster) -> Iterator[LabCluster]:
    yield from limited_links(light)


def model_dir(host: Host) -> Path:
    """Return the folder of a host's model, as this machine sees it."""
    return hosts.hf_home(host) / "copied"


def differing_files(lab_cluster: LabCluster, name: str) -> list[str]:
    """Return the files of a host's model that differ from the source, byte by byte."""
    source, target = (model_dir(lab_cluster.lab.host(host)) for host in ("node1", name))
    _, wrong, missing = filecmp.cmpfiles(source, target, list(SIZES), shallow=False)
    return sorted([*wrong, *missing])


def assert_complete(lab_cluster: LabCluster, *names: str) -> None:
    """Assert that hosts have every byte of the model, and no partial file."""
    for name in names:
        target = model_dir(lab_cluster.lab.host(name))
        assert differing_files(lab_cluster, name) == [], name
        assert [path.name for path in (target / ".vlaunch").iterdir()] == ["records"]


def read_digests(lab_cluster: LabCluster, name: str) -> str:
    """Return the digests of a host's files, as the host sees them."""
    command = f"cd {NAME} && find . -type f ! -path './.vlaunch/*' ! -path './lost+found/*'"
    return lab_cluster.on(name, "sh", "-c", f"{command} | sort | xargs sha256sum")


def bytes_sent(host: Host) -> int:
    """Return the number of bytes that a host has sent."""
    (link,) = json.loads(machine.run("ip", "-n", host.netns, "-s", "-j", "link", "show", "eth0"))
    return int(link["stats64"]["tx"]["bytes"])


def bytes_received(events: list[dict[str, Any]]) -> dict[str, int]:
    """Return the bytes that each node received, by the last event of a copy."""
    sizes: dict[str, int] = events[-1]["data"].get("received", {})
    return sizes


def start_copy(lab_cluster: LabCluster, rng: random.Random, *options: str) -> subprocess.Popen[str]:
    """Start a copy, and return when the slowest node has a random share of it."""
    share = rng.uniform(0.05, 0.7)
    process = lab_cluster.start("model", "copy", NAME, "--json", *options)
    assert process.stdout is not None
    for line in process.stdout:
        data = json.loads(line).get("data", {})
        if data.get("total") and data["bytes"] > share * TOTAL and '"wait"' in line:
            return process
    pytest.fail(wait_for_output(process, 10)[1])


def await_copy(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Wait for a copy; return its exit code and output."""
    out, err = wait_for_output(process, 240)
    return process.returncode, out + err


def await_broken_copy(lab_cluster: LabCluster, process: subprocess.Popen[str], victim: str) -> int:
    """Wait for a copy with a fault at a host; return its exit code.

    Either all have every byte, or the host is named, and the hosts that do not need it are
    complete. No host has a partial model that looks complete.
    """
    code, output = await_copy(process)
    others = [name for name in OTHERS if name != victim]
    assert code in (0, 1), output
    assert code == 0 or victim in output, output
    for name in OTHERS:
        if (model_dir(lab_cluster.lab.host(name)) / "config.json").exists():
            assert differing_files(lab_cluster, name) == [], name
    if code == 0:
        assert_complete(lab_cluster, *OTHERS)
    elif victim != "node1":
        assert_complete(lab_cluster, *others)
    return code


def repeat_copy(lab_cluster: LabCluster, *options: str) -> list[dict[str, Any]]:
    """Run the same command once more, which must do the rest."""
    result = lab_cluster.vlaunch("model", "copy", NAME, "--json", *options)
    assert result.code == 0, result.output
    return result.events


def assert_repaired(lab_cluster: LabCluster) -> None:
    """Assert that the same command completes all copies."""
    repeat_copy(lab_cluster)
    assert_complete(lab_cluster, *OTHERS)


def test_copies_take_about_the_time_of_a_single_copy(four: LabCluster) -> None:
    """Each link carries the model once; a second copy transfers nothing, also with `--compare`."""
    before = bytes_sent(four.lab.host("node1"))
    result = four.vlaunch("model", "copy", NAME, "--json")

    assert result.code == 0, result.output
    assert_complete(four, *OTHERS)
    assert bytes_sent(four.lab.host("node1")) - before < 1.1 * TOTAL
    last = next(event for event in result.events[::-1] if event["kind"] == "done")
    # One source for all would take three times as long as one copy.
    assert last["seconds"] < 2.2 * TOTAL / RATE
    second = repeat_copy(four)
    assert second[-1]["data"] == {"changed": 0}
    third = repeat_copy(four, "--compare")
    assert set(bytes_received(third).values()) == {0}


def test_eight_hosts(light_eight: LabCluster) -> None:
    """A gigabyte in 40 files, in about the time of one copy."""
    for lab_cluster in limited_links(light_eight, times=5):
        before = bytes_sent(lab_cluster.lab.host("node1"))
        result = lab_cluster.vlaunch("model", "copy", NAME, "--json", timeout=900)

        assert result.code == 0, result.output
        assert_complete(lab_cluster, *(f"node{number}" for number in range(2, 9)))
        total = sum(
            event.stat().st_size for event in model_dir(lab_cluster.lab.host("node1")).rglob("*.*")
        )
        assert bytes_sent(lab_cluster.lab.host("node1")) - before < 1.1 * total
        done = next(event for event in result.events[::-1] if event["kind"] == "done")
        assert done["seconds"] < 1.5 * total / RATE


def test_the_launcher_is_killed(four: LabCluster, rng: random.Random) -> None:
    """The programs stop, and the same command does not send the received part again."""
    kill_session(start_copy(four, rng))
    time.sleep(3)
    for host in four.lab.hosts:
        assert "vlaunch_copy" not in four.on(host.name, "ps", "-ef")
        assert not (model_dir(host) / "config.json").exists() or host.name == "node1"
    listed = four.vlaunch("status")
    assert f"a copy of {NAME} is not finished" in " ".join(listed.output.split())
    sizes = bytes_received(repeat_copy(four))

    assert_complete(four, *OTHERS)
    assert 0 < sizes["node4"] < TOTAL


def find_program(lab_cluster: LabCluster, name: str) -> int:
    """Return the pid of a host's program, as the host sees it."""
    return int(lab_cluster.on(name, "pgrep", "-o", "-f", "^python3 -c.*").split()[0])


@pytest.mark.parametrize("source", [False, True])
def test_a_nodes_program_is_killed(four: LabCluster, rng: random.Random, source: bool) -> None:
    """The node is named. Without the source no host is complete; without another node the others
    are.
    """
    victim = "node1" if source else rng.choice(OTHERS)
    copying = start_copy(four, rng)
    four.on(victim, "kill", "-9", str(find_program(four, victim)))

    assert await_broken_copy(four, copying, victim) == 1
    assert_repaired(four)


def test_a_node_is_gone_for_good(four: LabCluster, rng: random.Random) -> None:
    """The others are complete."""
    victim = four.lab.host(rng.choice(OTHERS))
    copying = start_copy(four, rng)
    host_faults.power_off(victim)
    try:
        assert await_broken_copy(four, copying, victim.name) == 1
    finally:
        host_faults.power_on(four.lab, victim)


@pytest.mark.parametrize("seconds", [5, 0])
def test_a_cable_is_cut(four: LabCluster, rng: random.Random, seconds: int) -> None:
    """Briefly, or until the end of the copy; at most one repetition completes it."""
    host = four.lab.host(rng.choice(["node1", *OTHERS]))
    copying = start_copy(four, rng)
    host_faults.unplug(host)
    try:
        if seconds:
            time.sleep(seconds)
            host_faults.plug(host)
        code = await_broken_copy(four, copying, host.name)
        assert seconds or code == 1
    finally:
        host_faults.plug(host)
    assert_repaired(four)


def test_a_disk_is_filled(four: LabCluster, rng: random.Random) -> None:
    """The others are complete; with free space again, the same command does the rest."""
    host = four.lab.host(rng.choice(OTHERS))
    host_faults.small_disk(host, NAME, 2 * TOTAL // MB)
    try:
        copying = start_copy(four, rng)
        host_faults.fill(host, NAME)
        code, output = await_copy(copying)
        assert (code, host.name in output, "No space left on device" in output) == (1, True, True)
        assert four.on(host.name, "ls", f"{NAME}/config.json") == ""
        assert_complete(four, *{*OTHERS} - {host.name})
        host_faults.drain(host, NAME)
        repeat_copy(four)
        assert read_digests(four, host.name) == read_digests(four, "node1")
    finally:
        host_faults.remove_disk(host, NAME)


def test_a_byte_changes_on_a_disk(four: LabCluster, rng: random.Random) -> None:
    """The next node detects it and names the faulty one. A change on the last node, or after the
    byte was forwarded, is repaired by a second copy with `--compare`.
    """
    host = four.lab.host(rng.choice(OTHERS))
    source = model_dir(four.lab.host("node1"))
    host_faults.loop_disk(host, NAME, 2 * TOTAL // MB)
    try:
        copying = start_copy(four, rng)
        assert any(host_faults.corrupt_block(host, NAME, _block(source, rng)) for _ in range(50))
        code, output = await_copy(copying)
        assert_complete(four, *{*OTHERS} - {host.name})
        if code:
            assert host.name in output
            assert four.on(host.name, "ls", f"{NAME}/config.json") == ""
            repeat_copy(four)
        elif read_digests(four, host.name) != read_digests(four, "node1"):
            repeat_copy(four, "--compare")
        assert read_digests(four, host.name) == read_digests(four, "node1")
    finally:
        host_faults.remove_disk(host, NAME)


def _block(source: Path, rng: random.Random) -> bytes:
    """Return a random block of a shard."""
    with (source / f"model-{rng.randrange(9):05}-of-00009.safetensors").open("rb") as file:
        file.seek(rng.randrange(5000) * 4096)
        return file.read(4096)


@pytest.mark.parametrize("option", ["--encrypt", "--no-encrypt"])
def test_corrupted_packets_are_fetched_again(
    four: LabCluster, rng: random.Random, option: str
) -> None:
    """They are discarded and fetched again."""
    host = four.lab.host(rng.choice(["node1", "node2", "node3"]))
    host_faults.garble(host, PORT, rng.randint(100, 400))
    try:
        result = four.vlaunch("model", "copy", NAME, option, "--json")
    finally:
        changed = host_faults.ungarble(host)
    assert changed > 0
    assert result.code == 0 or host.name in result.output, result.output
    if result.code:
        repeat_copy(four)
    assert_complete(four, *OTHERS)


def test_clients_without_a_valid_certificate_get_nothing(
    four: LabCluster, rng: random.Random
) -> None:
    """They do not disturb the copy."""
    process = start_copy(four, rng)
    outsiders.assert_refused(four.lab.host("node2"), PORT)
    code, output = await_copy(process)

    assert code == 0, output
    assert_complete(four, *OTHERS)


def test_removal_leaves_nothing(four: LabCluster, rng: random.Random) -> None:
    """Of a removed model, nor of an interrupted copy."""
    kill_session(start_copy(four, rng))
    result = four.vlaunch("model", "remove", NAME, "--yes")

    assert result.code == 0, result.output
    for host in four.lab.hosts:
        assert not model_dir(host).exists()
        assert "vlaunch_copy" not in four.on(host.name, "ps", "-ef")
        assert f":{PORT}" not in four.on(host.name, "ss", "-ltn")
    assert four.vlaunch("down", "--yes").code == 0


# --- hosts with the image


@pytest.fixture
def pair(lab_cluster: LabCluster) -> Iterator[LabCluster]:
    """Two hosts without a cluster and without files of the hub."""
    lab_cluster.write()
    assert lab_cluster.vlaunch("down", "--yes").code == 0
    yield lab_cluster
    for host in lab_cluster.lab.hosts:
        shutil.rmtree(hosts.hf_home(host) / "hub", ignore_errors=True)
    lab_cluster.write()
    assert lab_cluster.vlaunch("down", "--yes").code == 0


def hub_endpoint(address: str) -> Callable[[dict[str, Any]], None]:
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


def test_a_single_host_downloads_for_all(pair: LabCluster) -> None:
    """From a hub that is busy at first, stores large files elsewhere, and breaks a connection;
    without a token, the error says that the model is gated.
    """
    gateway = pair.lab.gateway
    storage = Hub(FILES, broken=1)
    hub = Hub(FILES, busy=1, elsewhere=storage.start(gateway))
    pair.write(hub_endpoint(hub.start(gateway)))
    result = pair.vlaunch("model", "pull", "org/m", "--json")

    assert result.code == 0, result.output
    assert hub.by == storage.by == {pair.lab.host("node1").ip}
    for host in pair.lab.hosts:
        snapshot = hosts.hf_home(host) / "hub/models--org--m/snapshots" / COMMIT
        links = {path.name: path for path in snapshot.iterdir()}
        assert set(links) == {*FILES} - {"pytorch_model.bin"}
        for name, path in links.items():
            assert str(path.readlink()).startswith("../../blobs/")
            assert path.read_bytes() == FILES[name]
    gated = Hub(FILES, token="hf_another")
    pair.write(hub_endpoint(gated.start(gateway)))
    result = pair.vlaunch("model", "pull", "org/m", "--revision", "other")

    assert result.code == 1
    assert "request access on the model's page" in " ".join(result.err.split())


def test_a_missing_model_is_fetched_and_served(pair: LabCluster) -> None:
    """Refused without the flag, with the command; with it, the result shows both durations."""
    two = hosts.hf_home(pair.lab.host("node2")) / "tiny-llama"
    away = two.with_name(".tiny-llama-away")
    pair.write(without_ray)
    assert pair.vlaunch("up", timeout=400).code == 0
    two.rename(away)
    try:
        refused = pair.vlaunch("serve", "--skip-network-check")
        assert refused.code == 1
        assert "`vlaunch model copy /data/huggingface/tiny-llama`, or add" in refused.err
        result = serve(pair, "--skip-network-check", "--fetch", "--json")
        assert result.events[-1]["data"]["fetch_seconds"] > 0
        assert filecmp.cmpfiles(away, two, [path.name for path in away.iterdir()], False)[1:] == (
            [],
            [],
        )
        assert pair.vlaunch("stop").code == 0
    finally:
        shutil.rmtree(two, ignore_errors=True)
        away.rename(two)
