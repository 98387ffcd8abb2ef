"""Rules beyond the schemas that Kubernetes, a controller or a kernel enforces, for every export."""

from __future__ import annotations

import base64
import contextlib
import io
import re
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import run_command
from launcher.core import secret_patterns
from tests.export.exports import CASES, JOB_CASES, KINDS, PAIRS, inventory, job, objects

Object = Mapping[str, Any]
# Longest names by kind: webhooks of LWS 0.10, validation.go of KubeRay 1.7.
LONGEST = {"LeaderWorkerSet": 52, "RayJob": 47}
LABEL = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?")
PORT = re.compile(r"(?=[a-z0-9-]*[a-z])[a-z0-9](?:[a-z0-9]|-(?!-))*(?<!-)")
HANDLERS = {"exec", "httpGet", "tcpSocket", "grpc"}
LWS = "leaderworkerset.sigs.k8s.io"


@dataclass(frozen=True)
class Pod:
    """A pod's spec, with its labels and those of its controller."""

    labels: Mapping[str, str]
    spec: Object

    @property
    def container(self) -> dict[str, Any]:
        """Return its only container."""
        (container,) = self.spec["containers"]
        return dict(container)


@cache
def text(kind: str, case: str) -> str:
    """Return an export; for `batch`, a batch job's."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
        parts = ["export", "kubernetes", "-i", str(inventory(case)), *KINDS.get(kind, ())]
        parts += CASES[case][1] if case in CASES else ()
        assert run_command(job(Path(folder), case) if kind == "batch" else parts) == 0
    return out.getvalue()


@cache
def render(kind: str, case: str) -> list[dict[str, Any]]:
    """Return the objects of an export."""
    return objects(text(kind, case))


def pods(results: list[dict[str, Any]]) -> Iterator[Pod]:
    """Yield an export's pods, as controllers create them."""
    spec, name = results[0]["spec"], results[0]["metadata"]["name"]
    if results[0]["kind"] == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        templates = [group.get("leaderTemplate"), group["workerTemplate"]]
        for index, template in enumerate(filter(None, templates)):
            own = {f"{LWS}/name": name, f"{LWS}/worker-index": str(index)}
            yield Pod({**template["metadata"]["labels"], **own}, template["spec"])
        return
    cluster = spec["rayClusterSpec"]
    for group in [cluster["headGroupSpec"], *cluster.get("workerGroupSpecs", [])]:
        role = "head" if group is cluster["headGroupSpec"] else "worker"
        template = group["template"]
        labels = {**template["metadata"]["labels"], "ray.io/node-type": role}
        yield Pod(labels, template["spec"])


EVERY = pytest.mark.parametrize(
    ("kind", "case"), [*PAIRS, *(("batch", case) for case in JOB_CASES)]
)


@EVERY
def test_names(kind: str, case: str) -> None:
    """DNS labels (RFC 1035) that leave room for what controllers append."""
    for item in render(kind, case):
        name = item["metadata"]["name"]
        assert LABEL.fullmatch(name)
        assert len(name) <= LONGEST.get(item["kind"], 63)


@EVERY
def test_mounts_and_volumes(kind: str, case: str) -> None:
    """Every mount has a volume, every volume a mount; a volume's ConfigMap has its keys."""
    maps = {
        item["metadata"]["name"]: {**item.get("data", {}), **item.get("binaryData", {})}
        for item in render(kind, case)
        if item["kind"] == "ConfigMap"
    }
    used = set()
    for pod in pods(render(kind, case)):
        volumes = [volume["name"] for volume in pod.spec["volumes"]]
        mounts = [mount["name"] for mount in pod.container["volumeMounts"]]
        assert sorted(set(volumes)) == sorted(volumes) == sorted(mounts)
        places = [mount["mountPath"] for mount in pod.container["volumeMounts"]]
        assert len(set(places)) == len(places)
        for volume in pod.spec["volumes"]:
            if source := volume.get("configMap"):
                used.add(source["name"])
                keys = [entry["key"] for entry in source.get("items", [])]
                assert set(keys) <= set(maps[source["name"]])
    assert used == set(maps)


