"""An SSH user that may run only Docker through sudo; Ray without its token; secrets: rotated, and
on no disk.

Each test depends on the one before.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.integration.conftest import API_KEY, HF_TOKEN, LabCluster

pytestmark = [pytest.mark.lab, pytest.mark.long]

Document = dict[str, Any]
# HTTP status of requests without a token, with a wrong one, and with the right one, from inside the
# head's container.
_SEND_REQUESTS = """
import json, sys, urllib.error, urllib.request
token = open("/run/vlaunch/secrets/RAY_AUTH_TOKEN").read().strip()
def send(url, token, body=None):
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = "Bearer " + token
    try:
        request = urllib.request.Request(url, body, headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
job = json.dumps({"entrypoint": "touch /tmp/nobody-asked-for-this"}).encode()
jobs = "http://127.0.0.1:8265/api/jobs/"
print(json.dumps({
    "list": [send(jobs, ""), send(jobs, "x" * 64), send(jobs, token)],
    "submit": [send(jobs, "", job), send(jobs, "x" * 64, job)],
    "nodes": [send("http://127.0.0.1:8265/api/v0/nodes", key) for key in ("", token)],
}))
"""


def _restricted(document: Document) -> None:
    for node in document["nodes"]:
        node["ssh"] = {"user": "ops"}
    document["docker"] = ["sudo", "-n", "docker"]


@pytest.fixture(scope="module", autouse=True)
def clean(lab_cluster: LabCluster) -> None:
    """Start without a cluster, and with the restricted SSH user."""
    lab_cluster.write()
    assert lab_cluster.vlaunch("down", "--yes").code == 0
    lab_cluster.write(_restricted)


def test_the_user_is_restricted(lab_cluster: LabCluster) -> None:
    """It can neither use Docker directly, nor run anything else as root."""
    for host in lab_cluster.lab.hosts:
        as_ops = ("setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups")
        script = (
            'docker ps >/dev/null 2>&1; echo "$?"; sudo -n true 2>/dev/null; echo "$?"; sudo -n'
            ' docker ps >/dev/null; echo "$?"'
        )
        direct, anything, through = lab_cluster.on(host.name, *as_ops, "sh", "-c", script).split()

        assert (direct != "0", anything != "0", through) == (True, True, "0")


def test_up(lab_cluster: LabCluster) -> None:
    """As for any other user; its files are readable by it alone."""
    result = lab_cluster.vlaunch("up", timeout=400)

    assert result.code == 0, result.output
    for host in lab_cluster.lab.hosts:
        listed = lab_cluster.on(
            host.name,
            "sh",
            "-c",
            "stat -c '%U %a %F %n' /home/ops/.vlaunch/*/secrets /home/ops/.vlaunch/*/secrets/*",
        )
        rows = [line.split(" ", 2) for line in listed.splitlines()]
        assert {row[0] for row in rows} == {"ops"}
        assert {row[1] for row in rows if "directory" in row[2]} == {"700"}
        assert {row[1] for row in rows if "regular" in row[2]} == {"600"}
        assert sum("regular" in row[2] for row in rows) == 3
    listed_secrets = lab_cluster.vlaunch("secrets", "list", "--json")
    assert listed_secrets.code == 0, listed_secrets.output
    assert [row["name"] for row in json.loads(listed_secrets.out)["secrets"]] == [
        "HF_TOKEN",
        "VLLM_API_KEY",
        "RAY_AUTH_TOKEN",
    ]


def test_ray_refuses_clients_without_a_token(lab_cluster: LabCluster) -> None:
    """On its job API, its state API, and the job API of the agents, which the network can reach."""
    container = next(name for name in lab_cluster.containers() if name.endswith("node1"))
    codes = json.loads(
        lab_cluster.docker("node1", "exec", container, "python3", "-c", _SEND_REQUESTS)
    )

    assert codes["list"] == [401, 403, 200] or codes["list"] == [401, 401, 200]
    assert codes["submit"][0] == 401
    assert codes["submit"][1] in (401, 403)
    assert codes["nodes"] == [401, 200]
    assert (
        lab_cluster.docker(
            "node1", "exec", container, "sh", "-c", "ls /tmp | grep -c nobody-asked || true"
        ).strip()
        == "0"
    )
    for host in lab_cluster.lab.hosts:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://{host.ip}:52365/api/job_agent/jobs/", timeout=10)
        assert refused.value.code == 401
        refused.value.close()


def test_the_dashboard_is_on_loopback_only(lab_cluster: LabCluster) -> None:
    """No other host can connect."""
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{lab_cluster.lab.hosts[0].ip}:8265/", timeout=5)


def test_serve_chat_stop(lab_cluster: LabCluster) -> None:
    """The main workflow."""
    assert lab_cluster.vlaunch("serve", timeout=420).code == 0
    result = lab_cluster.vlaunch("chat", "--max-tokens", "4", "Hi")
    assert result.code == 0, result.output
    assert lab_cluster.vlaunch("status", "--json").code == 0
    assert lab_cluster.vlaunch("stop", timeout=120).code == 0


def test_rotate(lab_cluster: LabCluster) -> None:
    """A new token, the same on every node; the cluster works with it."""
    path = "/home/ops/.vlaunch/*/secrets/RAY_AUTH_TOKEN"
    before = {
        lab_cluster.on(host.name, "sh", "-c", f"cat {path}") for host in lab_cluster.lab.hosts
    }
    result = lab_cluster.vlaunch(
        "secrets", "rotate", timeout=400
    )  # no server runs: there is no prompt
    after = {lab_cluster.on(host.name, "sh", "-c", f"cat {path}") for host in lab_cluster.lab.hosts}

    assert result.code == 0, result.output
    assert (len(before), len(after), before & after) == (1, 1, set())
    assert lab_cluster.vlaunch("status", "--json").code == 0
    container = next(name for name in lab_cluster.containers() if name.endswith("node1"))
    assert (
        json.loads(lab_cluster.docker("node1", "exec", container, "python3", "-c", _SEND_REQUESTS))[
            "list"
        ][-1]
        == 200
    )


def test_down_leaves_nothing(lab_cluster: LabCluster) -> None:
    """Verified by the command, and by a search of the hosts."""
    result = lab_cluster.vlaunch("down", "--yes")

    assert result.code == 0, result.output
    assert lab_cluster.containers() == {}
    for host in lab_cluster.lab.hosts:
        files = lab_cluster.on(
            host.name,
            "sh",
            "-c",
            "find / -xdev -path /proc -prune -o -name RAY_AUTH_TOKEN -print 2>/dev/null",
        )
        assert files.strip() == ""


def test_no_secret_was_printed(lab_cluster: LabCluster) -> None:
    """In all output of this session's commands."""
    output = "\n".join(lab_cluster.outputs)

    assert HF_TOKEN not in output
    assert API_KEY not in output


def test_secrets_in_memory(lab_cluster: LabCluster) -> None:
    """No disk has them; `up` restores a node that lost them; `down` removes them."""
    lab_cluster.write(lambda document: document.update(secrets_in="memory"))
    result = lab_cluster.vlaunch("up", timeout=400)
    assert result.code == 0, result.output
    for host in lab_cluster.lab.hosts:
        assert (
            lab_cluster.on(
                host.name, "sh", "-c", "ls -d /root/.vlaunch/*/secrets 2>/dev/null || true"
            ).strip()
            == ""
        )
        names = lab_cluster.on(
            host.name,
            "sh",
            "-c",
            "ls /run/vlaunch-root/*/secrets /dev/shm/vlaunch-root/*/secrets 2>/dev/null",
        )
        assert {"HF_TOKEN", "VLLM_API_KEY", "RAY_AUTH_TOKEN"} <= set(names.split())
    # as after a reboot
    lab_cluster.on("node2", "sh", "-c", "rm -rf /run/vlaunch-root /dev/shm/vlaunch-root")
    result = lab_cluster.vlaunch("up", timeout=400)
    assert result.code == 0, result.output
    assert "node2: its secrets are gone" in result.err
    result = lab_cluster.vlaunch("down", "--yes")
    assert result.code == 0, result.output
    for host in lab_cluster.lab.hosts:
        assert (
            lab_cluster.on(
                host.name,
                "sh",
                "-c",
                "ls -d /run/vlaunch-root /dev/shm/vlaunch-root 2>/dev/null || true",
            ).strip()
            == ""
        )
