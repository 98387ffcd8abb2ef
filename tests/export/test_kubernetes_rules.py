"""What schemas pass and Kubernetes refuses: each mistake is made in an export that has none."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli.main import run
from launcher.export import kubernetes_rules
from tests.export.exports import CASES, KINDS, inventory, objects

Objects = list[dict[str, Any]]


@cache
def rendered(kind: str) -> Objects:
    """Return an export with all kinds of objects around it, which nobody may change."""
    words = (*KINDS[kind], *CASES["spark"][1])
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert run(["export", "kubernetes", "-i", str(inventory("spark")), *words]) == 0
    return objects(out.getvalue())


def exported(kind: str) -> Objects:
    """Return the same, for a test to break."""
    return copy.deepcopy(rendered(kind))


@pytest.fixture
def good() -> Objects:
    """An export as a LeaderWorkerSet."""
    return exported("lws")


def template(objects: Objects, name: str = "leaderTemplate") -> Any:
    """Return a template of the group."""
    return objects[0]["spec"]["leaderWorkerTemplate"][name]


def spec(objects: Objects) -> Any:
    """Return the first pod's spec."""
    return template(objects)["spec"]


def serving(objects: Objects) -> Any:
    """Return the first pod's container."""
    return spec(objects)["containers"][0]


def of(objects: Objects, kind: str) -> Any:
    """Return the one object of a kind."""
    (found,) = [each for each in objects if each["kind"] == kind]
    return found


def replace(objects: Objects, kind: str, **spec: Any) -> None:
    """Put values into the spec of an object."""
    of(objects, kind)["spec"].update(spec)


def ray(objects: Objects) -> Any:
    """Return the cluster of the RayJob."""
    return objects[0]["spec"]["rayClusterSpec"]


