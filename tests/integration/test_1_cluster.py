"""The main job on real parts, in the order in which a user does it; each test stands on the one
before.
"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request

import pytest

from launcher.core.domain import Ports
from launcher.tools import agent_queries
from tests.integration.batches import MODEL, kill_one, rows_of
from tests.integration.conftest import API_KEY, HF_TOKEN, Practice
from tests.integration.servers import asking, recovers, serve
from tests.test_docs_security import PORTS
from tests.test_docs_security import TEXT as SECURITY

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module", autouse=True)
def clean(practice: Practice) -> None:
    """Begin with nothing."""
    practice.write()
    assert practice.vlaunch("down", "--yes").code == 0


def test_up_from_nothing(practice: Practice) -> None:
    """`up` ends with every node in Ray under its declared address, and `ray status` says the
    same.
    """
    ran = practice.vlaunch("up", "--json")

    assert ran.code == 0, ran.said
    texts = [event["text"] for event in ran.events]
    assert "`ray status`: 2 nodes, 0.0/2.0 GPU" in texts
    assert ran.events[-1]["kind"] == "done"
    assert ran.events[-1]["data"]["changed"] > 0


def test_the_machines_folders_are_lent_read_only(practice: Practice) -> None:
    """Root on a lab host may not change the machine's programs; devices work."""
    script = (
        "for folder in /usr /usr/bin /usr/local/bin /bin /lib /opt /dev; do"
        ' ! touch "$folder/vlaunch-was-here" 2>/dev/null || echo "$folder"; done;'
        " echo x >/dev/null && touch /tmp/x /dev/shm/x && echo done"
    )

    assert practice.on("node1", "sh", "-c", script) == "done\n"


def test_ray_admits_holders_of_its_token_alone(practice: Practice) -> None:
    """On its store's port over RPC, and on its job API and the agents' over HTTP."""
    head, worker = practice.lab.hosts

    def ray_status(*env: str) -> str:
        words = ("ray", "status", "--address", f"{head.ip}:6379")
        script = 'timeout 60 "$@" 2>&1; echo "exit $?"'
        run = ("vlaunch-lab-node2", "sh", "-c", script, "sh", *words)
        return practice.docker(worker.name, "exec", *env, *run)

    def http(host: str, url: str) -> str:
        return practice.on(host, "curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", url)

    assert "exit 0" in ray_status()
    for env in ("RAY_AUTH_TOKEN=" + "0" * 64, "RAY_AUTH_MODE=disabled"):
        refused = ray_status("--env", env)
        assert "exit 0" not in refused, env
        assert "Active:" not in refused, env
    assert http(head.name, "http://127.0.0.1:8265/api/jobs/") == "401"
    for host in practice.lab.hosts:
        assert http(head.name, f"http://{host.ip}:52365/api/job_agent/jobs/") == "401", host.name


def test_second_up_changes_nothing(practice: Practice) -> None:
    """A second `up` leaves the same containers running and says that nothing was changed."""
    before = practice.containers()

    ran = practice.vlaunch("up")

    assert ran.code == 0, ran.said
    assert "nothing was changed" in ran.err
    assert practice.containers() == before
    assert len(before) == 2


def test_dry_run_of_a_cluster_that_is_up_sends_nothing(practice: Practice) -> None:
    """What `--dry-run` prints for a cluster in its wanted state has no command in it."""
    ran = practice.vlaunch("up", "--dry-run")

    assert ran.code == 0, ran.said
    assert [
        line for line in ran.out.splitlines() if "on node" in line and not line.startswith("#")
    ] == []


def test_status_is_whole(practice: Practice) -> None:
    """Status shows what Ray and the agents say of each node, no drift, and no server."""
    ran = practice.vlaunch("status", "--json")

    assert ran.code == 0, ran.said
    seen = json.loads(ran.out)
    assert [
        (n["node"], n["container"], n["ray"], n["agent"], n["gpus"], n["drift"])
        for n in seen["nodes"]
    ] == [
        ("node1", "running", "alive", "connected", "1/1", []),
        ("node2", "running", "alive", "connected", "1/1", []),
    ]
    assert seen["servers"] == []


