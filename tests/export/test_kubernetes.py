"""`vlaunch export kubernetes`: the pods, and their comments."""

from __future__ import annotations

import base64
import json
import math
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli.main import run_command
from launcher.network import archive as network_archive
from launcher.tools.shipped import zipapps
from tests import golden
from tests.export.exports import CASES, KINDS, MODEL, PAIRS, RDMA, inventory, objects
from tests.export.kubernetes_export import PAIR, Export, env, shown, split


def test_golden(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole output except for the programs, twice the same."""
    export = Export(capsys, pair, *RDMA, "--memory", "900GiB")

    assert export.text == Export(capsys, pair, *RDMA, "--memory", "900GiB").text
    golden.check(Path(__file__).parent / "golden" / "kubernetes-lws.yaml", shown(export.text))


def test_the_ranks_are_those_of_serve(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The arguments of `vllm serve` are the launcher's, with the controller's variables for address
    and number; only the first has an API.
    """
    export = Export(capsys, pair, *RDMA)
    run_command(["serve", "-i", str(pair), "--backend", "mp", "--dry-run", "--offline"])
    output = re.findall(r'"argv": (\[.*?\])', capsys.readouterr().out)
    leader, worker = (yaml.safe_load(item) for item in output)
    own = {"10.0.0.1": "$LWS_LEADER_ADDRESS"}
    at = worker.index("--node-rank") + 1
    assert worker[at] == "1"
    worker[at] = "$LWS_WORKER_INDEX"

    assert split(export.argv())[1] == [own.get(label, label) for label in leader]
    assert split(export.argv("workerTemplate"))[1] == [own.get(label, label) for label in worker]
    assert "--headless" in worker


def test_only_rank_0_has_probes(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A worker has no API; rank 0 may take as long as the check and a start."""
    export = Export(capsys, pair, *RDMA, "--timeout", "605")
    leader = export.container()
    deadline = int(dict(pairwise(export.argv()))["--deadline"])

    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert leader[name]["httpGet"] == {"path": "/health", "port": "http"}
    assert leader["startupProbe"]["failureThreshold"] == math.ceil((2 * 605 + deadline) / 10)
    assert leader["livenessProbe"]["failureThreshold"] == 12
    assert not [key for key in export.container("workerTemplate") if "robe" in key]
    assert "ports" not in export.container("workerTemplate")


def test_the_network_is_checked_first(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By one archive, in the serving container, for the inventory's level."""
    export = Export(capsys, pair, *RDMA)
    check, _ = split(export.argv())
    check = check[check.index("exec") :]
    options = dict(pairwise(check))

    assert check[:3] == ["exec", "python3", "/opt/vlaunch/network.pyz"]
    worker, _ = split(export.argv("workerTemplate"))
    assert worker[worker.index("exec") :] == check
    assert (options["--require"], options["--ranks-per-node"]) == ("rdma", "8")
    assert (options["--rank"], options["--size"]) == ("$LWS_WORKER_INDEX", "2")
    assert options["--wait"] == "1800"
    archive = base64.b64decode(export.of("ConfigMap")["binaryData"]["network.pyz"])
    assert archive == zipapps.pack(network_archive.files(), compress=True)
    skipped = Export(capsys, pair, *RDMA, "--skip-network-check")
    argv = skipped.argv()
    assert argv[argv.index("exec") :][:3] == ["exec", "vllm", "serve"]
    assert "ConfigMap" not in [item["kind"] for item in skipped.objects]
    assert "programs" not in skipped.text


def test_the_archive_is_a_program(tmp_path: Path) -> None:
    """With all of its imports except torch."""
    archive = tmp_path / "network.pyz"
    archive.write_bytes(zipapps.pack(network_archive.files(), compress=True))
    done = subprocess.run([sys.executable, archive, "--help"], capture_output=True, check=False)

    assert done.returncode == 0, done.stderr
    assert len(archive.read_bytes()) < 50_000  # it fits into a ConfigMap of 1 MiB many times


def test_rdma_is_a_resource(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the right to pin memory; without its name the export is rejected, as NCCL would silently
    use TCP.
    """
    export = Export(capsys, pair, "--rdma-resource", "rdma/hca=2")
    leader = export.container()
    refused = Export(capsys, pair)

    assert leader["resources"]["limits"] == {"nvidia.com/gpu": 8, "rdma/hca": 2}
    assert leader["resources"]["requests"] == leader["resources"]["limits"]
    assert leader["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}
    assert "path: /dev/infiniband" not in export.text
    assert (refused.code, refused.text) == (2, "")
    assert "--rdma-resource NAME" in refused.error


def test_the_pod_network_has_its_own_interface(
    pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The host's NIC is missing in it; the host's network has it, on the inventory's own nodes."""
    pod = Export(capsys, pair, *RDMA)
    host = Export(capsys, pair, *RDMA, "--host-network")
    spec = host.group["workerTemplate"]["spec"]
    term = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]

    assert env(pod.container())["NCCL_SOCKET_IFNAME"] == "=eth0"
    assert "NCCL_IB_HCA" not in env(pod.container())
    assert "`interface` and `hca`: pods use eth0" in pod.text
    assert env(host.container())["NCCL_SOCKET_IFNAME"] == "=bond0"
    assert env(host.container())["NCCL_IB_HCA"] == "=mlx5_0"
    assert spec["hostNetwork"] is True
    assert term["nodeSelectorTerms"][0]["matchExpressions"][0]["values"] == ["gpu02"]
    assert [item["kind"] for item in host.objects].count("NetworkPolicy") == 0


def test_secrets_are_only_named(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As files that the container's command reads, with the line that creates the Secret."""
    export = Export(capsys, pair, *RDMA)

    assert '"pair-secrets"' in json.dumps(export.objects)
    mount = {"name": "secrets", "mountPath": "/run/vlaunch/secrets", "readOnly": True}
    assert mount in export.container()["volumeMounts"]
    assert "envFrom" not in export.container()
    (command,) = export.container()["args"]
    (reads,) = re.findall("^for .*; done$", command, flags=re.MULTILINE)
    folder = tmp_path / "secrets"
    folder.mkdir()
    (folder / "HF_TOKEN").write_text("hf a b\n")
    script = reads.replace("/run/vlaunch/secrets", str(folder)) + '; printf %s "$HF_TOKEN"'
    assert subprocess.run(["sh", "-c", script], capture_output=True, check=True).stdout == b"hf a b"
    assert "HF_TOKEN_PATH" not in env(export.container())
    assert '-H "Authorization: Bearer $VLLM_API_KEY"' in export.text
    assert not [item for item in export.objects if item["kind"] == "Secret"]
    pair.write_text(re.sub("(?m)^secrets: .*", "", PAIR))
    assert "secrets" not in Export(capsys, pair, *RDMA).container()["args"][0]


def test_users_text_is_not_expanded(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither by the kubelet nor by the shell."""
    export = Export(capsys, pair, *RDMA, "--", "--chat-template", "$(NAME)", "--seed", "a$$b$$(c$d")
    (script,) = export.container()["args"]

    assert env(export.container())["NCCL_DEBUG_SUBSYS"] == "$$(ALL)"
    assert "--chat-template '$$(NAME)'" in script
    # The kubelet replaces `$$` by `$`, also before a bracket; a single `$` stays.
    assert "--seed 'a$$$$b$$$$(c$d'" in script


def test_replicas_are_numbered_by_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    """A pod's number is no rank: two replicas on four nodes."""
    export = Export(capsys, inventory("roce-replicas"), *CASES["roce-replicas"][1])
    (script,) = export.container("workerTemplate")["args"]
    argv = export.argv("workerTemplate")

    assert '--data-parallel-start-rank "$$((LWS_WORKER_INDEX * 2))"' in script
    assert "--headless" in argv
    assert export.group["size"] == 4


def test_one_node_is_no_group(capsys: pytest.CaptureFixture[str]) -> None:
    """It has one template and no gate, and restarts in place."""
    export = Export(capsys, inventory("workstation"))

    assert (export.group["size"], export.group["restartPolicy"]) == (1, "None")
    assert "leaderTemplate" not in export.group
    argv = export.argv("workerTemplate")
    assert argv[:3] == ["exec", "vllm", "serve"]
    assert argv[argv.index("--host") + 1] == "0.0.0.0"
    assert "`bind:`: the server listens on its pod's address" in export.text


@pytest.mark.parametrize(
    ("text", "volume", "mount"),
    [
        (
            ("--model-volume", "pvc:llm:/a"),
            {"name": "model", "persistentVolumeClaim": {"claimName": "llm"}},
            {"name": "model", "mountPath": "/data/huggingface", "subPath": "a"},
        ),
        (
            ("--model-volume", "pvc:llm", "--model", "/models/q"),
            {"name": "model", "persistentVolumeClaim": {"claimName": "llm", "readOnly": True}},
            {"name": "model", "mountPath": "/models", "readOnly": True},
        ),
        (
            ("--model-volume", "hostPath:/disk", "--model", "/elsewhere/q"),
            {"name": "model", "hostPath": {"path": "/disk", "type": "Directory"}},
            {"name": "model", "mountPath": "/elsewhere", "readOnly": True},
        ),
        (
            (),
            {
                "name": "hf-home",
                "hostPath": {"path": "/data/huggingface", "type": "DirectoryOrCreate"},
            },
            {"name": "hf-home", "mountPath": "/data/huggingface"},
        ),
    ],
)
def test_locations_of_the_model(
    pair: Path,
    capsys: pytest.CaptureFixture[str],
    text: tuple[str, ...],
    volume: dict[str, Any],
    mount: dict[str, Any],
) -> None:
    """In a claim or on the nodes; weights are read-only, a cache is not."""
    export = Export(capsys, pair, *RDMA, *text)

    assert volume in export.group["leaderTemplate"]["spec"]["volumes"]
    assert mount in export.container()["volumeMounts"]
    assert env(export.container())["HF_HOME"] == "/data/huggingface"
    homes = [
        volumemount
        for volumemount in export.container()["volumeMounts"]
        if volumemount["mountPath"] == "/data/huggingface"
    ]
    assert len(homes) == 1
    assert "readOnly" not in homes[0]


def test_omitted_settings_are_listed(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the header, with reasons."""
    pair.write_text(
        PAIR.replace(
            "cluster: pair",
            "cluster: pair\nulimits: {nofile: 9}\ndevices: [/dev/gdrdrv]\nlogging: {driver: local}",
        )
    )
    text = Export(capsys, pair, *RDMA).text

    for label in ("`ulimits:`", "`devices:`", "`logging:`", "`restarts:`", "`docker:`"):
        assert label in text.partition("apiVersion")[0]


def test_privileged_pods_need_no_resource(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kubernetes passes all of the node's devices to them."""
    pair.write_text(PAIR.replace("cluster: pair", "cluster: pair\nprivileged: true"))
    export = Export(capsys, pair)

    assert export.container()["securityContext"] == {"privileged": True}


@pytest.mark.parametrize(
    ("old", "new", "text", "expected"),
    [
        ("cluster: pair", "cluster: 9-lives", (), "choose one: `--name NAME`"),
        ("cluster: pair", "cluster: pair", ("--name", "Pair"), "is not a valid name"),
        ("", "", ("--rdma-resource", "ib"), "--rdma-resource should be"),
        ("", "", ("--kind", "kuberay", "--dp", "2"), "`--kind lws`"),
        ("", "", ("--", "--port", "9000"), "`ports: {api: …}` in the inventory"),
        ("", "", ("--model-volume", "nfs:/x"), "--model-volume should be"),
        ("", "", ("--model-volume", "pvc:a:/../b"), "--model-volume should be"),
        ("", "", ("--memory", "much"), "--memory should be"),
        ("model: org/m, ", "", (), "no model given"),
        ("", "", ("--dp", "2", "--", "-dph"), "hybrid load balancing"),
        (
            "gpus: 8}",
            "gpus: 8}\n  - {host: c, ip: 10.0.0.3, gpus: 8, hf_home: /other}",
            (),
            "`hf_home` differs",
        ),
    ],
)
def test_unsupported_settings_are_rejected(
    pair: Path,
    capsys: pytest.CaptureFixture[str],
    old: str,
    new: str,
    text: tuple[str, ...],
    expected: str,
) -> None:
    """With the alternative, and without standard output."""
    pair.write_text(PAIR.replace(old, new) if old else PAIR)
    export = Export(capsys, pair, *([] if "--rdma-resource" in text else RDMA), *text)

    assert (export.code, export.text) == (2, "")
    assert expected in export.error


def test_a_volume_has_one_path_in_all_pods(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first node's path."""
    pair.write_text(
        PAIR.replace("gpus: 8}", "gpus: 8}\n  - {host: c, ip: 10.0.0.3, gpus: 8, hf_home: /other}")
    )
    export = Export(capsys, pair, *RDMA, "--model-volume", "pvc:models")

    assert export.code == 0
    assert env(export.container("workerTemplate"))["HF_HOME"] == env(export.container())["HF_HOME"]
    assert "/other" not in export.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            ("--model-volume", "pvc:m"),
            "the claim m, mounted at /data/huggingface: the Hugging Face cache for org/m;"
            " missing files are downloaded to it",
        ),
        (
            ("--model-volume", "pvc:m:/a", "--model", "/disk/q"),
            "the claim m, mounted at /disk: with /disk/q; read-only",
        ),
        ((), "a directory on every node, mounted at /data/huggingface: the Hugging Face cache"),
    ],
)
def test_the_header_names_the_models_volume(
    pair: Path, capsys: pytest.CaptureFixture[str], text: tuple[str, ...], expected: str
) -> None:
    """With its use, which determines the access mode."""
    assert expected in Export(capsys, pair, *RDMA, *text).text.partition("apiVersion")[0]


def test_a_namespace_is_everywhere(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In all objects, and in all commands."""
    for kind in KINDS.values():
        argv = (*kind, *RDMA)
        placed = Export(capsys, pair, *argv, "--namespace", "llm")
        plain = Export(capsys, pair, *argv)

        assert {item["metadata"]["namespace"] for item in placed.objects} == {"llm"}
        assert not [item for item in plain.objects if "namespace" in item["metadata"]]
        head = placed.text.partition("apiVersion")[0]
        reached = re.findall(r"kubectl(?! get crd)( -n llm)?", head)
        assert len(reached) > 6
        assert set(reached) == {" -n llm"}
        assert " -n " not in plain.text.partition("apiVersion")[0]


def test_the_secret_comes_from_the_inventorys_sources(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The header's command is run: no value is an argument, and an empty one stops it."""
    sources = "{VLLM_API_KEY: {env: THE_KEY}, HF_TOKEN: {file: ~/hf}, W: {command: echo w-1}}"
    pair.write_text(re.sub("(?m)^secrets: .*", f"secrets: {sources}", PAIR))
    export = Export(capsys, pair, *RDMA, "--namespace", "llm")
    (line,) = re.findall(r"#\s+(\(umask .*)", export.text)
    (tmp_path / "hf").write_text("hf-1\n")
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(
        '#!/bin/sh\nprintf "%s " "$@" >"$HOME/argv"\nfor last; do :; done\n'
        'cp -r "${last#--from-file=}" "$HOME/made"\n'
    )
    kubectl.chmod(0o700)

    def make(**env: str) -> int:
        path = f"{tmp_path}:{os.environ['PATH']}"
        mapping = {"HOME": str(tmp_path), "PATH": path, "TMPDIR": str(tmp_path), **env}
        return subprocess.run(["sh", "-c", line], env=mapping, check=False).returncode

    assert make() != 0
    assert make(THE_KEY="") != 0
    assert not (tmp_path / "made").exists()
    assert make(THE_KEY="key-1") == 0
    created = {item.name: item.read_text().strip() for item in (tmp_path / "made").iterdir()}
    assert created == {"VLLM_API_KEY": "key-1", "HF_TOKEN": "hf-1", "W": "w-1"}
    argv = (tmp_path / "argv").read_text()
    assert argv.startswith("-n llm create secret generic pair-secrets --from-file=")
    assert list(tmp_path.glob("tmp.*")) == []
    (tmp_path / "hf").write_text("")
    assert make(THE_KEY="key-1") != 0


def test_the_chat_has_the_key(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the secret, for any source; the command waits for the port forwarding."""
    export = Export(capsys, pair, *RDMA)
    key = "kubectl get secret pair-secrets -o jsonpath='{.data.VLLM_API_KEY}' | base64 -d"

    assert f'VLLM_API_KEY="$({key})"' in export.text
    assert "curl --retry 10 --retry-connrefused http://localhost:8000/v1" in export.text


def test_waiting_takes_as_long_as_a_start(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The network check with its waits, then the first answer."""
    options = dict(pairwise(Export(capsys, pair, *RDMA).argv()))
    limit = int(options["--wait"]) + int(options["--deadline"]) + 1800

    assert f"--timeout={limit}s leaderworkerset/pair" in Export(capsys, pair, *RDMA).text


def test_one_pod_needs_no_rdma(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its ranks share a node: neither a resource nor a right is requested."""
    export = Export(capsys, pair, "--tp", "2", "--pp", "1")

    assert export.code == 0, export.error
    assert "IPC_LOCK" not in export.text.partition("kind: ConfigMap")[0]
    assert Export(capsys, pair, "--tp", "2", "--pp", "2").code == 0
    assert Export(capsys, pair, "--tp", "8", "--pp", "2").code == 2


def test_sizes_of_kubernetes(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Passed on unchanged."""
    export = Export(capsys, pair, *RDMA, "--memory", "1500Gi")

    assert export.container()["resources"]["limits"]["memory"] == "1500Gi"


def test_names_are_converted(pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Dots and underscores are invalid in Kubernetes."""
    pair.write_text(PAIR.replace("cluster: pair", "cluster: my_pair.1"))

    assert Export(capsys, pair, *RDMA).of("Service")["metadata"]["name"] == "my-pair-1-api"


def test_a_folder_is_for_kustomize(
    pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same objects, with the network check as a file; kustomize creates its ConfigMap."""
    folder = tmp_path / "out"
    text = Export(capsys, pair, *RDMA, "--namespace", "llm").text
    assert Export(capsys, pair, *RDMA, "--namespace", "llm", "-o", str(folder)).text == ""
    kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
    (generator,) = kustomization["configMapGenerator"]
    server = (folder / "server.yaml").read_text()
    *result, config = objects(text)

    assert sorted(path.name for path in folder.iterdir()) == [
        "kustomization.yaml",
        "network.pyz",
        "server.yaml",
    ]
    assert objects(server) == result
    assert kustomization["resources"] == ["server.yaml"]
    assert generator["files"] == ["network.pyz"]
    assert (generator["name"], kustomization["namespace"]) == ("pair-programs", "llm")
    assert generator["options"]["disableNameSuffixHash"] is True
    archive = (folder / "network.pyz").read_bytes()
    assert base64.b64decode(config["binaryData"]["network.pyz"]) == archive
    assert "kubectl -n llm apply -k DIR\n" in server
    assert "-f FILE" not in server


@pytest.mark.parametrize(("kind", "case"), PAIRS)
def test_every_example_is_exported(
    kind: str, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its model; `test_kubernetes_rules.py` has the rules."""
    export = Export(capsys, inventory(case), *KINDS[kind], *CASES[case][1])

    assert export.code == 0, export.error
    model = MODEL if MODEL in CASES[case][1] else CASES[case][1][1:2] or ("Qwen/",)
    assert (model if isinstance(model, str) else model[0]) in export.text
