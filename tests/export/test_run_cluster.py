"""`vlaunch export run-cluster`: what to type by hand, and what cannot be done that way."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launcher.cli.main import run
from tests import golden

SHELLCHECK = Path(__file__).parents[2] / ".venv" / "bin" / "shellcheck"
INVENTORY = """
cluster: pair
image: vllm/vllm-openai:v0.32.0
secrets: {VLLM_API_KEY: {env: THE_KEY}, HF_TOKEN: {env: HF}}
network: {interface: bond0, fabric: infiniband, hca: [mlx5_0]}
ports: {gcs: 7001}
docker: [sudo, -n, docker]
env: {NCCL_DEBUG: INFO}
serve: {model: org/m, args: [--seed, "1"]}
nodes:
  - {host: "gpu[01-02]", ip: "10.0.0.[1-2]", gpus: 8}
"""


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    """A file with everything that the lines can say."""
    path = tmp_path / "inventory.yaml"
    path.write_text(INVENTORY, encoding="utf-8")
    return path


@pytest.mark.processes
def test_golden(inventory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No secret, no node asked, and a shell that reads it finds nothing amiss."""
    assert run(["export", "run-cluster", str(inventory)]) == 0
    text = capsys.readouterr().out
    golden.check(Path(__file__).parent / "golden" / "run-cluster.sh", text)
    checked = subprocess.run(
        [SHELLCHECK, "--shell=bash", "--severity=warning", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.stdout == ""


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("gpus: 8", "gpus: [4, 5]", "gpu01, gpu02: the script cannot choose GPUs"),
        ("cluster: pair", "cluster: pair\nray: none", "`ray: none`: the script starts Ray"),
        ("model: org/m, ", "", "no model is named"),
    ],
)
def test_what_cannot_be_done_is_refused(
    inventory: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, said: str
) -> None:
    """With what can."""
    inventory.write_text(INVENTORY.replace(old, new))
    assert run(["export", "run-cluster", str(inventory)]) == 2
    caught = capsys.readouterr()
    assert (caught.out, said in caught.err) == ("", True)
    assert "hint:" in caught.err
