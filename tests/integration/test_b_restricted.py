"""A login that may run only Docker through sudo; Ray without its token; and secrets: new ones, and
none on any disk.

Each test stands on the one before.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.integration.conftest import API_KEY, HF_TOKEN, Practice

pytestmark = [pytest.mark.lab, pytest.mark.long]

Document = dict[str, Any]
# What a GET or POST without a token, with a wrong one, and with the right one is answered, from
# inside the head's container.
_ASK = """
import json, sys, urllib.error, urllib.request
token = open("/run/vlaunch/secrets/RAY_AUTH_TOKEN").read().strip()
def ask(url, given, body=None):
    headers = {"Content-Type": "application/json"}
    if given:
        headers["Authorization"] = "Bearer " + given
    try:
        request = urllib.request.Request(url, body, headers)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
job = json.dumps({"entrypoint": "touch /tmp/nobody-asked-for-this"}).encode()
jobs = "http://127.0.0.1:8265/api/jobs/"
print(json.dumps({
    "list": [ask(jobs, ""), ask(jobs, "x" * 64), ask(jobs, token)],
    "submit": [ask(jobs, "", job), ask(jobs, "x" * 64, job)],
    "nodes": [ask("http://127.0.0.1:8265/api/v0/nodes", each) for each in ("", token)],
}))
"""


def _restricted(document: Document) -> None:
    for node in document["nodes"]:
        node["ssh"] = {"user": "ops"}
    document["docker"] = ["sudo", "-n", "docker"]


@pytest.fixture(scope="module", autouse=True)
def clean(practice: Practice) -> None:
    """Begin with nothing, and with the login that this module is about."""
    practice.write()
    assert practice.vlaunch("down", "--yes").code == 0
    practice.write(_restricted)


def test_the_login_may_do_nothing_else(practice: Practice) -> None:
    """Neither talk to Docker itself, nor run anything but Docker as root."""
    for host in practice.lab.hosts:
        as_ops = ("setpriv", "--reuid", "1000", "--regid", "1000", "--clear-groups")
        script = (
            'docker ps >/dev/null 2>&1; echo "$?"; sudo -n true 2>/dev/null; echo "$?"; sudo -n'
            ' docker ps >/dev/null; echo "$?"'
        )
        direct, anything, through = practice.on(host.name, *as_ops, "sh", "-c", script).split()

        assert (direct != "0", anything != "0", through) == (True, True, "0")


def test_up(practice: Practice) -> None:
    """As for any other login; its files are its own and nobody else's."""
    ran = practice.vlaunch("up", timeout=400)

    assert ran.code == 0, ran.said
    for host in practice.lab.hosts:
        listed = practice.on(
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
    seen = practice.vlaunch("secrets", "list", "--json")
    assert seen.code == 0, seen.said
    assert [row["name"] for row in json.loads(seen.out)["secrets"]] == [
        "HF_TOKEN",
        "VLLM_API_KEY",
        "RAY_AUTH_TOKEN",
    ]


def test_ray_refuses_whoever_has_no_token(practice: Practice) -> None:
    """Its job API, its state API, and the job API of the agents, which the network can reach."""
    container = next(name for name in practice.containers() if name.endswith("node1"))
    said = json.loads(practice.docker("node1", "exec", container, "python3", "-c", _ASK))

    assert said["list"] == [401, 403, 200] or said["list"] == [401, 401, 200]
    assert said["submit"][0] == 401
    assert said["submit"][1] in (401, 403)
    assert said["nodes"] == [401, 200]
    assert (
        practice.docker(
            "node1", "exec", container, "sh", "-c", "ls /tmp | grep -c nobody-asked || true"
        ).strip()
        == "0"
    )
    for host in practice.lab.hosts:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://{host.ip}:52365/api/job_agent/jobs/", timeout=10)
        assert refused.value.code == 401
        refused.value.close()


def test_the_dashboard_is_on_loopback_only(practice: Practice) -> None:
    """Nobody outside of the head can even connect."""
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"http://{practice.lab.hosts[0].ip}:8265/", timeout=5)


def test_serve_chat_stop(practice: Practice) -> None:
    """The whole way, and the end of it."""
    assert practice.vlaunch("serve", timeout=420).code == 0
    ran = practice.vlaunch("chat", "--max-tokens", "4", "Hi")
    assert ran.code == 0, ran.said
    assert practice.vlaunch("status", "--json").code == 0
    assert practice.vlaunch("stop", timeout=120).code == 0


def test_rotate(practice: Practice) -> None:
    """Another token on every node, the same on all; the cluster works with it."""
    path = "/home/ops/.vlaunch/*/secrets/RAY_AUTH_TOKEN"
    before = {practice.on(host.name, "sh", "-c", f"cat {path}") for host in practice.lab.hosts}
    ran = practice.vlaunch("secrets", "rotate", timeout=400)  # no server runs: there is no prompt
    after = {practice.on(host.name, "sh", "-c", f"cat {path}") for host in practice.lab.hosts}

    assert ran.code == 0, ran.said
    assert (len(before), len(after), before & after) == (1, 1, set())
    assert practice.vlaunch("status", "--json").code == 0
    container = next(name for name in practice.containers() if name.endswith("node1"))
    assert (
        json.loads(practice.docker("node1", "exec", container, "python3", "-c", _ASK))["list"][-1]
        == 200
    )


def test_down_leaves_nothing(practice: Practice) -> None:
    """Verified by the command, and once more from outside."""
    ran = practice.vlaunch("down", "--yes")

    assert ran.code == 0, ran.said
    assert practice.containers() == {}
    for host in practice.lab.hosts:
        found = practice.on(
            host.name,
            "sh",
            "-c",
            "find / -xdev -path /proc -prune -o -name RAY_AUTH_TOKEN -print 2>/dev/null",
        )
        assert found.strip() == ""


def test_no_secret_was_said(practice: Practice) -> None:
    """In all that the commands of this session printed."""
    said = "\n".join(practice.said)

    assert HF_TOKEN not in said
    assert API_KEY not in said


def test_secrets_in_memory(practice: Practice) -> None:
    """No disk has them; a node that lost them is brought back by `up`; `down` removes them."""
    practice.write(lambda document: document.update(secrets_in="memory"))
    ran = practice.vlaunch("up", timeout=400)
    assert ran.code == 0, ran.said
    for host in practice.lab.hosts:
        assert (
            practice.on(
                host.name, "sh", "-c", "ls -d /root/.vlaunch/*/secrets 2>/dev/null || true"
            ).strip()
            == ""
        )
        names = practice.on(
            host.name,
            "sh",
            "-c",
            "ls /run/vlaunch-root/*/secrets /dev/shm/vlaunch-root/*/secrets 2>/dev/null",
        )
        assert {"HF_TOKEN", "VLLM_API_KEY", "RAY_AUTH_TOKEN"} <= set(names.split())
    # what a reboot does
    practice.on("node2", "sh", "-c", "rm -rf /run/vlaunch-root /dev/shm/vlaunch-root")
    ran = practice.vlaunch("up", timeout=400)
    assert ran.code == 0, ran.said
    assert "node2: its secrets are gone" in ran.err
    ran = practice.vlaunch("down", "--yes")
    assert ran.code == 0, ran.said
    for host in practice.lab.hosts:
        assert (
            practice.on(
                host.name,
                "sh",
                "-c",
                "ls -d /run/vlaunch-root /dev/shm/vlaunch-root 2>/dev/null || true",
            ).strip()
            == ""
        )
