"""`vlaunch collect` on simulated nodes: a bundle's content, without secrets."""

from __future__ import annotations

import base64
import json
import stat
import tarfile
from pathlib import Path
from urllib.parse import quote

import pytest

from launcher.agent.desired import ProcessSpec
from launcher.core import redaction
from launcher.core.domain import Answer
from launcher.core.errors import ConnectError
from tests import supervision
from tests.command_line import INVENTORY, SECRET, Cluster
from tests.diagnose.node_answers import NodeAnswers, set_answers, state

TOKEN = "5f1d8e6a7b0c4d3e9f2a1b0c8d7e6f5a4b3c2d1e0f9a8b7c6d5e4f3a2b1c0d9e"
PASSWORD = 'pa"ss\\wörd/+'
STRANGE = "sk-proj-nobodyToldUsOfThisOne"
ALL = f"{SECRET} {TOKEN} {PASSWORD} {STRANGE}"
SECRETS = {
    "plain": [SECRET, TOKEN, PASSWORD, STRANGE, "AKIAIOSFODNN7EXAMPLE"],
    "by what stands before it": ["pa55word", "letmein-letmein"],
    "json": [json.dumps(PASSWORD)[1:-1], json.dumps(PASSWORD, ensure_ascii=False)[1:-1]],
    "address": [quote(PASSWORD), quote(PASSWORD, safe="")],
    "base64": [base64.b64encode(value.encode()).decode() for value in (SECRET, TOKEN, PASSWORD)],
}


@pytest.fixture
def leaky(cluster: Cluster, tmp_path: Path) -> Cluster:
    """Simulate a cluster whose nodes expose every secret everywhere."""
    redaction.clear_secrets()
    password = tmp_path / "password"
    password.write_text(PASSWORD)
    password.chmod(0o600)
    command = f"touch {tmp_path / 'ran'}"
    secrets_yaml = (
        f"REGISTRY: {{file: password}}, CALLED: {{command: {command}}}, ASKED: {{prompt: Which}}"
    )
    cluster.write(
        INVENTORY.replace("HF_TOKEN}}", f"HF_TOKEN}}, {secrets_yaml}}}")
        + f"# {STRANGE}, and the api_key: letmein-letmein\n"
    )
    for machine in cluster.world.machines.values():
        machine.files["secrets/RAY_AUTH_TOKEN"] = TOKEN.encode()
    forms = " ".join(
        value for kind, values in SECRETS.items() if not kind.startswith("by") for value in values
    )
    authorization = base64.b64encode(f"user:{PASSWORD}".encode()).decode()
    env = [
        f"HF_TOKEN={SECRET}",
        "MY_OWN=letmein-letmein",
        "NCCL_DEBUG=INFO",
        "VLLM_API_KEY=tiny",
        "RAY_AUTH_TOKEN_PATH=/run/x",
    ]
    noise = (
        f"2026-11-21T20:14:00.1Z {ALL}\nAuthorization: Basic"
        f" {authorization}\nhttps://user:pa55word@host\n{forms}\n"
    )
    inspected = [
        {
            "Name": "/c",
            "Config": {
                "Env": env,
                "Cmd": ["x", "--api-key", "letmein-letmein"],
                "Labels": {"a": ALL},
            },
        }
    ]
    fault = supervision.make_fault(at=1795299000.0, what=ALL, cause=ALL, evidence=noise)
    record = supervision.make_record(
        "chat", "gave-up", since=1795299000.0, faults=[fault]
    ).as_json()
    server = supervision.make_spec(
        "chat", processes=(ProcessSpec(node="gpu01", argv=("vllm",), env={"A": ALL}),)
    ).as_json()
    telling = NodeAnswers(
        parts={
            "state": state(f"c {ALL}", "head", "exited", Error=ALL),
            "log-1": noise,
            "driver-1": noise,
            "worker-1": noise,
            "ray-1": noise,
            "nccl": noise,
            "kernel": noise,
            "servers": "chat\n",
            "engine-1": noise,
            "stacks-1": noise,
            "observed-1": json.dumps(record),
            "desired-1": json.dumps(server),
            "inspect": json.dumps(inspected),
            "../../etc/passwd": noise,
            "evil": noise,
        },
        audit=json.dumps({"command": forms}) + "\n" + noise,
    )
    set_answers(cluster, gpu01=telling, gpu02=telling)
    return cluster


