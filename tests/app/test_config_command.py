"""`vlaunch config`: the inventory in full."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from launcher.app.config_command import resolve_inventory
from launcher.cli.main import run_command
from launcher.inventory.load import load, loads

ROOT = Path(__file__).parents[2]
INVENTORIES = sorted([*ROOT.glob("tests/plan_cases/*/*.yaml"), *ROOT.glob("inventory/*.yaml")])


@pytest.mark.parametrize("path", INVENTORIES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_the_output_is_an_inventory_with_the_same_meaning(path: Path) -> None:
    """With all defaults, expanded ranges, and cluster-wide values on every node."""
    inventory = load(path)

    assert loads(yaml.safe_dump(resolve_inventory(inventory), sort_keys=False), path) == inventory


def test_yaml_and_json_have_the_same_values(capsys: pytest.CaptureFixture[str]) -> None:
    """Ranges are expanded, with cluster-wide values."""
    path = str(ROOT / "inventory" / "h100-infiniband.yaml")
    assert run_command(["config", "-i", path]) == 0
    document = yaml.safe_load(capsys.readouterr().out)
    assert run_command(["config", "-i", path, "--json"]) == 0

    assert json.loads(capsys.readouterr().out) == document
    assert document["network"]["fabric"] == "infiniband"
    assert {node["hf_home"] for node in document["nodes"]} == {"/data/huggingface"}


def test_mistakes_are_shown_with_exit_code_two(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As every command shows them."""
    path = tmp_path / "inventory.yaml"
    path.write_text("cluster: demo\nimage: vllm/vllm-openai:v0.32.0\nnodes: []\n")

    assert run_command(["config", "-i", str(path)]) == 2
    assert "nodes" in capsys.readouterr().err


def test_only_sources_of_secrets_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of variables, files and commands."""
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    path = tmp_path / "inventory.yaml"
    path.write_text(
        "cluster: demo\nimage: vllm/vllm-openai:v0.32.0\nsecrets: {HF_TOKEN: {env: HF_TOKEN}}\n"
        "nodes: [{host: 10.0.0.1, gpus: 1}]\n"
    )

    assert run_command(["config", "-i", str(path)]) == 0
    out = capsys.readouterr().out
    assert yaml.safe_load(out)["secrets"] == {"HF_TOKEN": {"env": "HF_TOKEN"}}
    assert "hf_abcdefghijklmnop" not in out