def test_exec_folds_equal_answers(practice: Practice) -> None:
    """Nodes that say the same are shown once; a command's exit code is the exit code."""
    same = practice.vlaunch("exec", "--", "ray", "--version")
    failing = practice.vlaunch("exec", "--", "sh", "-c", "exit 7")

    assert same.out == "node[1-2]: ray, version 2.60.0\n"
    assert same.code == 0
    assert failing.code == 7


def test_exec_leaves_nothing_behind_at_its_deadline(practice: Practice) -> None:
    """What runs past `--timeout` is ended inside the container too."""
    ran = practice.vlaunch("exec", "--timeout", "2", "--", "sleep", "31415")

    assert ran.code == 124, ran.said
    assert "31415" not in practice.command_lines()


def test_serve_answers_through_both_nodes(practice: Practice) -> None:
    """`serve` derives TP 1 × PP 2, waits for a completion, and shows which node holds which
    rank.
    """
    ran = practice.vlaunch("serve", timeout=420)

    assert ran.code == 0, ran.said
    assert f"http://{practice.lab.hosts[0].ip}:8000/v1" in ran.out
    assert "pp2" in ran.out
    assert "node1" in ran.out
    assert "node2" in ran.out
    assert "PP0" in ran.out
    assert "PP1" in ran.out
    assert "Check the network between the nodes" in ran.err
    assert re.search(
        r"^network +1 pairs? over Gloo/TCP, .*/s.* µs \(verified before the start\)$",
        ran.out,
        re.MULTILINE,
    )


def test_the_api_demands_its_key(practice: Practice) -> None:
    """The key reaches vLLM without being an argument: requests without it are refused."""
    url = f"http://{practice.lab.hosts[0].ip}:8000/v1/models"
    asked = urllib.request.Request(url, headers={"Authorization": f"Bearer {API_KEY}"})

    with urllib.request.urlopen(asked, timeout=10) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(url, timeout=10)
    assert refused.value.code == 401
    refused.value.close()


def listening(practice: Practice) -> dict[str, dict[int, set[str]]]:
    """Return the addresses of each host's ports, as docs/reference/containers.md names them."""
    found: dict[str, dict[int, set[str]]] = {}
    for host in practice.lab.hosts:
        words = {host.ip: "the node's `ip`", "127.0.0.1": "127.0.0.1", "[::1]": "127.0.0.1"}
        ports = found[host.name] = {}
        for line in practice.on(host.name, "ss", "-ltnH").splitlines():
            address, _, port = line.split()[3].rpartition(":")
            address = (
                address.removeprefix("[::ffff:").removesuffix("]") if "ffff" in address else address
            )
            said = "all addresses" if address in ("*", "0.0.0.0", "[::]") else words[address]
            ports.setdefault(int(port), set()).add(said)
    return found


def as_documented(practice: Practice, *names: str) -> None:
    """Compare hosts' ports with the table of docs/reference/containers.md, which has `names`."""
    found = listening(practice)
    rows = {int(row[1]): row for name, row in PORTS.items() if not name.startswith("worker_")}
    for host, ports in found.items():
        for port, addresses in ports.items():
            if port in rows:
                assert addresses == set(
                    re.findall("all addresses|the node's `ip`|127.0.0.1", rows[port][3])
                ), (host, rows[port])
            else:  # SSH, Ray's workers, and what the kernel hands out
                assert port == 22 or 10002 <= port <= 19999 or port >= 32768, (host, port)
    for name in names:
        where = ("node1", "node2") if PORTS[name][2] == "every node" else ("node1",)
        assert all(int(PORTS[name][1]) in found[host] for host in where), name


def test_ports_listen_where_the_page_says(practice: Practice) -> None:
    """With Ray and a server on both nodes; nobody listens whom the page does not name."""
    ray = ("gcs", "dashboard", "client", "node_manager", "object_manager", "runtime_env_agent")
    agents = ("dashboard_agent_grpc", "dashboard_agent_http", "metrics_export", "group", "metrics")
    as_documented(practice, *ray, *agents, "api")


