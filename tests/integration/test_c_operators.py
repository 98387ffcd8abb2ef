"""Two operators, a start that fails, and a bug report, on real parts: what the lock, rollback,
doctor and collect promise.

Each test stands on the one before.
"""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.conftest import API_KEY, HF_TOKEN, Practice, Ran, ended, kill

pytestmark = [pytest.mark.lab, pytest.mark.long]

# The cache for one request of this length does not fit into what it is given, which vLLM finds out
# when its ranks are up.
TOO_SMALL = ("--kv-cache-memory-bytes", "65536")


@pytest.fixture(scope="module", autouse=True)
def clean(practice: Practice) -> None:
    """Begin with nothing."""
    practice.write()
    assert practice.vlaunch("down", "--yes").code == 0


def holder(practice: Practice) -> dict[str, Any] | None:
    """Return who holds the cluster's lock."""
    ran = practice.vlaunch("lock", "--json")
    assert ran.code == 0, ran.said
    said = json.loads(ran.out)
    return dict(said["owner"]) if said["held"] else None


def serve(practice: Practice, *words: str) -> Ran:
    """Run `serve` with words of vLLM's."""
    return practice.vlaunch(
        "serve", "--timeout", "400", "--replace", "--or-rollback", "--", *words, timeout=900
    )


def served(practice: Practice) -> dict[str, Any]:
    """Return what `status` says of the server."""
    found: dict[str, Any] = json.loads(practice.vlaunch("status", "--json").out)["servers"][0]
    return found


def test_two_ups_at_once(practice: Practice) -> None:
    """One works; one is refused with its owner's name; one waits, and then has nothing to do."""
    first = practice.start("up")
    deadline = time.monotonic() + 30
    while (owner := holder(practice)) is None:
        assert time.monotonic() < deadline, "the first `up` takes no lock"
    refused = practice.vlaunch("up")
    waited = practice.vlaunch("up", "--lock-wait", "200", timeout=400)
    said = ended(first, 300)

    assert owner["command"] == "vlaunch up"
    assert first.returncode == 0, said
    assert refused.code == 1, refused.said
    assert f"{owner['who']}@{owner['host']}" in refused.err
    assert "hint: wait for it" in refused.err
    assert waited.code == 0, waited.said
    assert "acquired the cluster's lock" in waited.err
    assert "nothing was changed" in waited.err
    assert practice.vlaunch("status").code == 0
    assert holder(practice) is None


def test_a_killed_launcher_leaves_no_lock(practice: Practice) -> None:
    """Nor does it leave anything that keeps the next one from going on."""
    assert practice.vlaunch("down", "--yes").code == 0
    killed = practice.start("up")
    deadline = time.monotonic() + 30
    while holder(practice) is None:
        assert time.monotonic() < deadline
    kill(killed)
    ran = practice.vlaunch("up", timeout=400)

    assert ran.code == 0, ran.said


def test_the_audit_trail_tells_who_did_what(practice: Practice) -> None:
    """One entry for each command that changed something, the same on both nodes."""
    ran = practice.vlaunch("audit", "--json", "--last", "0")
    entries = json.loads(ran.out)["entries"]

    assert ran.code == 0, ran.said
    assert {name for each in entries for name in each["nodes"]} == {"node1", "node2"}
    assert {"up", "down"} <= {each["verb"] for each in entries}
    assert all(each["who"] and each["host"] and each["changes"] for each in entries)


def test_a_server_that_never_answers_gives_way_to_the_one_before(practice: Practice) -> None:
    """The exit code is that of a failure, and says why; the endpoint answers as before."""
    ran = practice.vlaunch("serve", "--timeout", "400", timeout=600)
    assert ran.code == 0, ran.said
    before = served(practice)
    ran = serve(practice, *TOO_SMALL)

    assert ran.code == 1, ran.said
    assert "failed to start; rolled back to /data/huggingface/tiny-llama" in ran.err
    assert "cache" in ran.err.lower()
    assert "hint: " in ran.err
    now = served(practice)
    assert (now["state"], now["fingerprint"]) == ("answering", before["fingerprint"])


def test_the_doctor_names_the_cause(practice: Practice) -> None:
    """Of the start that failed."""
    ran = practice.vlaunch("doctor", "--json")
    found = json.loads(ran.out)

    assert "gpu-memory-short" in {each["id"] for each in found["findings"]}, found
    assert found["gaps"] == []


def test_rollback(practice: Practice) -> None:
    """Back to what answered before another server that answers as well."""
    ran = serve(practice, "--max-num-seqs", "4")
    assert ran.code == 0, ran.said
    ran = practice.vlaunch("rollback", "--timeout", "400", timeout=600)

    assert ran.code == 0, ran.said
    assert "back to /data/huggingface/tiny-llama" in ran.err
    assert served(practice)["state"] == "answering"
    assert "--max-num-seqs 4" not in practice.command_lines()


