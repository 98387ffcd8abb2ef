"""The main workflow on real parts, in a user's order; each test depends on the one before."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request

import pytest

from launcher.core.domain import Ports
from launcher.tools import agent_queries
from tests.integration.batches import MODEL, kill_process
from tests.integration.catalogue import SKIPPED, run_checks
from tests.integration.conftest import API_KEY, HF_TOKEN, LabCluster, assert_error
from tests.integration.servers import await_recovery, query_model, serve, steady_traffic
from tests.test_docs_security import PORTS
from tests.test_docs_security import TEXT as SECURITY

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module", autouse=True)
def clean(lab_cluster: LabCluster) -> None:
    """Start without a cluster."""
    lab_cluster.write()
    assert lab_cluster.vlaunch("down", "--yes").code == 0


def test_up_from_nothing(lab_cluster: LabCluster) -> None:
    """`up` ends with every node in Ray under its declared address; `ray status` agrees."""
    result = lab_cluster.vlaunch("up", "--json")

    assert result.code == 0, result.output
    texts = [event["text"] for event in result.events]
    assert "`ray status`: 2 nodes, 0.0/2.0 GPU" in texts
    assert result.events[-1]["kind"] == "done"
    assert result.events[-1]["data"]["changed"] > 0


def test_the_machines_folders_are_read_only(lab_cluster: LabCluster) -> None:
    """Root on a lab host cannot change the machine's programs; devices work."""
    script = (
        "for folder in /usr /usr/bin /usr/local/bin /bin /lib /opt /dev; do"
        ' ! touch "$folder/vlaunch-was-here" 2>/dev/null || echo "$folder"; done;'
        " echo x >/dev/null && touch /tmp/x /dev/shm/x && echo done"
    )

    assert lab_cluster.on("node1", "sh", "-c", script) == "done\n"


def test_ray_refuses_clients_without_its_token(lab_cluster: LabCluster) -> None:
    """Over RPC on the port of its store, and over HTTP on its job API and the agents'."""
    head, worker = lab_cluster.lab.hosts

    def ray_status(*env: str) -> str:
        argv = ("ray", "status", "--address", f"{head.ip}:6379")
        script = 'timeout 60 "$@" 2>&1; echo "exit $?"'
        run = ("vlaunch-lab-node2", "sh", "-c", script, "sh", *argv)
        return lab_cluster.docker(worker.name, "exec", *env, *run)

    def http(host: str, url: str) -> str:
        return lab_cluster.on(host, "curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", url)

    assert "exit 0" in ray_status()
    for env in ("RAY_AUTH_TOKEN=" + "0" * 64, "RAY_AUTH_MODE=disabled"):
        refused = ray_status("--env", env)
        assert "exit 0" not in refused, env
        assert "Active:" not in refused, env
    assert http(head.name, "http://127.0.0.1:8265/api/jobs/") == "401"
    for host in lab_cluster.lab.hosts:
        assert http(head.name, f"http://{host.ip}:52365/api/job_agent/jobs/") == "401", host.name


def test_second_up_changes_nothing(lab_cluster: LabCluster) -> None:
    """A second `up` keeps the same containers and reports no change."""
    before = lab_cluster.containers()

    result = lab_cluster.vlaunch("up")

    assert result.code == 0, result.output
    assert "nothing was changed" in result.err
    assert lab_cluster.containers() == before
    assert len(before) == 2


def test_dry_run_of_a_cluster_that_is_up_sends_nothing(lab_cluster: LabCluster) -> None:
    """`--dry-run` prints no command for a cluster that matches its inventory."""
    result = lab_cluster.vlaunch("up", "--dry-run")

    assert result.code == 0, result.output
    assert [
        line for line in result.out.splitlines() if "on node" in line and not line.startswith("#")
    ] == []


def test_status_of_a_healthy_cluster(lab_cluster: LabCluster) -> None:
    """Status shows Ray and the agent of each node, no drift, and no server."""
    result = lab_cluster.vlaunch("status", "--json")

    assert result.code == 0, result.output
    status = json.loads(result.out)
    assert [
        (n["node"], n["container"], n["ray"], n["agent"], n["gpus"], n["drift"])
        for n in status["nodes"]
    ] == [
        ("node1", "running", "alive", "connected", "1/1", []),
        ("node2", "running", "alive", "connected", "1/1", []),
    ]
    assert status["servers"] == []


