"""Examples of docs/how-to/kubernetes.md: its commands export its inventories; its patch fits."""

from __future__ import annotations

import copy
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher.cli.main import run_command
from tests.export.exports import objects
from tests.export.kubernetes_export import argv

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how-to" / "kubernetes.md").read_text(encoding="utf-8")
BLOCKS = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.M | re.S)]
LINES = re.findall(r"^vlaunch (.* -i .*?)(?: >\S+)?$", PAGE, re.M)
Objects = list[dict[str, Any]]


def exported(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> Objects:
    """Return the output of the page's command for one of its inventories."""
    (inventory,) = [block for block in BLOCKS if block.get("cluster") == name]
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(inventory))
    (line,) = [item for item in LINES if f"-i {name}.yaml" in item]
    parts = shlex.split(line.replace(f"{name}.yaml", str(folder / f"{name}.yaml")))

    assert run_command(parts) == 0
    return objects(capsys.readouterr().out)


def pods(result: Objects) -> list[Any]:
    """Return the specs of the first pod and of the others."""
    group = result[0]["spec"]["leaderWorkerTemplate"]
    return [group[f"{item}Template"]["spec"] for item in ("leader", "worker")]


def test_the_smallest_inventory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two pods of eight GPUs; its fictional names and addresses are not used."""
    export = exported("llm", tmp_path, capsys)

    assert export[0]["spec"]["leaderWorkerTemplate"]["size"] == 2
    assert export[0]["metadata"]["namespace"] == "llm"
    limits = [pod["containers"][0]["resources"]["limits"] for pod in pods(export)]
    assert limits == [{"nvidia.com/gpu": 8, "rdma/ib": 1}] * 2
    assert not [name for name in ("gpu01", "gpu02", "10.0.0.") if name in str(export)]


def test_two_idle_pods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One GPU per pod, with tensor parallelism; the claim is mounted at the model's path."""
    export = exported("qwen", tmp_path, capsys)

    for spec in pods(export):
        (container,) = spec["containers"]
        args = argv(container)
        assert args[args.index("--tensor-parallel-size") + 1] == "2"
        assert args[args.index("--served-model-name") + 1] == "qwen"
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 1}
        at = {"name": "model", "mountPath": "/mnt/models", "readOnly": True}
        assert at in container["volumeMounts"]


def test_the_patch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It changes both templates as documented, and no other field."""
    (overlay,) = [block for block in BLOCKS if "patches" in block]
    (patch,) = overlay["patches"]
    (before,) = [
        item
        for item in exported("llm", tmp_path, capsys)
        if item["kind"] == patch["target"]["kind"]
    ]
    after = copy.deepcopy(before)
    for element in yaml.safe_load(patch["patch"]):
        *direction, last = element["path"].strip("/").split("/")
        at = after
        for key in direction:
            at = at[key]
        assert (element["op"], last in at) == ("add", False)
        at[last] = element["value"]

    assert [spec.pop("imagePullSecrets") for spec in pods([after])] == [[{"name": "registry"}]] * 2
    assert after == before
