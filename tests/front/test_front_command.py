"""`vlaunch up` with a front, and `vlaunch front`, on simulated nodes."""

from __future__ import annotations

import hashlib
import json
import re
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from cryptography import x509

from launcher.app.certificates import Authority, make_certificate
from launcher.core.domain import Answer
from launcher.core.errors import ConnectError
from tests.command_line import INVENTORY, Cluster

FRONT = INVENTORY.replace("cluster: c\n", "cluster: c\nfront: {FRONT}\n")
IMAGE = "haproxy:3.2"
FOLDER = "server/.front/"
KEYS = f"{FOLDER}keys.map"
NODES = ("gpu01", "gpu02")


def write(cluster: Cluster, front: str = "") -> None:
    """Write an inventory with a front."""
    cluster.write(FRONT.replace("FRONT", front))


@pytest.fixture
def front(cluster: Cluster) -> Cluster:
    """A cluster with a front on its head."""
    write(cluster)
    ran = cluster.run("up")
    assert ran.code == 0, ran.err
    cluster.world.changes.clear()
    return cluster


def config(cluster: Cluster, node: str = "gpu01") -> str:
    """Return the configuration that a node's front has read."""
    return cluster.world.machines[node].front


def test_up_starts_the_front_and_a_second_up_changes_nothing(front: Cluster) -> None:
    """On the head, with the image that it pulls and a certificate for its address."""
    machine = front.world.machines["gpu01"]
    container = machine.containers["vlaunch-c-gpu01-front"]
    pem = machine.files["front/tls.pem"]
    names = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )

    assert container["Config"]["Labels"]["vlaunch.role"] == "front"
    assert "bind 0.0.0.0:8443 ssl" in config(front)
    addresses = [str(a) for a in names.value.get_values_for_type(x509.IPAddress)]
    assert addresses == ["10.0.0.11", "127.0.0.1"]
    ran = front.run("up")
    assert "is already up; nothing was changed" in ran.err
    assert front.world.changes == []
    assert "vlaunch-c-gpu02-front" not in front.world.machines["gpu02"].containers


def test_a_dry_run_changes_nothing_and_shows_no_key(cluster: Cluster) -> None:
    """The script has a command that makes the certificate."""
    write(cluster, "address: chat.example")
    for arguments in (("up", "--dry-run"), ("up", "--dry-run", "--offline")):
        ran = cluster.run(*arguments)
        assert (ran.code, cluster.world.changes) == (0, [])
        assert "openssl req -x509" in ran.out
        assert "subjectAltName=DNS:chat.example,IP:10.0.0.11" in ran.out
        assert "PRIVATE KEY" not in ran.out
        assert "haproxy -c -f" in ran.out


def test_a_changed_setting_is_validated_and_reloaded(front: Cluster) -> None:
    """The container stays."""
    before = front.world.machines["gpu01"].containers["vlaunch-c-gpu01-front"]["Id"]
    write(front, "hold: 5s")
    assert front.run("front", "status").code == 1
    ran = front.run("front", "reload")

    assert (ran.code, front.world.verbs()) == (
        0,
        ["gpu01: front-file", "gpu01: front-replace", "gpu01: reload"],
    )
    assert "setenv FRONT_HOLD 5\n" in config(front)
    assert front.world.machines["gpu01"].containers["vlaunch-c-gpu01-front"]["Id"] == before
    assert "the front is up to date" in front.run("front", "reload").err
    assert front.run("front").code == 0


def test_a_change_that_needs_a_new_container_is_left_to_up(front: Cluster) -> None:
    """`serve` and `stop` warn, and change nothing of the front."""
    write(front, "tls: off")
    ran = front.run("front", "reload")
    assert (ran.code, front.world.changes) == (2, [])
    assert "the front needs a new container" in ran.err
    before = config(front)
    front.world.machines["gpu01"].model = {"model.safetensors": 1000}
    ran = front.run("serve", "--model", "m", "--no-wait", "--skip-network-check")
    assert (ran.code, config(front)) == (0, before)
    assert "the front differs from the inventory: run `vlaunch up`" in ran.err