def test_check_of_a_healthy_cluster(lab_cluster: LabCluster) -> None:
    """Its own ports and containers are no fault, and Ray's version is known."""
    report = run_checks(lab_cluster, code=0)

    assert (report.with_status("fail"), report.with_status("warn")) == (set(), set())
    assert report.with_status("skip") == SKIPPED


def test_exec_folds_equal_answers(lab_cluster: LabCluster) -> None:
    """Nodes with equal output are shown once; a command's exit code is the exit code."""
    same = lab_cluster.vlaunch("exec", "--", "ray", "--version")
    failing = lab_cluster.vlaunch("exec", "--", "sh", "-c", "exit 7")

    assert same.out == "node[1-2]: ray, version 2.60.0\n"
    assert same.code == 0
    assert failing.code == 7


def test_exec_leaves_nothing_behind_at_its_deadline(lab_cluster: LabCluster) -> None:
    """A command that exceeds `--timeout` is killed inside the container too."""
    result = lab_cluster.vlaunch("exec", "--timeout", "2", "--", "sleep", "31415")

    assert result.code == 124, result.output
    assert "31415" not in lab_cluster.command_lines()


def test_serve_answers_through_both_nodes(lab_cluster: LabCluster) -> None:
    """`serve` derives TP 1 × PP 2, waits for a completion, and shows the node of each rank."""
    result = lab_cluster.vlaunch("serve", timeout=420)

    assert result.code == 0, result.output
    assert f"http://{lab_cluster.lab.hosts[0].ip}:8000/v1" in result.out
    assert "pp2" in result.out
    assert "node1" in result.out
    assert "node2" in result.out
    assert "PP0" in result.out
    assert "PP1" in result.out
    assert "Check the network between the nodes" in result.err
    assert re.search(
        r"^network +1 pairs? over Gloo/TCP, .*/s.* µs \(verified before the start\)$",
        result.out,
        re.MULTILINE,
    )
    lab_cluster.assert_healthy()


def test_the_api_requires_its_key(lab_cluster: LabCluster) -> None:
    """The key reaches vLLM without a command-line argument; requests without it are refused."""
    url = f"http://{lab_cluster.lab.hosts[0].ip}:8000/v1/models"
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {API_KEY}"})

    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, timeout=10)
    assert refused.value.code == 401
    refused.value.close()


def read_ports(lab_cluster: LabCluster) -> dict[str, dict[int, set[str]]]:
    """Return the addresses of each host's ports, in the terms of docs/reference/containers.md."""
    ports_by_host: dict[str, dict[int, set[str]]] = {}
    for host in lab_cluster.lab.hosts:
        labels = {host.ip: "the node's `ip`", "127.0.0.1": "127.0.0.1", "[::1]": "127.0.0.1"}
        ports = ports_by_host[host.name] = {}
        for line in lab_cluster.on(host.name, "ss", "-ltnH").splitlines():
            address, _, port = line.split()[3].rpartition(":")
            address = (
                address.removeprefix("[::ffff:").removesuffix("]") if "ffff" in address else address
            )
            label = "all addresses" if address in ("*", "0.0.0.0", "[::]") else labels[address]
            ports.setdefault(int(port), set()).add(label)
    return ports_by_host


def assert_documented(lab_cluster: LabCluster, *names: str) -> None:
    """Compare hosts' ports with the table of docs/reference/containers.md; `names` must be
    in use.
    """
    ports_by_host = read_ports(lab_cluster)
    rows = {int(row[1]): row for name, row in PORTS.items() if not name.startswith("worker_")}
    for host, ports in ports_by_host.items():
        for port, addresses in ports.items():
            if port in rows:
                assert addresses == set(
                    re.findall("all addresses|the node's `ip`|127.0.0.1", rows[port][3])
                ), (host, rows[port])
            else:  # SSH, Ray's workers, and ephemeral ports
                assert port == 22 or 10002 <= port <= 19999 or port >= 32768, (host, port)
    for name in names:
        nodes = ("node1", "node2") if PORTS[name][2] == "every node" else ("node1",)
        assert all(int(PORTS[name][1]) in ports_by_host[host] for host in nodes), name