@EVERY
def test_probes_and_ports(kind: str, case: str) -> None:
    """One handler, an existing port, names of 15 characters."""
    for pod in pods(render(kind, case)):
        ports = {port["name"]: port for port in pod.container.get("ports", [])}
        for name in ports:
            assert len(name) <= 15
            assert PORT.fullmatch(name)
        for key, probe in pod.container.items():
            if key.endswith("Probe"):
                assert len(HANDLERS & set(probe)) == 1
                assert probe["httpGet"]["port"] in ports


@EVERY
def test_resources(kind: str, case: str) -> None:
    """Requests equal limits for devices; a volume in memory fits into the limit."""
    for pod in pods(render(kind, case)):
        resources = pod.container.get("resources", {})
        limits, requests = resources.get("limits", {}), resources.get("requests", {})
        devices = {name for name in {*limits, *requests} if "/" in name}
        assert all(limits.get(name) == requests.get(name) for name in devices)
        (shm,) = [volume for volume in pod.spec["volumes"] if volume["name"] == "shm"]
        if "memory" in limits:
            sizes = (limits["memory"], shm["emptyDir"]["sizeLimit"])
            limit, size = (int(value.removesuffix("Gi")) for value in sizes)
            assert size <= limit


@EVERY
def test_environment(kind: str, case: str) -> None:
    """Unique variables without values of secrets; no Service's variables, as vLLM would use
    VLLM_PORT.
    """
    assert secret_patterns.VALUE.search(text(kind, case).partition("binaryData:")[0]) is None
    for pod in pods(render(kind, case)):
        names = [variable["name"] for variable in pod.container["env"]]
        assert len(set(names)) == len(names)
        assert pod.spec["enableServiceLinks"] is False


@EVERY
def test_selectors(kind: str, case: str) -> None:
    """They select pods; a Service selects the one with the API."""
    labels = [pod.labels for pod in pods(render(kind, case))]
    for item in render(kind, case):
        spec = item.get("spec", {})
        if item["kind"] == "Service":
            chosen = [pod for pod in pods(render(kind, case)) if _selects(spec["selector"], pod)]
            assert ["http" in str(pod.container["ports"]) for pod in chosen] == [True]
        expected = (spec.get("podSelector") or spec.get("selector") or {}).get("matchLabels", {})
        assert any(expected.items() <= own.items() for own in labels)


def _selects(value: Mapping[str, str], pod: Pod) -> bool:
    return value.items() <= pod.labels.items()


@EVERY
def test_size_and_content(kind: str, case: str) -> None:
    """At most 300 lines for two nodes, without the text of a program; ConfigMaps fit."""
    result = render(kind, case)
    if case in ("h100", "spark"):
        assert text(kind, case).count("\n") <= 300
    assert "import " not in text(kind, case)
    for item in result:
        if item["kind"] == "ConfigMap":
            data = item.get("binaryData", {})
            archives = {name: base64.b64decode(data[name]) for name in data if "pyz" in name}
            assert sum(map(len, archives.values())) < 1 << 20
            assert all(zipfile.is_zipfile(io.BytesIO(content)) for content in archives.values())
    assert not [item for item in result if item["kind"] == "Secret"]


@EVERY
def test_rules_of_controllers(kind: str, case: str) -> None:
    """No pods wait for one another; Ray has a token, HTTP probes (2.53) and fixed groups."""
    result = render(kind, case)
    spec = result[0]["spec"]
    if result[0]["kind"] == "LeaderWorkerSet":
        assert spec["startupPolicy"] == "LeaderCreated"
        return
    cluster = spec["rayClusterSpec"]
    major, minor, _ = map(int, cluster["rayVersion"].split("."))
    assert (major, minor) >= (2, 53)
    assert cluster["authOptions"] == {"mode": "token"}
    assert spec["entrypoint"]
    for group in cluster.get("workerGroupSpecs", []):
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 1