def unpacked(path: Path) -> dict[str, str]:
    """Return all files of a bundle, without its top folder."""
    with tarfile.open(path) as archive:
        assert all(entry.isreg() for entry in archive)
        return {
            entry.name.partition("/")[2]: (
                file.read().decode() if (file := archive.extractfile(entry)) else ""
            )
            for entry in archive
        }


def test_no_secret_is_in_the_bundle(leaky: Cluster, tmp_path: Path) -> None:
    """By value if it is known, else by pattern; nor is it on the terminal."""
    ran = leaky.run("collect", "-o", "b.tar.gz")
    files = unpacked(tmp_path / "b.tar.gz")

    assert ran.code == 0
    for name, text in {**files, "out": ran.out, "err": ran.err}.items():
        for form, values in SECRETS.items():
            assert [value for value in values if value in text] == [], f"{form} in {name}"
        # The last characters of base64 also encode bits of the following text.
        assert [value for value in SECRETS["base64"] if value[:-4] in text] == [], name
    assert "***" in files["nodes/01-gpu01/container-1.log"]


def test_no_command_of_the_inventory_is_run(leaky: Cluster, tmp_path: Path) -> None:
    """The inventory may be from another user; unknown secrets are listed."""
    ran = leaky.run("collect", "-o", "b.tar.gz")

    assert not (tmp_path / "ran").exists()
    assert "secrets not known on this machine, masked only by their form: CALLED, ASKED" in ran.err
    assert "CALLED, ASKED" in unpacked(tmp_path / "b.tar.gz")["README.txt"]