def test_ports_are_as_documented(lab_cluster: LabCluster) -> None:
    """With Ray and a server on both nodes; no undocumented port is open."""
    ray = ("gcs", "dashboard", "client", "node_manager", "object_manager", "runtime_env_agent")
    agents = ("dashboard_agent_grpc", "dashboard_agent_http", "metrics_export", "group", "metrics")
    assert_documented(lab_cluster, *ray, *agents, "api")


def test_the_key_guards_the_documented_paths(lab_cluster: LabCluster) -> None:
    """The page names every other path of vLLM. PATCH is refused everywhere: without a key, or
    because no path supports it.
    """
    url = f"http://{lab_cluster.lab.hosts[0].ip}:8000"
    with urllib.request.urlopen(f"{url}/openapi.json", timeout=10) as answer:
        paths = {*json.load(answer)["paths"], "/openapi.json"}
    guarded = set()
    for path in paths - {"/metrics"}:  # answers every method
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url + path, method="PATCH"), timeout=10)
        if refused.value.code == 401:
            guarded.add(path)
        refused.value.close()

    assert guarded == {
        path for path in paths if path.startswith(("/v1", "/v2", "/inference", "/cohere"))
    }
    assert "/v1/chat/completions" in guarded
    assert sorted(path for path in paths - guarded if f"`{path}`" not in SECURITY) == []
    prompt = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
    unguarded = urllib.request.Request(
        f"{url}/invocations", prompt, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(unguarded, timeout=60) as answer:
        assert json.load(answer)["choices"]
    for path in ("/health", "/metrics", "/version"):
        with urllib.request.urlopen(url + path, timeout=10) as answer:
            assert answer.status == 200


def test_serve_again_attaches(lab_cluster: LabCluster) -> None:
    """The same request starts and measures nothing: it finds the server and sends it a request."""
    result = lab_cluster.vlaunch("serve", timeout=120)

    assert result.code == 0, result.output
    assert "pp2" in result.out
    assert "Check the network" not in result.err
    assert "(verified before the start)" in result.out
    assert "NETWORK CHECK SKIPPED" not in result.err
    assert result.seconds < 30


def test_a_batch_is_refused_while_a_server_has_the_slots(lab_cluster: LabCluster) -> None:
    """The error names the server; nothing is submitted."""
    rows, out = lab_cluster.folder / "prompts.jsonl", lab_cluster.folder / "out-later"
    rows.write_text(json.dumps({"prompt": "Count:"}) + "\n")
    result = lab_cluster.vlaunch(
        "batch", "--model", MODEL, "--input", str(rows), "--output", str(out)
    )

    assert_error(result, "server", codes=(1, 2))
    assert not out.exists()


def test_wrong_arguments_leave_the_server_alone(lab_cluster: LabCluster) -> None:
    """They are errors within seconds, in vLLM's words, although `--replace` would stop it."""

    def engines() -> set[str]:
        return {line for line in lab_cluster.command_lines().splitlines() if "vllm serve" in line}

    before = engines()
    for arguments, message in (
        (("--max-nun-seqs", "16"), "unrecognized arguments: --max-nun-seqs 16"),
        (("--max-model-len", "1k2"), "argument --max-model-len: invalid"),
    ):
        result = lab_cluster.vlaunch("serve", "--replace", "--", *arguments)
        assert result.code == 2, result.output
        assert "rejects the arguments; nothing was changed" in result.err
        assert message in result.err
        assert result.seconds < 60
    assert engines() == before
    assert query_model(lab_cluster).ok


def test_the_versions_in_an_image_are_reported(lab_cluster: LabCluster) -> None:
    """`check` and `serve` see another version of vLLM in the head's container."""
    metadata = "/usr/local/lib/python3.11/dist-packages/vllm-0.32.0+cpu.dist-info/METADATA"

    def report_version(version: str) -> None:
        script = f"sed -i 's/^Version: .*/Version: {version}/' {metadata}"
        lab_cluster.docker("node1", "exec", "vlaunch-lab-node1", "sh", "-c", script)

    try:
        report_version("0.19.1")
        rejected = lab_cluster.vlaunch("check", "--only", "supported-versions")
        refused = lab_cluster.vlaunch("serve", "--replace", "--", "--seed", "2")
        report_version("0.99.0")
        warned = lab_cluster.vlaunch("check", "--only", "supported-versions")
    finally:
        report_version("0.32.0+cpu")

    assert (rejected.code, refused.code, warned.code) == (1, 2, 0)
    for result in (rejected, refused):
        assert "vLLM 0.19.1 does not work with vlaunch" in result.output
    assert "vLLM 0.99.0 is newer than vlaunch was checked with" in warned.output
    assert query_model(lab_cluster).ok


def test_chat(lab_cluster: LabCluster) -> None:
    """`chat` prints only the model's text on standard output."""
    result = lab_cluster.vlaunch("chat", "--max-tokens", "8", "Say hello")

    assert result.code == 0, result.output
    assert result.out.strip()


def test_status_of_a_server_that_answers(lab_cluster: LabCluster) -> None:
    """The server is `answering` after a completion, and its capacity comes from its metrics."""
    status = json.loads(lab_cluster.vlaunch("status", "--json").out)
    (server,) = status["servers"]

    assert status["network"].startswith("verified ")
    assert server["state"] == "answering"
    assert "pp2" in server["fingerprint"]
    assert server["kv_tokens"] > 0


def test_logs_merge_nodes(lab_cluster: LabCluster) -> None:
    """Lines of both containers and of the server's engine are marked with their source."""
    result = lab_cluster.vlaunch("logs", "--tail", "50")

    assert result.code == 0, result.output
    sources = {line.split(":")[0] for line in result.out.splitlines()}
    assert {"node1", "node2", "node1/default"} <= sources


def test_secrets_are_nowhere(lab_cluster: LabCluster) -> None:
    """Neither token nor key is in `docker inspect`, command lines, our output, logs or a
    dry run.
    """
    token = lab_cluster.on("node1", "cat", "/root/.vlaunch/lab/secrets/RAY_AUTH_TOKEN").strip()
    assert len(token) == 64
    places = {
        "command lines": lab_cluster.command_lines(),
        "everything printed so far": "\n".join(lab_cluster.outputs),
        "logs": lab_cluster.vlaunch("logs", "--tail", "100000").out,
        "dry run": lab_cluster.vlaunch("up", "--dry-run").out,
        "dry run, offline": lab_cluster.vlaunch("up", "--dry-run", "--offline").out,
        "docker inspect": "".join(
            lab_cluster.docker(
                host.name, "inspect", *lab_cluster.docker(host.name, "ps", "-aq").split()
            )
            for host in lab_cluster.lab.hosts
        ),
        "what the head knows": lab_cluster.docker(
            "node1", "exec", "vlaunch-lab-node1", *agent_queries.jobs(Ports())
        ),
    }

    leaks = [
        (place, name)
        for place, text in places.items()
        for name, value in (("HF", HF_TOKEN), ("API", API_KEY), ("Ray", token))
        if value in text
    ]
    assert all(places.values())
    assert leaks == []


def test_secret_files_are_private(lab_cluster: LabCluster) -> None:
    """Only the owner can read the files that carry secrets."""
    listing = lab_cluster.on(
        "node2",
        "sh",
        "-c",
        "stat -c '%a %U' /root/.vlaunch/lab/secrets /root/.vlaunch/lab/secrets/*",
    )

    # The folder; Ray's token, the inventory's secrets, the node's certificate, its authority's.
    assert listing.splitlines() == ["700 root", *["600 root"] * 5]


def test_stop_frees_the_cluster(lab_cluster: LabCluster) -> None:
    """After `stop` no rank runs on any node, and the GPUs are free in Ray."""
    result = lab_cluster.vlaunch("stop")

    assert result.code == 0, result.output
    status = lab_cluster.docker("node1", "exec", "vlaunch-lab-node1", "ray", "status")
    assert "0.0/2.0 GPU" in status
    assert "vllm serve" not in lab_cluster.command_lines()


def test_up_after_a_change_of_one_node(lab_cluster: LabCluster) -> None:
    """A changed variable of the worker is shown, and restarts only the worker."""
    before = lab_cluster.containers()

    def change(document: dict[str, object]) -> None:
        document["nodes"][1]["env"] = {"PRACTICE": "changed"}  # type: ignore[index]

    lab_cluster.write(change)
    drifted = lab_cluster.vlaunch("status")
    result = lab_cluster.vlaunch("up")

    assert drifted.code == 1
    assert "env PRACTICE: unset → changed" in drifted.out
    assert result.code == 0, result.output
    assert "node2: env PRACTICE: unset → changed" in result.err
    after = lab_cluster.containers()
    assert after["vlaunch-lab-node1"] == before["vlaunch-lab-node1"]
    assert after["vlaunch-lab-node2"] != before["vlaunch-lab-node2"]


def test_restarted_containers_find_each_other(lab_cluster: LabCluster) -> None:
    """Containers that Docker restarts (as after a reboot) form the cluster again; `up` has nothing
    to do.
    """
    for host in lab_cluster.lab.hosts:
        lab_cluster.docker(host.name, "restart", "--time", "5", f"vlaunch-lab-{host.name}")

    before = lab_cluster.containers()
    result = lab_cluster.vlaunch("up")

    assert result.code == 0, result.output
    assert lab_cluster.containers() == before


def test_mp_backend(lab_cluster: LabCluster) -> None:
    """`--backend mp` serves over both nodes, in the same containers as Ray; its network is verified
    too.
    """
    before = lab_cluster.containers()
    result = serve(lab_cluster, "--backend", "mp")
    chat = lab_cluster.vlaunch("chat", "--max-tokens", "4", "Hello")
    status = json.loads(lab_cluster.vlaunch("status", "--json").out)

    assert "pp2" in result.out
    assert chat.code == 0, chat.output
    assert chat.out.strip()
    assert lab_cluster.containers() == before
    assert (status["whole"], status["network"].partition(" ")[0]) == (True, "verified")
    lab_cluster.assert_healthy()


def test_ports_of_ranks_without_ray_are_as_documented(lab_cluster: LabCluster) -> None:
    """The rendezvous port of the ranks."""
    assert_documented(lab_cluster, "mp_master", "api", "group", "metrics")


def test_a_killed_rank_comes_back(lab_cluster: LabCluster) -> None:
    """By itself; the fault names the node."""
    with steady_traffic(lab_cluster) as traffic:
        fault = await_recovery(
            lab_cluster,
            traffic,
            lambda: kill_process(lab_cluster, "VLLM::Worker", "node2"),
            within=120,
        )
    stop = lab_cluster.vlaunch("stop")

    assert fault["node"] == "node2"
    assert stop.code == 0, stop.output
    assert "vllm serve" not in lab_cluster.command_lines()


def test_down_leaves_nothing(lab_cluster: LabCluster) -> None:
    """`down` removes containers, files and secrets from every node, except the audit log and the
    compile cache; the check does not use SSH.
    """
    lab_cluster.write()
    result = lab_cluster.vlaunch("down", "--yes")

    assert result.code == 0, result.output
    assert lab_cluster.containers() == {}
    for host in lab_cluster.lab.hosts:
        files = lab_cluster.on(host.name, "sh", "-c", "cd /root/.vlaunch && find . -type f").split()
        others = {file for file in files if not file.startswith("./cache/lab/")}
        assert others <= {"./audit/lab.ndjson", "./locks/lab"}, files
        assert '"verb": "down"' in lab_cluster.on(
            host.name, "tail", "-n", "1", "/root/.vlaunch/audit/lab.ndjson"
        )
        assert "ray" not in lab_cluster.on(host.name, "ps", "-eo", "args")