def test_a_configuration_that_haproxy_rejects_is_not_used(front: Cluster) -> None:
    """Its reason is the evidence, and the old configuration stays."""
    before = config(front)
    line = "[ALERT] config : parsing [haproxy.cfg:8] : unknown keyword"
    front.world.fail["gpu01", "haproxy"] = Answer(node="gpu01", code=1, err=line)
    write(front, "hold: 5s")
    ran = front.run("front", "reload")

    assert ran.code == 1
    assert line in ran.err
    assert config(front) == before
    assert front.world.machines["gpu01"].files[f"{FOLDER}haproxy.cfg"].decode() == before


def test_a_front_that_moves_takes_its_keys_and_leaves_nothing(front: Cluster) -> None:
    """The old node's container is removed."""
    front.run("front", "keys", "add", "alice")
    write(front, "nodes: [gpu01, gpu02]")
    assert front.run("up").code == 0
    keys = [m.files[f"{FOLDER}keys.map"] for m in front.world.machines.values()]
    assert b" alice:0:0:*\n" in keys[0]
    assert keys[0] == keys[1]
    front.write(INVENTORY)
    ran = front.run("up")

    assert ran.code == 0
    assert "gpu[01-02]: its front is not in the inventory" in ran.err
    containers = [m.containers for m in front.world.machines.values()]
    assert [list(names) for names in containers] == [["vlaunch-c-gpu01"], ["vlaunch-c-gpu02"]]


def test_clients_get_the_certificate(front: Cluster) -> None:
    """Without its key."""
    pem = front.world.machines["gpu01"].files["front/tls.pem"].decode()
    ran = front.run("front", "certificate")
    assert (ran.code, ran.out.strip()) == (0, pem.partition("-----BEGIN PRIVATE")[0].strip())
    write(front, "tls: off")
    ran = front.run("front", "certificate")
    assert (ran.code, "the front has no certificate: `front: {tls: off}`" in ran.err) == (2, True)


def test_a_key_is_shown_once_and_its_digest_stored(front: Cluster) -> None:
    """On every node of the front, with its limits."""
    arguments = ("--rpm", "60", "--concurrent", "8", "--models", "chat, embed")
    ran = front.run("front", "keys", "add", "alice", *arguments)
    key = ran.out.strip()
    stored = front.world.machines["gpu01"].files[f"{FOLDER}keys.map"].decode()
    listed = front.run("front", "keys").out
    rows = json.loads(front.run("front", "keys", "list", "--json").out)["keys"]

    assert ran.code == 0
    assert len(key) > 40
    digest = hashlib.sha256(key.encode()).hexdigest()
    assert stored == f"{digest} alice:60:8:,chat,embed,\n"
    assert key not in listed + stored + ran.err
    assert "alice  60   8           chat, embed" in listed
    assert rows == [
        {
            "name": "alice",
            "digest": digest[:12],
            "rpm": 60,
            "concurrent": 8,
            "models": ["chat", "embed"],
            "nodes": ["gpu01"],
        }
    ]
    assert front.run("front", "keys", "revoke", "alice").code == 0
    assert front.world.machines["gpu01"].files[KEYS] == f"# revoked {digest}\n".encode()


@pytest.fixture
def pair(cluster: Cluster) -> Cluster:
    """A front on two nodes, with keys of alice and mallory."""
    write(cluster, "nodes: [gpu01, gpu02]")
    assert cluster.run("up").code == 0
    for name in ("alice", "mallory"):
        assert cluster.run("front", "keys", "add", name).code == 0
    cluster.world.changes.clear()
    return cluster


def key_names(cluster: Cluster, node: str) -> list[str]:
    """Return the users in a node's map."""
    lines = cluster.world.machines[node].files[KEYS].decode().splitlines()
    return sorted(line.split()[1].partition(":")[0] for line in lines if line[0] != "#")


BROKEN = Answer(node="gpu02", code=1, err="HAProxy did not answer")