def test_the_key_guards_what_the_page_says(practice: Practice) -> None:
    """Every other path that vLLM has is named there. PATCH does nothing anywhere: it is refused
    for want of a key, or because no path takes it.
    """
    url = f"http://{practice.lab.hosts[0].ip}:8000"
    with urllib.request.urlopen(f"{url}/openapi.json", timeout=10) as answer:
        paths = {*json.load(answer)["paths"], "/openapi.json"}
    guarded = set()
    for path in paths - {"/metrics"}:  # which answers whatever the method
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
    open_ = urllib.request.Request(
        f"{url}/invocations", prompt, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(open_, timeout=60) as answer:
        assert json.load(answer)["choices"]
    for path in ("/health", "/metrics", "/version"):
        with urllib.request.urlopen(url + path, timeout=10) as answer:
            assert answer.status == 200


def test_serve_again_attaches(practice: Practice) -> None:
    """The same request again starts and measures nothing: it finds the server and asks it for an
    answer.
    """
    ran = practice.vlaunch("serve", timeout=120)

    assert ran.code == 0, ran.said
    assert "pp2" in ran.out
    assert "Check the network" not in ran.err
    assert "(verified before the start)" in ran.out
    assert "NETWORK CHECK SKIPPED" not in ran.err
    assert ran.seconds < 30


def test_chat(practice: Practice) -> None:
    """`chat` prints the model's words, and only those, on standard output."""
    ran = practice.vlaunch("chat", "--max-tokens", "8", "Say hello")

    assert ran.code == 0, ran.said
    assert ran.out.strip()


def test_status_of_a_server_that_answers(practice: Practice) -> None:
    """The server is `answering` because a completion came back, and its capacity is read from its
    metrics.
    """
    status = json.loads(practice.vlaunch("status", "--json").out)
    (server,) = status["servers"]

    assert status["network"].startswith("verified ")
    assert server["state"] == "answering"
    assert "pp2" in server["fingerprint"]
    assert server["kv_tokens"] > 0


def test_logs_merge_nodes(practice: Practice) -> None:
    """Logs of both containers and of the server's engine come with where they are from."""
    ran = practice.vlaunch("logs", "--tail", "50")

    assert ran.code == 0, ran.said
    sources = {line.split(":")[0] for line in ran.out.splitlines()}
    assert {"node1", "node2", "node1/default"} <= sources


def test_secrets_are_nowhere(practice: Practice) -> None:
    """Neither token nor key is in `docker inspect`, in any command line, in what we printed, in
    logs or in a dry run.
    """
    token = practice.on("node1", "cat", "/root/.vlaunch/lab/secrets/RAY_AUTH_TOKEN").strip()
    assert len(token) == 64
    places = {
        "command lines": practice.command_lines(),
        "everything printed so far": "\n".join(practice.said),
        "logs": practice.vlaunch("logs", "--tail", "100000").out,
        "dry run": practice.vlaunch("up", "--dry-run").out,
        "dry run, offline": practice.vlaunch("up", "--dry-run", "--offline").out,
        "docker inspect": "".join(
            practice.docker(host.name, "inspect", *practice.docker(host.name, "ps", "-aq").split())
            for host in practice.lab.hosts
        ),
        "what the head knows": practice.docker(
            "node1", "exec", "vlaunch-lab-node1", *agent_queries.jobs(Ports())
        ),
    }

    found = [
        (place, name)
        for place, text in places.items()
        for name, value in (("HF", HF_TOKEN), ("API", API_KEY), ("Ray", token))
        if value in text
    ]
    assert all(places.values())
    assert found == []


def test_secret_files_are_private(practice: Practice) -> None:
    """The files that carry secrets are readable by their owner only."""
    listing = practice.on(
        "node2",
        "sh",
        "-c",
        "stat -c '%a %U' /root/.vlaunch/lab/secrets /root/.vlaunch/lab/secrets/*",
    )

    # The folder; Ray's token, the inventory's secrets, the node's certificate, its authority's.
    assert listing.splitlines() == ["700 root", *["600 root"] * 5]


def test_stop_frees_the_cluster(practice: Practice) -> None:
    """After `stop` no rank is left on any node, and the GPUs are free in Ray."""
    ran = practice.vlaunch("stop")

    assert ran.code == 0, ran.said
    status = practice.docker("node1", "exec", "vlaunch-lab-node1", "ray", "status")
    assert "0.0/2.0 GPU" in status
    assert "vllm serve" not in practice.command_lines()


def test_a_batch_needs_no_engine_arguments(practice: Practice) -> None:
    """The common case of README.md: what a CPU needs stands in the inventory."""
    rows, out = practice.folder / "prompts.jsonl", practice.folder / "out-common"
    rows.write_text("".join(json.dumps({"prompt": f"Count to {at}:"}) + "\n" for at in range(8)))
    ran = practice.vlaunch(
        *("batch", "--model", MODEL, "--input", str(rows), "--output", str(out)),
        *("--max-tokens", "16", "--strict"),
    )

    assert ran.code == 0, ran.said
    assert [row["row"] for row in rows_of(out)] == list(range(8))


def test_up_after_a_change_of_one_node(practice: Practice) -> None:
    """A changed variable of the worker is shown, and restarts the worker alone."""
    before = practice.containers()

    def change(document: dict[str, object]) -> None:
        document["nodes"][1]["env"] = {"PRACTICE": "changed"}  # type: ignore[index]

    practice.write(change)
    drifted = practice.vlaunch("status")
    ran = practice.vlaunch("up")

    assert drifted.code == 1
    assert "env PRACTICE: unset → changed" in drifted.out
    assert ran.code == 0, ran.said
    assert "node2: env PRACTICE: unset → changed" in ran.err
    after = practice.containers()
    assert after["vlaunch-lab-node1"] == before["vlaunch-lab-node1"]
    assert after["vlaunch-lab-node2"] != before["vlaunch-lab-node2"]


def test_restarted_containers_find_each_other(practice: Practice) -> None:
    """Containers that Docker restarts (as after a reboot) are a whole cluster again; `up` has
    nothing to do.
    """
    for host in practice.lab.hosts:
        practice.docker(host.name, "restart", "--time", "5", f"vlaunch-lab-{host.name}")

    before = practice.containers()
    ran = practice.vlaunch("up")

    assert ran.code == 0, ran.said
    assert practice.containers() == before


def test_mp_backend(practice: Practice) -> None:
    """`--backend mp` serves over both nodes, in the same containers as Ray; the network is proven
    for it, too.
    """
    before = practice.containers()
    ran = serve(practice, "--backend", "mp")
    chat = practice.vlaunch("chat", "--max-tokens", "4", "Hello")
    status = json.loads(practice.vlaunch("status", "--json").out)

    assert "pp2" in ran.out
    assert chat.code == 0, chat.said
    assert chat.out.strip()
    assert practice.containers() == before
    assert (status["whole"], status["network"].partition(" ")[0]) == (True, "verified")


def test_ports_of_ranks_without_ray_listen_where_the_page_says(practice: Practice) -> None:
    """Where the ranks meet."""
    as_documented(practice, "mp_master", "api", "group", "metrics")


def test_a_killed_rank_comes_back(practice: Practice) -> None:
    """By itself; the fault names the node."""
    with asking(practice) as traffic:
        fault = recovers(
            practice, traffic, lambda: kill_one(practice, "VLLM::Worker", "node2"), within=120
        )
    stop = practice.vlaunch("stop")

    assert fault["node"] == "node2"
    assert stop.code == 0, stop.said
    assert "vllm serve" not in practice.command_lines()


def test_down_leaves_nothing(practice: Practice) -> None:
    """`down` removes containers, files and secrets of every node, but for who changed what, and
    what engines compiled; the check is made past SSH.
    """
    practice.write()
    ran = practice.vlaunch("down", "--yes")

    assert ran.code == 0, ran.said
    assert practice.containers() == {}
    for host in practice.lab.hosts:
        left = practice.on(host.name, "sh", "-c", "cd /root/.vlaunch && find . -type f").split()
        others = {each for each in left if not each.startswith("./cache/lab/")}
        assert others <= {"./audit/lab.ndjson", "./locks/lab"}, left
        assert '"verb": "down"' in practice.on(
            host.name, "tail", "-n", "1", "/root/.vlaunch/audit/lab.ndjson"
        )
        assert "ray" not in practice.on(host.name, "ps", "-eo", "args")