def test_the_secrets_would_be_in_it_without_redaction(
    leaky: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above can fail."""
    for module in (
        "launcher.diagnose.collect_command.redact_secrets",
        "launcher.core.untrusted.redact",
    ):
        monkeypatch.setattr(module, lambda text: text)
    leaky.run("collect", "-o", "b.tar.gz")
    text = "\n".join(unpacked(tmp_path / "b.tar.gz").values())

    assert [value for values in SECRETS.values() for value in values if value not in text] == []


def test_the_bundle_has_all_parts_of_a_report(leaky: Cluster, tmp_path: Path) -> None:
    """Nodes do not choose the names of files."""
    leaky.run("collect", "-o", "b.tar.gz")
    files = unpacked(tmp_path / "b.tar.gz")
    own = {
        "state.json",
        "containers.json",
        "servers.json",
        "audit.ndjson",
        "container-1.log",
        "server-chat.log",
        "stacks-of-server-chat.log",
        "job-driver-1.log",
        "ray-worker-1.log",
        "ray-1.log",
        "nccl-1.log",
        "kernel-1.log",
    }

    assert set(files) == {
        "README.txt",
        "inventory.yaml",
        "versions.json",
        "status.json",
        "checks.json",
        "doctor.json",
        "events.ndjson",
        *(f"nodes/{node}/{name}" for node in ("01-gpu01", "02-gpu02") for name in own),
    }
    assert "HF_TOKEN: {env: HF_TOKEN}" in files["inventory.yaml"]
    assert json.loads(files["versions.json"])["libraries"]["click"][0].isdigit()
    assert json.loads(files["status.json"])["cluster"] == "c"
    assert {check["id"] for check in json.loads(files["checks.json"])["checks"]} >= {
        "ssh",
        "docker",
        "disk",
    }
    assert json.loads(files["doctor.json"])["findings"][0]["id"] == "server-died"
    assert next(json.loads(line)["kind"] for line in files["events.ndjson"].splitlines()) == "stage"
    servers = json.loads(files["nodes/01-gpu01/servers.json"])
    assert servers["servers"]["chat"]["observed"]["state"] == "gave-up"
    assert servers["servers"]["chat"]["desired"]["processes"][0]["node"] == "gpu01"
    assert files["nodes/01-gpu01/container-1.log"].startswith("2026-11-21T20:14:00Z ")


def test_only_public_variables_keep_their_values(leaky: Cluster, tmp_path: Path) -> None:
    """Containers may have variables of their users."""
    leaky.run("collect", "-o", "b.tar.gz")
    (container,) = json.loads(unpacked(tmp_path / "b.tar.gz")["nodes/01-gpu01/containers.json"])

    assert container["Config"]["Env"] == [
        "HF_TOKEN=***",
        "MY_OWN=***",
        "NCCL_DEBUG=INFO",
        "VLLM_API_KEY=***",
        "RAY_AUTH_TOKEN_PATH=/run/x",
    ]


def test_the_output_lists_the_content_and_advises_a_review(leaky: Cluster, tmp_path: Path) -> None:
    """The output is the file's name; it has mode 0600, and no other file remains."""
    before = set(tmp_path.iterdir())
    ran = leaky.run("collect")
    (path,) = set(tmp_path.iterdir()) - before

    assert ran.out == f"{path.name}\n"
    assert path.name.startswith("vlaunch-c-2")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert "nodes/02-gpu02/container-1.log" in ran.err
    assert "review it before you share it" in ran.err
    assert "masked only by their form: CALLED, ASKED" in ran.err
    assert leaky.world.changes == []


def test_unreachable_nodes_are_listed(leaky: Cluster, tmp_path: Path) -> None:
    """Bundles describe broken clusters."""
    leaky.missing["gpu01"] = ConnectError("gpu01", "no answer from gpu01:22 within 10s")
    inner = leaky.world.answer

    def lost(command: object) -> Answer | None:
        answer = inner(command)  # type: ignore[arg-type]
        broken = command.argv[3] in ("doctor", "audit")  # type: ignore[attr-defined]
        return (
            Answer(node=answer.node, code=255, err="the connection was lost")
            if answer and broken
            else answer
        )

    leaky.world.answer = lost  # type: ignore[method-assign, assignment]
    ran = leaky.run("collect", "-o", "b.tar.gz")
    files = unpacked(tmp_path / "b.tar.gz")

    assert ran.code == 0
    assert "no answer from gpu01:22" in files["nodes/01-gpu01/not-collected.txt"]
    assert "the connection was lost" in files["nodes/02-gpu02/not-collected.txt"]


def test_a_failing_query_does_not_stop_it(
    leaky: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundle has the reason in place of the result."""
    monkeypatch.setattr("launcher.diagnose.collect_command.observe_cluster", _refuse)
    leaky.run("collect", "-o", "b.tar.gz")

    assert json.loads(unpacked(tmp_path / "b.tar.gz")["status.json"])["error"] == "gpu01: broken"


def _refuse(_: object) -> None:
    raise ConnectError("gpu01", "broken")


@pytest.mark.parametrize(
    ("output", "message"),
    [("no/b.tar.gz", "is not a folder"), ("there.tar.gz", "already exists")],
)
def test_an_existing_file_is_rejected_before_any_query(
    leaky: Cluster, output: str, message: str
) -> None:
    """A link counts as existing, even a dangling one."""
    Path("there.tar.gz").symlink_to("/nowhere/else")
    ran = leaky.run("collect", "-o", output)

    assert (ran.code, ran.out, leaky.commands) == (2, "", [])
    assert message in ran.err


def test_an_unfinished_bundle_is_removed(
    leaky: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even its beginning."""
    before = set(tmp_path.iterdir())

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("launcher.diagnose.bundle.node_files", stop)

    assert leaky.run("collect").code == 130
    assert set(tmp_path.iterdir()) == before