@pytest.mark.parametrize("away", ["a node", "its program"])
def test_a_key_is_revoked_where_possible_and_never_comes_back(away: str, pair: Cluster) -> None:
    """The error names the other node; `front reload` revokes the key there, too."""
    if away == "a node":
        pair.missing["gpu02"] = ConnectError("gpu02", "connection refused")
    else:
        pair.world.fail["gpu02", "key program"] = BROKEN
    ran = pair.run("front", "keys", "revoke", "mallory")
    pair.missing.clear()
    pair.world.fail.clear()

    assert ran.code == 1
    assert "the key of mallory may still be valid on gpu02; `front reload` revokes it" in ran.err
    assert [key_names(pair, node) for node in NODES] == [["alice"], ["alice", "mallory"]]
    listed = pair.run("front", "keys")
    assert (listed.code, "nodes have different keys: run `vlaunch front reload`" in listed.out) == (
        *(1, True),
    )
    assert re.search(r"mallory .* gpu02 ", listed.out)
    assert pair.run("front").code == 1
    assert pair.run("front", "reload").code == 0
    assert [key_names(pair, node) for node in NODES] == [["alice"], ["alice"]]
    assert pair.run("front", "keys").code == 0
    assert "mallory has no key" in pair.run("front", "keys", "revoke", "mallory").err


def test_a_revocation_can_be_repeated(pair: Cluster) -> None:
    """Until it has reached all nodes."""
    pair.world.fail["gpu02", "revoke"] = BROKEN
    assert pair.run("front", "keys", "revoke", "mallory").code == 1
    pair.world.fail.clear()

    assert pair.run("front", "keys", "revoke", "mallory").code == 0
    assert [key_names(pair, node) for node in NODES] == [["alice"], ["alice"]]


def test_a_key_is_revoked_while_the_nodes_containers_are_down(pair: Cluster) -> None:
    """The front's own container serves on."""
    for name in NODES:
        pair.world.stop(name)
    assert pair.run("front", "keys", "revoke", "mallory").code == 0
    assert [key_names(pair, node) for node in NODES] == [["alice"], ["alice"]]


def test_a_reinstalled_node_gets_keys_but_no_revoked_ones(pair: Cluster) -> None:
    """Its files are gone, the other node has an old map."""
    old = pair.world.machines["gpu02"].files[KEYS]
    assert pair.run("front", "keys", "revoke", "mallory").code == 0
    pair.world.machines["gpu02"].files[KEYS] = old
    assert pair.run("up").code == 0
    assert [key_names(pair, node) for node in NODES] == [["alice"], ["alice"]]
    del pair.world.machines["gpu01"].files[KEYS]
    assert pair.run("front", "reload").code == 0
    maps = [pair.world.machines[node].files[KEYS] for node in NODES]
    assert sorted(maps[0].splitlines()) == sorted(maps[1].splitlines())
    assert [key_names(pair, node) for node in NODES] == [["alice"], ["alice"]]


def test_a_node_whose_files_cannot_be_read_keeps_its_keys(pair: Cluster) -> None:
    """Nothing is written to any node."""
    pair.world.fail["gpu02", "front"] = Answer(node="gpu02", code=124)
    ran = pair.run("front", "reload")

    assert (ran.code, pair.world.changes) == (1, [])
    assert "gpu02: cannot read the front's files" in ran.err


def test_a_key_is_added_to_all_nodes_or_none(pair: Cluster) -> None:
    """A retry gives no node a key of its own."""
    pair.world.fail["gpu02", "add"] = BROKEN
    ran = pair.run("front", "keys", "add", "bob")
    pair.world.fail.clear()

    assert (ran.code, ran.out) == (1, "")
    assert [key_names(pair, node) for node in NODES] == [["alice", "mallory"]] * 2
    pair.world.machines["gpu02"].files[KEYS] += b"ab bob:0:0:*\n"
    assert "bob already has a key on gpu02" in pair.run("front", "keys", "add", "bob").err
    assert pair.run("front", "reload").code == 0
    assert [key_names(pair, node) for node in NODES] == [["alice", "bob", "mallory"]] * 2


