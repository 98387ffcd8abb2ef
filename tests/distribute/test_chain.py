"""Requests to the node program, and parsing of its answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.core.domain import Answer, Inventory, Mount, Node
from launcher.core.errors import UnreadableAnswer
from launcher.distribute import chain
from launcher.distribute.node.files import CopyManifest, ManifestFile

NODE = Node(name="n1", host="n1", ip="10.0.0.1", gpus=1, head=True, hf_home="/data/hf")
INVENTORY = Inventory(
    path=Path("inventory.yaml"),
    cluster="c",
    image="vllm:1",
    nodes=(NODE,),
    mounts=(Mount(source="/srv/models", target="/models"),),
)
CERTIFICATE = "-----BEGIN CERTIFICATE-----"


def answer(*events: dict[str, Any], code: int = 0) -> Answer:
    return Answer(node="n1", code=code, out="".join(json.dumps(event) + "\n" for event in events))


def test_paths_are_those_of_containers() -> None:
    """Unchanged in a container; a program on the node itself uses their sources."""
    node, image = chain.node_runtime(INVENTORY), chain.image_runtime(INVENTORY, NODE)

    assert node.translate_path("/models/a") == "/srv/models/a"
    assert (node.translate_path("/modelsx"), node.translate_path("/data/hf/x")) == (
        "/modelsx",
        "/data/hf/x",
    )
    assert image.translate_path("/models/a") == "/models/a"
    assert chain.model_root(node, NODE, "org/m") == "/data/hf/hub/models--org--m"
    assert chain.model_root(node, NODE, "/models/a") == "/srv/models/a"


def test_a_container_has_the_clusters_mounts() -> None:
    """It is temporary, has an open input, and uses the host's network."""
    command = " ".join(chain.image_runtime(INVENTORY, NODE).argv)

    assert "--interactive --network host" in command
    assert "--volume /data/hf:/data/hf --volume /srv/models:/models" in command
    assert "--entrypoint python3 vllm:1 -c" in command
    assert "--label vlaunch.cluster=c" in command


def test_no_certificate_is_in_a_command_line() -> None:
    """It is sent on standard input, with the program."""
    request = chain.copy_request(
        node="n1",
        root="/m",
        manifest=CopyManifest([ManifestFile("a", 1)], 1),
        certificate=CERTIFICATE,
        encrypt=True,
        streams=2,
        listen=("10.0.0.1", 1),
    )

    assert CERTIFICATE.encode() in chain.program_input(request)
    for where in (chain.node_runtime(INVENTORY), chain.image_runtime(INVENTORY, NODE)):
        assert CERTIFICATE not in " ".join(where.argv)


@pytest.mark.parametrize(
    ("model", "query"),
    [
        ("", {"hub": "/data/hf/hub", "beside": "/data/hf", "room": "/data/hf"}),
        ("org/m", {"hub": "/data/hf/hub", "name": "org/m", "room": "/data/hf"}),
        ("/models/a", {"path": "/srv/models/a", "room": "/srv/models/a"}),
    ],
)
def test_a_scan_of_one_model_or_all(model: str, query: dict[str, str]) -> None:
    """By name, by path, or all."""
    request = chain.scan_request(chain.node_runtime(INVENTORY), NODE, model=model)

    assert request == {"verb": "look", "files": False, **query}


def test_orders_are_single_lines() -> None:
    """Programs get them unchanged."""
    from launcher.ssh.envelope import encode_line

    orders = [
        chain.peers_order([("n1", "10.0.0.1", 5)]),
        chain.give_order("127.0.0.1", 7),
        chain.simple_order("go"),
    ]

    assert [json.loads(encode_line(order))["order"] for order in orders] == ["before", "give", "go"]


def test_an_event_of_a_node() -> None:
    """Missing and unknown fields are ignored."""
    event = chain.parse_event("n1", '{"event": "progress", "have": 5, "source": "n0", "new": 1}')

    assert (event.event, event.have, event.source, event.why) == ("progress", 5, "n0", "")
    for line in ("nonsense", '{"event": 5}', '{"have": 1}', '{"event": "x", "have": "much"}'):
        with pytest.raises(UnreadableAnswer, match="the status of the copy on n1"):
            chain.parse_event("n1", line)


def test_an_answer_is_the_last_line() -> None:
    """After progress lines; a failure has its reason."""
    removed = answer({"event": "progress", "have": 1}, {"event": "removed", "bytes": 7})
    assert chain.parse_removed(removed) == 7
    with pytest.raises(UnreadableAnswer, match="n1 cannot do it: No such file"):
        chain.parse_removed(answer({"event": "failed", "why": "No such file"}, code=1))
    with pytest.raises(UnreadableAnswer) as caught:
        chain.parse_models(Answer(node="n1", code=127, err="sh: python3: not found"))

    assert caught.value.evidence == "sh: python3: not found"


@pytest.mark.parametrize("revision", ["../../../../outside/evil", "..", ".", "a/b", "a\0"])
def test_a_revision_is_the_name_of_a_folder(revision: str) -> None:
    """A node's name of a revision becomes a path on others."""
    payload = {"revision": "v1.0", "size": 1, "count": 1, "used": 0, "why": ""}
    model = {"name": "a/b", "root": "/hf/hub/models--a--b", "kind": "hub", "refs": {}}
    model |= {"copied": False, "unfinished": 0, "downloading": 0, "left_over": 0}
    scan = {"event": "seen", "free": 1}
    good = chain.parse_models(answer({**scan, "models": [{**model, "revisions": [payload]}]}))
    assert good.models[0].revisions[0].revision == "v1.0"

    model["revisions"] = [{**payload, "revision": revision}]
    with pytest.raises(UnreadableAnswer, match="revision"):
        chain.parse_models(answer({**scan, "models": [model]}))


@pytest.mark.processes
def test_the_sent_program_runs(tmp_path: Path) -> None:
    """Without its own file, for any name of a package."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    request = {"verb": "look", "path": str(tmp_path / "m"), "files": True, "room": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, *chain.node_runtime(INVENTORY).argv[1:]],
        input=chain.program_input(request),
        capture_output=True,
        check=True,
        cwd=tmp_path,
        timeout=60,
    )
    store = chain.parse_models(Answer(node="n1", code=0, out=ran.stdout.decode()))

    assert store.models[0].revisions[0].files[0][:2] == ("config.json", 2)
    assert store.models[0].revisions[0].why == "no weights"
    assert ran.stderr == b""