def test_no_secret_is_in_a_command_line_on_its_way(practice: Practice) -> None:
    """As `ps` shows them, looked at again and again while secrets travel to the nodes and
    containers start with them.
    """
    seen: set[str] = set()
    before = served(practice)["observed"]["fault_count"]
    for words in (("up",), ("secrets", "rotate", "--yes"), ("serve", "--timeout", "400")):
        process, over = practice.start(*words), False
        while not over:
            seen.update(practice.command_lines().splitlines())
            with suppress(subprocess.TimeoutExpired):
                over = process.wait(0.2) is not None
        said = ended(process, 10)
        assert process.returncode == 0, said
    token = practice.on("node1", "cat", "/root/.vlaunch/lab/secrets/RAY_AUTH_TOKEN").strip()

    now = served(practice)
    assert (now["state"], now["observed"]["fault_count"]) == ("answering", before)  # nobody's fault
    assert any("docker" in line for line in seen)
    assert [
        line for line in seen if any(value in line for value in (HF_TOKEN, API_KEY, token))
    ] == []


def test_no_secret_is_anywhere(practice: Practice, tmp_path: Path) -> None:
    """Not in a bundle, the audit trail, events, logs, `ps`, `docker inspect`, nor any file here but
    those that give them.
    """
    bundle = tmp_path / "bundle.tar.gz"
    ran = practice.vlaunch("collect", "-o", str(bundle))
    assert ran.code == 0, ran.said
    with tarfile.open(bundle) as archive:
        files = {each.name: archive.extractfile(each) for each in archive if each.isfile()}
        bundled = {
            name: file.read().decode(errors="replace") for name, file in files.items() if file
        }
    token = practice.on("node1", "cat", "/root/.vlaunch/lab/secrets/RAY_AUTH_TOKEN").strip()
    places = {
        **bundled,
        "events": practice.vlaunch("up", "--json").said + practice.vlaunch("status", "--json").said,
        "audit": practice.vlaunch("audit", "--json", "--last", "0").out,
        "logs": practice.vlaunch("logs", "--tail", "100000").out,
        "doctor": practice.vlaunch("doctor", "--json").out,
        "command lines": practice.command_lines(),
        "all that was printed": "\n".join(practice.said),
        "docker inspect": "".join(
            practice.docker(host.name, "inspect", *practice.docker(host.name, "ps", "-aq").split())
            for host in practice.lab.hosts
        ),
        **{str(path): path.read_text(errors="replace") for path in _kept(practice)},
    }

    assert any(name.endswith("inventory.yaml") for name in bundled)
    assert any("/nodes/" in name and "log" in name for name in bundled)
    assert len(token) == 64
    found = [
        (place, name)
        for place, text in places.items()
        for name, value in (("HF", HF_TOKEN), ("API", API_KEY), ("Ray", token))
        if value in text
    ]
    assert found == []
    for host in practice.lab.hosts:
        for name, value in (("HF", HF_TOKEN), ("API", API_KEY), ("Ray", token)):
            listed = practice.on(
                host.name,
                "grep",
                "-rlF",
                "--",
                value,
                "/root/.vlaunch",
                "/tmp",
                "/var/log",
                "/var/lib/docker/containers",
            )
            assert listed, f"{name} is not even where it belongs"
            assert all("/secrets/" in line for line in listed.split()), (host.name, name, listed)
    for container, host in _running(practice):
        for name, value in (("HF", HF_TOKEN), ("API", API_KEY), ("Ray", token)):
            # Ray's and vLLM's own logs lie here, with nobody's redaction between them and the disk.
            argv = (
                "exec",
                container,
                "grep",
                "-rlF",
                "--",
                value,
                "/tmp",
                "/var/log",
                "/var/lib/vlaunch",
                "/data/huggingface",
            )
            assert practice.docker(host, *argv) == "", (container, name)
        assert "session_latest" in practice.docker(host, "exec", container, "ls", "/tmp/ray")


def _running(practice: Practice) -> list[tuple[str, str]]:
    """Return the cluster's running containers, each with its host."""
    listed = {
        host.name: practice.docker(
            host.name, "ps", "--filter", "label=vlaunch.cluster", "--format", "{{.Names}}"
        )
        for host in practice.lab.hosts
    }
    return [(name, host) for host, names in listed.items() for name in names.split()]


def _kept(practice: Practice) -> list[Path]:
    """Return the files that vlaunch keeps on this machine, and all beside the inventory but the
    key's own.
    """
    roots = [
        practice.folder,
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vlaunch",
    ]
    found = [
        path
        for root in roots
        for path in root.rglob("*")
        if path.is_file() and path.stat().st_size < 1 << 20
    ]
    return [path for path in found if path != practice.folder / "api.key"]


def test_down_leaves_nothing(practice: Practice) -> None:
    """But the lines that tell of it."""
    ran = practice.vlaunch("down", "--yes")

    assert ran.code == 0, ran.said
    assert practice.containers() == {}
