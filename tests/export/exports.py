"""The example inventories in all exports."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).parents[2] / "inventory"
MODEL = "Qwen/Qwen3-8B"
RDMA = ("--rdma-resource", "rdma/ib")
# By name: the inventory and the options; all kinds of hardware, parallelism and replicas.
CASES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "h100": ("h100-infiniband", ("--model", MODEL, *RDMA)),
    "h100-host-network": ("h100-infiniband", ("--model", MODEL, *RDMA, "--host-network")),
    "h100-replicas": ("h100-infiniband", ("--model", MODEL, *RDMA, "--dp", "4", "--tp", "4")),
    "roce": (
        "roce",
        ("--model", MODEL, "--rdma-resource", "rdma/hca=2", "--model-volume", "pvc:models"),
    ),
    "roce-replicas": ("roce", ("--model", MODEL, *RDMA, "--dp", "8", "--tp", "4")),
    "amd": ("amd", ("--model", MODEL, *RDMA, "--memory", "900GiB", "--cpus", "64")),
    "spark": ("dgx-spark", ("--model", MODEL, *RDMA)),
    "workstation": ("single-node", ()),
    "cpu": ("cpu", ()),
    "seed": (
        "cpu",
        ("--model", "/mnt/models/Qwen-14B-Chat", "--model-volume", "pvc:llm-model:/qwen"),
    ),
}

# Kinds of exports.
KINDS: Mapping[str, tuple[str, ...]] = {
    "lws": (),
    "kuberay": ("--kind", "kuberay"),
}


def cases(kind: str) -> list[str]:
    """Return the cases of a kind: Ray places no replicas in pods."""
    ray = "ray" in kind
    return [case for case in CASES if not (ray and "replicas" in case)]


PAIRS = [(kind, case) for kind in KINDS for case in cases(kind)]


def inventory(case: str) -> Path:
    """Return the inventory of a case."""
    return EXAMPLES / f"{CASES[case][0]}.yaml"


def objects(text: str) -> list[dict[str, Any]]:
    """Return the documents of an export; libyaml is ten times as fast as PyYAML's parser."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return list(yaml.load_all(text, Loader=loader))


# The same for exported batch jobs.
JOB_CASES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "h100": ("h100-infiniband", RDMA),
    "roce": ("roce", ("--rdma-resource", "rdma/hca=2", "--model-volume", "pvc:models")),
    "amd": ("amd", (*RDMA, "--host-network")),
    "spark": ("dgx-spark", (*RDMA, "--memory", "100GiB")),
    "workstation": ("single-node", ()),
    "cpu": ("cpu", ("--image", "registry.example/vllm-ray:1")),
}


def job(folder: Path, case: str) -> list[str]:
    """Write a job into a folder; return the arguments that export it."""
    (folder / "prompts.jsonl").write_text('{"prompt": "eins"}\n')
    file = folder / "job.yaml"
    file.write_text(f"model: {MODEL}\nread: prompts.jsonl\nwrite: {{path: s3://bucket/answers}}\n")
    name, flags = JOB_CASES[case]
    at = ("-i", str(EXAMPLES / f"{name}.yaml"))
    return ["export", "batch", str(file), *at, *flags]