def test_keys_of_a_node_that_does_not_answer_are_unknown(pair: Cluster) -> None:
    """Not missing: its front may serve on."""
    pair.world.fail["gpu01", "key program"] = Answer(node="gpu01", code=1, err="no answer")
    ran, data = pair.run("front", "keys"), pair.run("front", "keys", "list", "--json")

    assert (ran.code, "alice" in ran.out) == (1, True)
    assert "gpu01: the front cannot be queried: no answer" in ran.out
    assert (data.code, json.loads(data.out)["unknown"]) == (1, ["gpu01"])
    status = pair.run("front", "status", "--json")
    assert (status.code, json.loads(status.out)["nodes"]["gpu01"]["runs"]) == (1, None)
    pair.world.fail["gpu02", "key program"] = BROKEN
    ran = pair.run("front", "keys")
    assert (ran.code, "alice" in ran.out, ran.out.count("cannot be queried")) == (1, False, 2)


def test_all_mistakes_about_a_key_are_reported(front: Cluster) -> None:
    """Before anything changes."""
    ran = front.run("front", "keys", "add", "a:b", "--models", "Chat")

    assert (ran.code, front.world.changes) == (2, [])
    assert "Chat: is not the name of a server" in ran.err
    assert "a:b: is not a name of letters" in ran.err


@pytest.mark.parametrize("arguments", [("status",), ("reload",), ("keys", "add", "alice")])
def test_an_inventory_without_a_front_is_explained(
    arguments: tuple[str, ...], cluster: Cluster
) -> None:
    """With the lines to add."""
    ran = cluster.run("front", *arguments)

    assert ran.code == 2
    assert "the inventory has no front" in ran.err
    assert "front: {tls: self-signed}" in ran.err


def test_unusable_certificate_files_stop_up_before_anything_changes(
    cluster: Cluster, tmp_path: Path
) -> None:
    """Both files are read, and all that is wrong is reported."""
    (tmp_path / "key.pem").write_text("no key")
    write(cluster, f"tls: {{cert: {tmp_path}/absent.pem, key: {tmp_path}/key.pem}}")
    ran = cluster.run("up")

    assert (ran.code, cluster.world.changes) == (2, [])
    assert f"{tmp_path}/absent.pem: No such file or directory" in ran.err


def test_a_port_in_use_stops_up_before_anything_changes(cluster: Cluster) -> None:
    """But not the front's own."""
    cluster.world.machines["gpu01"].listening = (22, 8443)
    write(cluster)
    ran = cluster.run("up")

    assert (ran.code, cluster.world.changes) == (1, [])
    assert "port 8443 (the front) is in use" in ran.err


def test_an_image_that_nodes_cannot_pull_stops_up_before_anything_changes(
    cluster: Cluster,
) -> None:
    """With the command that copies it."""
    write(cluster, "}\nimage_source: nodes\nulimits: {")
    ran = cluster.run("up")

    assert (ran.code, cluster.world.changes) == (1, [])
    assert f"gpu01: lacks {IMAGE}, the front's image" in ran.err
    assert f"vlaunch image copy {IMAGE}" in ran.err


def test_an_image_that_cannot_be_pulled_stops_up_first(cluster: Cluster) -> None:
    """No container has started."""
    write(cluster)
    cluster.world.fail["gpu01", "pull"] = Answer(node="gpu01", code=1, err="no such host")
    ran = cluster.run("up")

    assert ran.code == 1
    assert f"pulling {IMAGE} failed" in ran.err
    assert cluster.world.verbs() == ["gpu01: pull"]


def test_servers_follow_serve_and_stop(front: Cluster) -> None:
    """Without a command for the front."""
    front.world.machines["gpu01"].model = {"model.safetensors": 1000}
    ran = front.run("serve", "--model", "m", "--name", "chat", "--no-wait", "--skip-network-check")
    assert ran.code == 0, ran.err
    assert "    server chat 127.0.0.1:8000 check" in config(front)
    assert "path_beg /chat/" in config(front)
    assert front.run("stop", "chat").code == 0
    assert "path_beg /chat/" not in config(front)