MISTAKES: dict[str, tuple[Callable[[Objects], Any], str]] = {
    "mount": (
        lambda o: serving(o)["volumeMounts"].append({"name": "gone", "mountPath": "/x"}),
        "mounts gone, which is no volume of the pod",
    ),
    "handlers": (
        lambda o: serving(o)["readinessProbe"].update(tcpSocket={"port": 1}),
        "readinessProbe should have one handler, not 2",
    ),
    "port name": (
        lambda o: serving(o)["ports"][0].update(name="the-endpoint-of-all"),
        "port name the-endpoint-of-all",
    ),
    "gpus": (
        lambda o: serving(o)["resources"]["requests"].update({"nvidia.com/gpu": 0}),
        "nvidia.com/gpu should have equal request and limit",
    ),
    "rdma": (
        lambda o: serving(o)["resources"]["limits"].pop("rdma/ib"),
        "rdma/ib should have equal request and limit",
    ),
    "quantity": (
        lambda o: serving(o)["resources"]["limits"].update(memory="900 GB"),
        "`900 GB` is no quantity",
    ),
    "name": (
        lambda o: of(o, "NetworkPolicy")["metadata"].update(name="Spark_1"),
        "NetworkPolicy/Spark_1: its name should be at most 63",
    ),
    "long name": (
        lambda o: o[0]["metadata"].update(name="a" * 53),
        "its name should be at most 52",
    ),
    "variable": (
        lambda o: serving(o)["env"].append({"name": "HF_HOME", "value": "/x"}),
        "variable HF_HOME stands there 2 times",
    ),
    "value": (
        lambda o: serving(o)["env"][0].update(value="10.0.0.1"),
        "variable VLLM_HOST_IP has value and valueFrom",
    ),
    "container": (
        lambda o: spec(o)["initContainers"][0].update(name="vllm"),
        "2 containers are called vllm",
    ),
    "host port": (
        lambda o: (
            spec(o).update(hostNetwork=True),
            serving(o)["ports"][0].update(hostPort=1),
        ),
        "hostPort 1 differs from containerPort",
    ),
    "memory volume": (
        lambda o: serving(o)["resources"]["limits"].update(memory="1Gi"),
        "the memory volume shm is larger than the memory limit",
    ),
    "restart policy": (
        lambda o: spec(o).update(restartPolicy="Sometimes"),
        "restartPolicy should be one of Always, OnFailure, Never, not Sometimes",
    ),
    "group's restart policy": (
        lambda o: o[0]["spec"]["leaderWorkerTemplate"].update(restartPolicy="Never"),
        "restartPolicy should be one of Default, RecreateGroupOnPodRestart,"
        " RecreateGroupAfterStart, None, not Never",
    ),
    "probe's name": (
        lambda o: serving(o).update(startUpProbe=serving(o).pop("startupProbe")),
        "startUpProbe should be called startupProbe",
    ),
    "secret": (
        lambda o: spec(o)["volumes"].append({"name": "x", "secret": {"secretName": "nobodys"}}),
        "needs secret/nobodys, which is neither here nor to be provided",
    ),
    "secret of a variable": (
        lambda o: serving(o)["env"].append(
            {"name": "K", "valueFrom": {"secretKeyRef": {"name": "nobodys", "key": "k"}}}
        ),
        "needs secret/nobodys",
    ),
    "claim": (
        lambda o: spec(o)["volumes"].append(
            {"name": "x", "persistentVolumeClaim": {"claimName": "none"}}
        ),
        "needs persistentvolumeclaim/none",
    ),
    "program": (
        lambda o: of(o, "ConfigMap")["data"].pop("head.py"),
        "head.py is not in configmap/spark-payload",
    ),
    "programs": (
        lambda o: of(o, "ConfigMap")["metadata"].update(name="other"),
        "needs configmap/spark-payload",
    ),
    "large": (
        lambda o: of(o, "ConfigMap")["data"].update(more="x" * (1 << 20)),
        "are more than the 1048576 of a ConfigMap",
    ),
    "service": (
        lambda o: replace(o, "Service", selector={"app": "vllm"}),
        "Service/spark-api: it selects none of the pods",
    ),
    "budget": (
        lambda o: replace(o, "PodDisruptionBudget", selector={"matchLabels": {"a": "b"}}),
        "PodDisruptionBudget/spark: it selects none",
    ),
    "policy": (
        lambda o: replace(o, "NetworkPolicy", podSelector={"matchLabels": {"a": "b"}}),
        "NetworkPolicy/spark: it selects none",
    ),
    "monitor": (
        lambda o: replace(o, "PodMonitor", selector={"matchLabels": {"a": "b"}}),
        "PodMonitor/spark: it selects none",
    ),
    "a secret's value": (
        lambda o: o.append({"kind": "Secret", "metadata": {"name": "s"}, "stringData": {"a": "b"}}),
        "Secret/s: a secret's value stands in the text",
    ),
    "a token": (
        lambda o: serving(o)["env"].append({"name": "HF_TOKEN", "value": "hf_" + "a" * 34}),
        "variable HF_TOKEN looks like a secret's value",
    ),
    "an argument": (
        lambda o: serving(o)["args"].append("hf_" + "a" * 34),
        "an argument looks like a secret's value",
    ),
    "links": (
        lambda o: spec(o).pop("enableServiceLinks"),
        "enableServiceLinks should be false",
    ),
    "vllm": (
        lambda o: of(o, "Service")["metadata"].update(name="vllm"),
        "Service/vllm: it sets VLLM_PORT",
    ),
    "order": (
        lambda o: replace(o, "LeaderWorkerSet", startupPolicy="LeaderReady"),
        "startupPolicy should be LeaderCreated",
    ),
    "volume": (
        lambda o: spec(o)["volumes"].append({"name": "shm", "emptyDir": {}}),
        "volume shm stands there 2 times",
    ),
}
JOB: dict[str, Any] = {
    "kind": "RayJob",
    "metadata": {"name": "j"},
    "spec": {"entrypoint": "true", "backoffLimit": 1},
}
# Of other kinds: by which, how it is broken, and what is said.
OF_KINDS: dict[str, tuple[str, Callable[[Objects], Any], str]] = {
    "an old Ray": (
        "kuberay",
        lambda o: ray(o).update(rayVersion="2.52.1"),
        "rayVersion should be 2.53 or newer, not `2.52.1`",
    ),
    "no token": (
        "kuberay",
        lambda o: ray(o).pop("authOptions"),
        "authOptions.mode should be token",
    ),
    "no number of pods": (
        "kuberay",
        lambda o: ray(o)["workerGroupSpecs"][0].pop("maxReplicas"),
        "worker group node-1: should have minReplicas and maxReplicas",
    ),
    "nothing to run": (
        "kuberay",
        lambda o: replace(o, "RayJob", entrypoint=""),
        "its entrypoint is empty",
    ),
    "no cluster": (
        "kuberay",
        lambda o: o.append(JOB),
        "RayJob/j: should have rayClusterSpec or clusterSelector",
    ),
    "a retry elsewhere": (
        "kuberay",
        lambda o: o.append({**JOB, "spec": {**JOB["spec"], "clusterSelector": {"a": "b"}}}),
        "RayJob/j: backoffLimit should be 0 with clusterSelector",
    ),
    "a budget that nobody can count": (
        "kuberay",
        lambda o: of(o, "PodDisruptionBudget").update(
            spec={
                "maxUnavailable": 0,
                "selector": of(o, "PodDisruptionBudget")["spec"]["selector"],
            }
        ),
        "PodDisruptionBudget/spark: should have minAvailable, a number",
    ),
    "a worker's mount": (
        "kuberay",
        lambda o: ray(o)["workerGroupSpecs"][0]["template"]["spec"]["containers"][0][
            "volumeMounts"
        ].append({"name": "gone", "mountPath": "/x"}),
        "RayJob/spark worker vllm: mounts gone",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_has_no_mistake(kind: str) -> None:
    """Of any kind."""
    assert kubernetes_rules.mistakes(exported(kind)) == []


@pytest.mark.parametrize("name", OF_KINDS)
def test_each_mistake_of_a_kind_is_seen(name: str) -> None:
    """By the rule that is for it."""
    kind, make, said = OF_KINDS[name]
    broken = exported(kind)
    make(broken)
    found = kubernetes_rules.mistakes(broken)

    assert len([each for each in found if said in each]) == 1, found
    assert len(found) == 1, found


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_seen(good: Objects, name: str) -> None:
    """By the rule that is for it, and by few others."""
    make, said = MISTAKES[name]
    make(good)
    found = kubernetes_rules.mistakes(good)

    assert any(said in each for each in found), found
    assert len(found) <= 3, found


def test_a_worker_is_looked_at_as_well(good: Objects) -> None:
    """Not only the first pod."""
    template(good, "workerTemplate")["spec"]["containers"][0]["volumeMounts"][0]["name"] = "x"

    assert kubernetes_rules.mistakes(good) == [
        "LeaderWorkerSet/spark workerTemplate vllm: mounts x, which is no volume of the pod"
    ]


def test_pods_of_all_kinds_are_looked_at() -> None:
    """Those of Ray's operator, of jobs, and bare ones."""
    pod = {"spec": {"containers": [{"name": "c", "volumeMounts": [{"name": "x"}]}]}}
    ray = {"headGroupSpec": {"template": pod}, "workerGroupSpecs": [{"template": pod}]}
    kinds = {
        "Pod": pod["spec"],
        "Job": {"template": pod},
        "RayCluster": ray,
        "RayJob": {"rayClusterSpec": ray},
    }
    found = kubernetes_rules.mistakes(
        [{"kind": kind, "metadata": {"name": "n"}, "spec": spec} for kind, spec in kinds.items()]
    )

    assert [each.partition(":")[0] for each in found if "no volume" in each] == [
        "Pod/n c",
        "Job/n c",
        "RayCluster/n head c",
        "RayCluster/n worker c",
        "RayJob/n head c",
        "RayJob/n worker c",
    ]


def test_an_edited_copy_is_judged(
    good: Objects, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By `--check`, with what must be provided as the export says it."""
    file = tmp_path / "edited.yaml"
    file.write_text(yaml.safe_dump_all(good))

    assert run(["export", "kubernetes", "--check", str(file)]) == 0
    assert "6 objects, no mistake" in capsys.readouterr().err
    spec(good)["volumes"].pop()
    file.write_text(yaml.safe_dump_all(good))
    assert run(["export", "kubernetes", "--check", str(file)]) == 1
    said = capsys.readouterr()
    assert (said.out, "2 mistakes" in said.err, "mounts shm" in said.err) == ("", True, True)


def test_a_folder_is_judged_as_a_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `-o` writes it; one file of it lacks what the others have, and its hint says so."""
    folder = tmp_path / "out"
    words = (*CASES["spark"][1], "-o", str(folder))
    assert run(["export", "kubernetes", "-i", str(inventory("spark")), *words]) == 0
    capsys.readouterr()

    assert run(["export", "kubernetes", "--check", str(folder)]) == 0
    assert "6 objects, no mistake; what schemas see: " in capsys.readouterr().err
    assert run(["export", "kubernetes", "--check", str(folder / "service-spark-api.yaml")]) == 1
    assert f"`vlaunch export kubernetes --check {folder}`" in capsys.readouterr().err
    (folder / "service-spark-api.yaml").write_text("kind: [")
    assert run(["export", "kubernetes", "--check", str(folder)]) == 2
    assert "service-spark-api.yaml cannot be read" in capsys.readouterr().err


def test_an_inventory_is_no_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    """Nor anything else without a kind."""
    assert run(["export", "kubernetes", "--check", str(inventory("spark"))]) == 2
    assert "dgx-spark.yaml is no manifest of Kubernetes" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["a: [", "", "- 1", None])
def test_what_holds_no_objects_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    """No YAML, nothing, other things, and no file."""
    file = tmp_path / "file.yaml"
    if text is not None:
        file.write_text(text)

    assert run(["export", "kubernetes", "--check", str(file)]) == 2
    assert str(file) in capsys.readouterr().err
