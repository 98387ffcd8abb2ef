"""Two operators, a failed start, and a bug report, on real parts: lock, rollback, doctor and
collect.

Each test depends on the one before.
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

from tests.integration.conftest import (
    API_KEY,
    HF_TOKEN,
    CommandResult,
    LabCluster,
    kill_session,
    wait_for_output,
)

pytestmark = [pytest.mark.lab, pytest.mark.long]

# Too small for the KV cache of one request, which vLLM detects when its ranks are up.
TOO_SMALL = ("--kv-cache-memory-bytes", "65536")


@pytest.fixture(scope="module", autouse=True)
def clean(lab_cluster: LabCluster) -> None:
    """Start without a cluster."""
    lab_cluster.write()
    assert lab_cluster.vlaunch("down", "--yes").code == 0


def read_lock_owner(lab_cluster: LabCluster) -> dict[str, Any] | None:
    """Return the owner of the cluster's lock."""
    result = lab_cluster.vlaunch("lock", "--json")
    assert result.code == 0, result.output
    lock = json.loads(result.out)
    return dict(lock["owner"]) if lock["held"] else None


def serve(lab_cluster: LabCluster, *arguments: str) -> CommandResult:
    """Run `serve` with arguments of vLLM."""
    return lab_cluster.vlaunch(
        "serve", "--timeout", "400", "--replace", "--or-rollback", "--", *arguments, timeout=900
    )


def read_server(lab_cluster: LabCluster) -> dict[str, Any]:
    """Return the server in `status`."""
    server: dict[str, Any] = json.loads(lab_cluster.vlaunch("status", "--json").out)["servers"][0]
    return server


def test_two_ups_at_once(lab_cluster: LabCluster) -> None:
    """One works; one is refused with the owner's name; one waits, and then has nothing to do."""
    first = lab_cluster.start("up")
    deadline = time.monotonic() + 30
    while (owner := read_lock_owner(lab_cluster)) is None:
        assert time.monotonic() < deadline, "the first `up` takes no lock"
    refused = lab_cluster.vlaunch("up")
    waited = lab_cluster.vlaunch("up", "--lock-wait", "200", timeout=400)
    output = wait_for_output(first, 300)

    assert owner["command"] == "vlaunch up"
    assert first.returncode == 0, output
    assert refused.code == 1, refused.output
    assert f"{owner['who']}@{owner['host']}" in refused.err
    assert "hint: wait for it" in refused.err
    assert waited.code == 0, waited.output
    assert "acquired the cluster's lock" in waited.err
    assert "nothing was changed" in waited.err
    assert lab_cluster.vlaunch("status").code == 0
    assert read_lock_owner(lab_cluster) is None


def test_a_killed_launcher_leaves_no_lock(lab_cluster: LabCluster) -> None:
    """Nor anything else that blocks the next command."""
    assert lab_cluster.vlaunch("down", "--yes").code == 0
    killed = lab_cluster.start("up")
    deadline = time.monotonic() + 30
    while read_lock_owner(lab_cluster) is None:
        assert time.monotonic() < deadline
    kill_session(killed)
    result = lab_cluster.vlaunch("up", timeout=400)

    assert result.code == 0, result.output


def test_the_audit_log_shows_all_changes(lab_cluster: LabCluster) -> None:
    """One entry for each command that changed something, the same on both nodes."""
    result = lab_cluster.vlaunch("audit", "--json", "--tail", "all")
    entries = json.loads(result.out)["entries"]

    assert result.code == 0, result.output
    assert {name for entry in entries for name in entry["nodes"]} == {"node1", "node2"}
    assert {"up", "down"} <= {entry["verb"] for entry in entries}
    assert all(entry["who"] and entry["host"] and entry["changes"] for entry in entries)


def test_a_failed_start_rolls_back(lab_cluster: LabCluster) -> None:
    """The exit code is that of a failure, with the reason; the endpoint answers as before."""
    result = lab_cluster.vlaunch("serve", "--timeout", "400", timeout=600)
    assert result.code == 0, result.output
    before = read_server(lab_cluster)
    result = serve(lab_cluster, *TOO_SMALL)

    assert result.code == 1, result.output
    assert "failed to start; rolled back to /data/huggingface/tiny-llama" in result.err
    assert "cache" in result.err.lower()
    assert "hint: " in result.err
    now = read_server(lab_cluster)
    assert (now["state"], now["fingerprint"]) == ("answering", before["fingerprint"])


def test_the_doctor_names_the_cause(lab_cluster: LabCluster) -> None:
    """Of the failed start."""
    result = lab_cluster.vlaunch("doctor", "--json")
    diagnosis = json.loads(result.out)

    assert "kv-cache-short" in {finding["id"] for finding in diagnosis["findings"]}, diagnosis
    assert diagnosis["gaps"] == []