@pytest.mark.parametrize(
    ("settings", "nodes", "args", "hosts"),
    [
        ("", "gpu01", [], {"127.0.0.1"}),
        ("", "gpu02", [], {"10.0.0.12"}),
        ("", "gpu02", ["--bind", "0.0.0.0"], {"0.0.0.0"}),
        ("nodes: [gpu01, gpu02]", "gpu01", [], {"10.0.0.11"}),
        ("", "gpu01,gpu02", ["--data-parallel-size", "2"], {"10.0.0.11", "10.0.0.12"}),
    ],
    ids=["on the front's node", "elsewhere", "by flag", "two fronts", "two APIs"],
)
def test_a_server_listens_where_the_front_reaches_it(
    settings: str, nodes: str, args: list[str], hosts: set[str], cluster: Cluster
) -> None:
    """Unless the user sets an address."""
    write(cluster, settings)
    balancing = ["--", "--data-parallel-hybrid-lb"] if "--data-parallel-size" in args else []
    sizes = [] if balancing else ["--tp", "1"]
    words = ("--model", "m", "--backend", "mp", "--nodes", nodes, "--dry-run", "--offline")
    ran = cluster.run("serve", *words, *sizes, *args, *balancing)

    assert ran.code == 0, ran.err
    assert set(re.findall(r'"--host", "([0-9.]+)"', ran.out)) == hosts


def test_a_front_that_moves_away_from_a_server_names_it(front: Cluster) -> None:
    """The server listens on the loopback of the front's old node."""
    front.world.machines["gpu01"].model = {"model.safetensors": 1000}
    options = ("--model", "m", "--name", "chat", "--nodes", "gpu01", "--backend", "mp")
    ran = front.run("serve", *options, "--tp", "1", "--no-wait", "--skip-network-check")
    assert (ran.code, "cannot reach" in ran.err) == (0, False), ran.err
    write(front, "node: gpu02")
    ran = front.run("up")

    text = "chat listens on 127.0.0.1 only, where the front on gpu02 cannot reach it: repeat its"
    assert (ran.code, text in ran.err) == (0, True), ran.err


def test_an_address_set_in_the_inventory_is_kept(cluster: Cluster) -> None:
    """0.0.0.0 too."""
    cluster.write(FRONT.replace("FRONT", "") + "serve: {bind: 0.0.0.0}\n")
    ran = cluster.run("serve", "--model", "m", "--dry-run", "--offline")

    assert re.findall(r'"--host", "([0-9.]+)"', ran.out) == ["0.0.0.0"]


def test_clients_get_the_url_of_the_front(front: Cluster) -> None:
    """From `serve` and `status`, for each server."""
    front.world.machines["gpu01"].model = {"model.safetensors": 1000}
    words = ("serve", "--model", "m", "--name", "chat", "--no-wait", "--skip-network-check")
    ran = front.run(*words, "--json")
    url = "https://10.0.0.11:8443/chat/v1"
    done = json.loads(ran.out.splitlines()[-1])
    status = json.loads(front.run("status", "--json").out)

    assert (done["data"]["endpoint"], done["data"]["endpoints"]) == (url, [url])
    assert status["endpoint"] == url
    assert [endpoint["url"] for endpoint in status["servers"][0]["endpoints"]] == [url]


def test_the_front_lists_targets_for_prometheus(front: Cluster) -> None:
    """With the labels that targets have without a front."""
    front.world.machines["gpu01"].model = {"model.safetensors": 1000}
    front.run("serve", "--model", "m", "--name", "chat", "--no-wait", "--skip-network-check")

    assert json.loads(front.world.machines["gpu01"].files["server/.front/targets.json"]) == [
        {
            "targets": ["10.0.0.11:29590"],
            "labels": {
                "__metrics_path__": "/servers/chat/metrics",
                "cluster": "c",
                "node": "gpu01",
                "server": "chat",
                "instance": "10.0.0.11:8000",
            },
        }
    ]


