"""A run of `vlaunch export kubernetes`, for tests of its kinds."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import run_command
from tests.export.exports import objects

PAIR = """
cluster: pair
image: vllm/vllm-openai:v0.32.0
secrets: {VLLM_API_KEY: {env: THE_KEY}, HF_TOKEN: {file: ~/hf}}
network: {interface: bond0, fabric: infiniband, hca: [mlx5_0]}
env: {NCCL_DEBUG_SUBSYS: "$(ALL)"}
mounts: ["/models:/models:ro"]
serve: {model: org/m, args: [--seed, "1"], restarts: 3, stuck: 120}
nodes:
  - {host: "gpu[01-02]", ip: "10.0.0.[1-2]", gpus: 8}
"""


class Export:
    """Output of one run."""

    def __init__(self, capsys: pytest.CaptureFixture[str], path: Path, *args: str) -> None:
        self.code = run_command(["export", "kubernetes", "-i", str(path), *args])
        caught = capsys.readouterr()
        self.text, self.error = caught.out, caught.err
        self.objects = objects(self.text)

    def of(self, kind: str) -> dict[str, Any]:
        """Return the only object of a kind."""
        (results,) = [item for item in self.objects if item["kind"] == kind]
        return results

    @property
    def group(self) -> dict[str, Any]:
        """The templates of the LeaderWorkerSet."""
        result: dict[str, Any] = self.of("LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
        return result

    def container(self, template: str = "leaderTemplate") -> dict[str, Any]:
        """Return the serving container."""
        (result,) = self.group[template]["spec"]["containers"]
        return dict(result)

    def argv(self, template: str = "leaderTemplate") -> list[str]:
        """Return the command after `exec`, split as in a shell."""
        return argv(self.container(template))


def argv(container: dict[str, Any]) -> list[str]:
    """Return a container's command, split as in a shell."""
    (script,) = container["args"]
    return shlex.split(script.replace("\\\n", " ").replace("$$", "$"))


def split(parts: list[str]) -> tuple[list[str], list[str]]:
    """Return a command's network check and its final command."""
    at = parts.index("--")
    return parts[:at], parts[at + 1 :]


def env(container: dict[str, Any]) -> dict[str, str]:
    """Return a container's variables with literal values."""
    return {item["name"]: item["value"] for item in container["env"] if "value" in item}


def shown(text: str) -> str:
    """Return an export without the programs, which change with every fix."""
    return re.sub(r"(  \w+\.pyz): .*", r"\1: …", text)