def test_rollback(lab_cluster: LabCluster) -> None:
    """Back to the previous server, although the current one answers as well."""
    result = serve(lab_cluster, "--max-num-seqs", "4")
    assert result.code == 0, result.output
    result = lab_cluster.vlaunch("rollback", "--timeout", "400", timeout=600)

    assert result.code == 0, result.output
    assert "back to /data/huggingface/tiny-llama" in result.err
    assert read_server(lab_cluster)["state"] == "answering"
    assert "--max-num-seqs 4" not in lab_cluster.command_lines()


def test_no_secret_is_ever_in_a_command_line(lab_cluster: LabCluster) -> None:
    """Command lines are read all the time while secrets are copied to the nodes and containers
    start with them.
    """
    command_lines: set[str] = set()
    before = read_server(lab_cluster)["observed"]["fault_count"]
    for arguments in (("up",), ("secrets", "rotate", "--yes"), ("serve", "--timeout", "400")):
        process, is_over = lab_cluster.start(*arguments), False
        while not is_over:
            command_lines.update(lab_cluster.command_lines().splitlines())
            with suppress(subprocess.TimeoutExpired):
                is_over = process.wait(0.2) is not None
        output = wait_for_output(process, 10)
        assert process.returncode == 0, output
    token = lab_cluster.on("node1", "cat", "/root/.vlaunch/lab/secrets/RAY_AUTH_TOKEN").strip()

    now = read_server(lab_cluster)
    assert (now["state"], now["observed"]["fault_count"]) == ("answering", before)  # no fault
    assert any("docker" in line for line in command_lines)
    assert [
        line for line in command_lines if any(value in line for value in (HF_TOKEN, API_KEY, token))
    ] == []


def test_no_secret_is_anywhere(lab_cluster: LabCluster, tmp_path: Path) -> None:
    """Not in a bundle, the audit log, events, logs, `ps`, `docker inspect`, nor any local file but
    the sources of the secrets.
    """
    bundle = tmp_path / "bundle.tar.gz"
    result = lab_cluster.vlaunch("collect", "-o", str(bundle))
    assert result.code == 0, result.output
    with tarfile.open(bundle) as archive:
        files = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
        bundled = {
            name: file.read().decode(errors="replace") for name, file in files.items() if file
        }
    token = lab_cluster.on("node1", "cat", "/root/.vlaunch/lab/secrets/RAY_AUTH_TOKEN").strip()
    texts = {
        **bundled,
        "events": lab_cluster.vlaunch("up", "--json").output
        + lab_cluster.vlaunch("status", "--json").output,
        "audit": lab_cluster.vlaunch("audit", "--json", "--tail", "all").out,
        "logs": lab_cluster.vlaunch("logs", "--tail", "100000").out,
        "doctor": lab_cluster.vlaunch("doctor", "--json").out,
        "command lines": lab_cluster.command_lines(),
        "all that was printed": "\n".join(lab_cluster.outputs),
        "docker inspect": "".join(
            lab_cluster.docker(
                host.name, "inspect", *lab_cluster.docker(host.name, "ps", "-aq").split()
            )
            for host in lab_cluster.lab.hosts
        ),
        **{str(path): path.read_text(errors="replace") for path in _local_files(lab_cluster)},
    }

    assert any(name.endswith("inventory.yaml") for name in bundled)
    assert any("/nodes/" in name and "log" in name for name in bundled)
    assert len(token) == 64
    leaks = [
        (place, name)
        for place, text in texts.items()
        for name, value in (("HF", HF_TOKEN), ("API", API_KEY), ("Ray", token))
        if value in text
    ]
    assert leaks == []
    for host in lab_cluster.lab.hosts:
        for name, value in (("HF", HF_TOKEN), ("API", API_KEY), ("Ray", token)):
            listed = lab_cluster.on(
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
    for container, host in _running_containers(lab_cluster):
        for name, value in (("HF", HF_TOKEN), ("API", API_KEY), ("Ray", token)):
            # Ray and vLLM write their own logs to these folders, without redaction.
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
            assert lab_cluster.docker(host, *argv) == "", (container, name)
        assert "session_latest" in lab_cluster.docker(host, "exec", container, "ls", "/tmp/ray")


def _running_containers(lab_cluster: LabCluster) -> list[tuple[str, str]]:
    """Return the cluster's running containers, each with its host."""
    listed = {
        host.name: lab_cluster.docker(
            host.name, "ps", "--filter", "label=vlaunch.cluster", "--format", "{{.Names}}"
        )
        for host in lab_cluster.lab.hosts
    }
    return [(name, host) for host, names in listed.items() for name in names.split()]


def _local_files(lab_cluster: LabCluster) -> list[Path]:
    """Return the local files of vlaunch, and all beside the inventory but the key's own."""
    roots = [
        lab_cluster.folder,
        Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "vlaunch",
    ]
    files = [
        path
        for root in roots
        for path in root.rglob("*")
        if path.is_file() and path.stat().st_size < 1 << 20
    ]
    return [path for path in files if path != lab_cluster.folder / "api.key"]


def test_down_leaves_nothing(lab_cluster: LabCluster) -> None:
    """Except the audit log."""
    result = lab_cluster.vlaunch("down", "--yes")

    assert result.code == 0, result.output
    assert lab_cluster.containers() == {}