def test_servers_do_not_replace_the_users_certificate(cluster: Cluster, tmp_path: Path) -> None:
    """It may be for the address alone."""
    pair = tmp_path / "front.pem"
    pair.write_text(make_certificate("models.example", ["models.example"]))
    write(cluster, f"address: models.example, tls: {{cert: {pair}, key: {pair}}}")
    assert cluster.run("up").code == 0
    machine = cluster.world.machines["gpu01"]
    machine.model, pem = {"model.safetensors": 1000}, machine.files["front/tls.pem"]
    ran = cluster.run("serve", "--model", "m", "--no-wait", "--skip-network-check")

    assert ran.code == 0, ran.err
    assert machine.files["front/tls.pem"] == pem
    assert cluster.run("front").code == 0


def test_the_requests_of_users_are_counted(front: Cluster) -> None:
    """From the access log, which Docker rotates."""
    entry = {"user": "alice", "server": "chat", "status": 200, "end": "----"}
    log = json.dumps({**entry, "first_byte_ms": 20, "total_ms": 1500})
    front.world.machines["gpu01"].logs = f"{log}\n"
    ran, data = front.run("front", "--since", "1h"), front.run("front", "status", "--json").out
    script = front.run("up", "--dry-run", "--offline").out
    (start,) = (line for line in script.splitlines() if "--name vlaunch-c-gpu01-front" in line)

    assert re.search(r"alice +chat +1 +0 +0 +0.02s +0.02s +1.50s +1.50s", ran.out)
    assert json.loads(data)["traffic"][0]["total_p99"] == 1.5
    assert "--log-opt max-size=" in start


def test_a_tunnel_leads_to_the_front(front: Cluster) -> None:
    """Or to a server's own port."""
    ran = [front.run("tunnel", *args).out for args in ([], ["--server", "chat.2"], ["--direct"])]

    assert ran == [
        "https://127.0.0.1:8443\n",
        "https://127.0.0.1:8443/chat\n",
        "http://127.0.0.1:8000\n",
    ]
    assert front.forwards == [
        *[("gpu01", "127.0.0.1", 8443, 8443)] * 2,
        ("gpu01", "127.0.0.1", 8000, 8000),
    ]


def test_status_shows_the_front(front: Cluster) -> None:
    """A front that has ended makes the cluster unhealthy; `up` starts it again."""
    ran = front.run("status")
    assert "front: https://10.0.0.11:8443/NAME/v1 running on gpu01" in ran.out
    assert json.loads(front.run("status", "--json").out)["front"]["nodes"] == {"gpu01": "running"}
    container = front.world.machines["gpu01"].containers["vlaunch-c-gpu01-front"]
    container["State"] |= {"Status": "exited", "ExitCode": 1}
    ran = front.run("status")
    assert (ran.code, "exited on gpu01" in ran.out) == (1, True)
    front.world.changes.clear()
    assert front.run("up").code == 0
    assert front.world.verbs() == ["gpu01: rm", "gpu01: run"]


def test_down_removes_the_front(front: Cluster) -> None:
    """With its files and keys."""
    assert front.run("down", "--yes").code == 0
    machine = front.world.machines["gpu01"]
    assert (machine.containers, machine.files) == ({}, {})


def test_another_image_replaces_the_container(front: Cluster) -> None:
    """`status` shows the difference first."""
    write(front, "image: haproxy:3.3")
    assert "front: image haproxy:3.2 → haproxy:3.3" in front.run("status").out
    assert front.run("up").code == 0
    assert front.world.verbs() == ["gpu01: pull", "gpu01: rm", "gpu01: run"]


