"""`vlaunch plan`: from files and flags, and from simulated nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import golden
from tests.command_line import Cluster
from tests.planner import models

GOLDEN = Path(__file__).parent / "golden"
H100 = ["--gpu", "H100", "--nvlink"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration of a mixture of experts."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(models.QWEN_235B))
    return path


def big(config: Path, *args: str) -> list[str]:
    """The command line for the model of 236 GB."""
    return ["plan", "--config", str(config), "--weights-bytes", "236000000000", *args]


@pytest.mark.parametrize(
    ("name", "code", "args"),
    [
        ("fits", 0, [*H100, "--nodes", "2", "--rdma", "--context", "32K", "--concurrency", "40"]),
        ("tight", 3, [*H100, "--context", "32K", "--concurrency", "8", "--tp", "4", "--dp", "1"]),
        ("does-not-fit", 1, ["--gpu", "L40S", "--gpus-per-node", "4"]),
        ("explained", 0, [*H100, "--context", "8K", "--tp", "8", "--explain", "--", "-ep"]),
    ],
)
def test_golden(cluster: Cluster, config: Path, name: str, code: int, args: list[str]) -> None:
    """The text output and the exit code match the golden files."""
    ran = cluster.run(*big(config, *args))
    assert ran.code == code, ran.err
    golden.check(GOLDEN / f"plan-{name}.txt", ran.out.replace(str(config), "config.json"))


def test_json_has_every_field(cluster: Cluster, config: Path) -> None:
    """Verdict, layout, placement, ranges, reasons with sources, and three alternatives."""
    ran = cluster.run(*big(config, *H100, "--nodes", "2", "--concurrency", "8", "--json"))
    data = json.loads(ran.out)
    assert data["verdict"] == "fits"
    assert data["split"]["nodes"][0]["name"] == "node01"
    assert data["weights_gib"]["low"] < data["weights_gib"]["high"]
    assert all(reason["source"] for reason in data["why"])
    assert len(data["alternatives"]) >= 3
    assert {"change", "better", "verdict", "split", "kv_tokens"} <= set(data["alternatives"][0])


def test_a_folder_is_a_model(cluster: Cluster, tmp_path: Path) -> None:
    """Its safetensors are counted."""
    (tmp_path / "config.json").write_text(json.dumps(models.LLAMA_8B))
    with (tmp_path / "model-1.safetensors").open("wb") as file:
        file.truncate(16_060_556_376)
    ran = cluster.run("plan", "--model", str(tmp_path), *H100, "--gpus-per-node", "1")
    assert ran.code == 0, ran.err
    assert "15.0 GiB of weights" in ran.out


def test_nodes_are_queried(cluster: Cluster) -> None:
    """Without a named GPU, the inventory's nodes report theirs, and the model."""
    for machine in cluster.world.machines.values():
        machine.config = models.LLAMA_8B
        machine.model = {"model.safetensors": 16_060_556_376, "config.json": 700}
    ran = cluster.run("plan", "--model", "meta/llama", "--context", "8192")
    assert ran.code == 0, ran.err
    assert "gpu[01-02]: 8 × NVIDIA H100 80GB HBM3 (79.2 GiB) each" in ran.out
    assert not cluster.world.changes


def test_offline_the_inventory_has_the_number_of_gpus(cluster: Cluster, config: Path) -> None:
    """The flag has the GPU model; no node is queried."""
    ran = cluster.run(*big(config, "--no-nodes", "--gpu", "H100", "--context", "8K"))
    assert ran.code == 0, ran.err
    assert "gpu[01-02]: 8 × H100" in ran.out
    assert cluster.fleet_options == []


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["plan"], "no model given"),
        (["plan", "--model", "meta/llama"], "no node has a complete copy of meta/llama"),
        (
            ["plan", "--model", "meta/llama", "--gpu", "H100"],
            "model meta/llama is not on this machine",
        ),
        (["plan", "--gpu", "H100"], "no model given"),
    ],
)
def test_missing_data_are_reported(cluster: Cluster, args: list[str], message: str) -> None:
    """With a remedy."""
    ran = cluster.run(*args)
    assert ran.code == 2
    assert message in ran.err
    assert "hint:" in ran.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([*H100, "--tp", "3"], "TP 3 cannot run: 64 attention heads cannot be divided by TP 3"),
        ([*H100, "--tp", "8", "--pp", "2"], "TP 8 × PP 2 cannot run: experts 1536 wide"),
        ([*H100, "--tp", "4", "--pp", "4"], "TP 4 × PP 4 takes 16 GPUs; there are 8"),
        (["--gpu", "Cray"], "unknown memory size of Cray"),
        ([*H100, "--context", "many"], "--context many: not a number of tokens"),
        ([*H100, "--", "--kv-cache-dtype", "odd"], "unknown KV cache dtype odd"),
    ],
)
def test_impossible_requests_are_rejected(
    cluster: Cluster, config: Path, args: list[str], message: str
) -> None:
    """Before any calculation."""
    ran = cluster.run(*big(config, *args))
    assert ran.code == 2
    assert message in ran.err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cannot be read"),
        ("[]", "it is not a JSON object"),
        ("{" * 100_000, "cannot be read"),
        (
            json.dumps({**models.LLAMA_8B, "hidden_size": -5}),
            "invalid values in the model's config.json",
        ),
        (
            json.dumps({**models.LLAMA_8B, "num_hidden_layers": 10**5}),
            "invalid values in the model's config.json",
        ),
    ],
)
def test_hostile_files_are_a_single_error(
    cluster: Cluster, tmp_path: Path, text: str, message: str
) -> None:
    """No traceback, and no plan."""
    path = tmp_path / "odd.json"
    path.write_text(text)
    ran = cluster.run("plan", "--config", str(path), "--weights-bytes", "1000", *H100)
    assert ran.code == 2
    assert message in ran.err
    assert ran.out == ""


def test_a_new_architecture_has_its_weights_judged(cluster: Cluster, tmp_path: Path) -> None:
    """Without further claims."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**models.LLAMA_8B, "architectures": ["NewForCausalLM"]}))
    args = ("plan", "--config", str(path), "--weights-bytes", "16000000000", *H100)
    ran = cluster.run(*args)
    assert ran.code == 3
    assert "the architecture NewForCausalLM is not modelled; only its weights are judged" in ran.out
    data = json.loads(cluster.run(*args, "--json").out)
    assert data["basis"] == "weights-only"
    assert data["kv_tokens"] is None