def test_the_key_of_the_servers_is_a_file_and_in_no_script(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front sends it with every request."""
    monkeypatch.setenv("VLLM_API_KEY", "key-of-the-servers")
    text = FRONT.replace("HF_TOKEN: {env: HF_TOKEN}", "VLLM_API_KEY: {env: VLLM_API_KEY}")
    cluster.write(text.replace("FRONT", "tls: off"))
    assert "key-of-the-servers" not in cluster.run("up", "--dry-run").out
    assert cluster.run("up").code == 0

    assert cluster.world.machines["gpu01"].files["front/server-key"] == b"key-of-the-servers"
    assert "setenv FRONT_SERVER_KEY /run/vlaunch/front/server-key" in config(cluster)
    assert "key-of-the-servers" not in config(cluster)


def certificate(days: int, name: str = "models.example") -> bytes:
    """Return a certificate that is valid for some days from now, and its key."""
    until = datetime.now(timezone.utc) + timedelta(days=days)
    pair = Authority("c", until).sign(name, "10.0.0.11", until)
    return pair.reveal().encode()


@pytest.mark.parametrize(
    ("days", "code", "verb"), [(31, 0, ""), (29, 0, "expires"), (-1, 1, "expired")]
)
def test_the_end_of_the_certificate_is_reported(
    days: int, code: int, verb: str, cluster: Cluster, tmp_path: Path
) -> None:
    """A month before, and as a failure after it."""
    pair = tmp_path / "front.pem"
    pair.write_bytes(certificate(60))
    write(cluster, f"address: models.example, tls: {{cert: {pair}, key: {pair}}}")
    assert cluster.run("up").code == 0
    old = certificate(days)
    cluster.world.machines["gpu01"].files["front/tls.pem"] = old
    if days > 0:
        pair.write_bytes(old)

    for words in (("front",), ("front", "status", "--json"), ("status",), ("check", "--json")):
        ran = cluster.run(*words)
        assert words[0] == "check" or ran.code == code, words
        assert (f"the front's certificate {verb} on" in ran.out) == bool(verb), words


def test_a_renewed_file_is_reported_until_it_is_used(cluster: Cluster, tmp_path: Path) -> None:
    """Renewed by another program on this machine."""
    pair = tmp_path / "front.pem"
    pair.write_bytes(certificate(60))
    write(cluster, f"address: models.example, tls: {{cert: {pair}, key: {pair}}}")
    assert cluster.run("up").code == 0
    assert cluster.run("front").code == 0
    pair.write_bytes(certificate(90))
    ran = cluster.run("front")
    assert (ran.code, "run `vlaunch front reload`" in ran.out) == (1, True)
    assert cluster.run("front", "reload").code == 0
    assert cluster.run("front").code == 0
    pair.unlink()  # as on the machine of another operator
    assert cluster.run("front").code == 0


def test_a_certificate_with_a_comment_in_latin_1_is_used(cluster: Cluster, tmp_path: Path) -> None:
    """As `openssl pkcs12` writes it; nodes get the certificate alone."""
    pair, pem = tmp_path / "front.pem", certificate(60)
    pair.write_bytes("friendlyName: M\u00fcller\n".encode("latin-1") + pem)
    write(cluster, f"address: models.example, tls: {{cert: {pair}, key: {pair}}}")

    assert cluster.run("up").code == 0
    assert cluster.world.machines["gpu01"].files["front/tls.pem"] == pem


def test_a_reinstalled_node_gets_the_certificate_of_the_others(pair: Cluster) -> None:
    """Clients need no new one."""
    machines = pair.world.machines
    before = machines["gpu01"].files["front/tls.pem"]
    machines["gpu02"].files.clear()
    machines["gpu02"].containers.clear()
    script = pair.run("up", "--dry-run").out
    ran = pair.run("up")

    assert ran.code == 0
    assert [machine.files["front/tls.pem"] for machine in machines.values()] == [before, before]
    assert "clients must trust" not in ran.err
    assert "on gpu01 cat /root/.vlaunch/c/front/tls.pem" in script
    assert "PRIVATE KEY" not in script + ran.err


def test_clients_are_told_of_a_new_certificate(front: Cluster) -> None:
    """When the front gets another address."""
    before = front.run("front", "certificate").out
    write(front, "address: models.example")
    ran = front.run("front", "reload")

    assert ran.code == 0
    assert "clients must trust the front's new certificate: `vlaunch front certificate`" in ran.err
    assert front.run("front", "certificate").out != before


def test_all_certificates_of_nodes_that_differ_are_printed(pair: Cluster) -> None:
    """A client that trusts them reaches every node."""
    own = make_certificate("models.example", ["10.0.0.12"])
    pair.world.machines["gpu02"].files["front/tls.pem"] = own.encode()
    ran = pair.run("front", "certificate")

    assert (ran.code, ran.out.count("BEGIN CERTIFICATE")) == (0, 2)
