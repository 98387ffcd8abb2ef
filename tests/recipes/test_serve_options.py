"""`vlaunch serve --recipe` and `--command` on the sample inventories, and `vlaunch recipes`."""

from __future__ import annotations

import io
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from launcher.cli.main import run_command
from launcher.recipes import serve_options
from tests import golden
from tests.command_line import Cluster
from tests.planner import models
from tests.recipes import case

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
PASTED = """
NCCL_SOCKET_IFNAME=eth9 VLLM_USE_V1=1 vllm serve Qwen/Qwen3-32B --host 127.0.0.1 --port 9000 \\
  --tensor-parallel-size 16 --distributed-executor-backend mp --nnodes 2 --max-model-len 32768
"""


def serve(*arguments: str, inventory: str = "h100-infiniband") -> int:
    """Dry-run `serve` on the cluster of a sample inventory."""
    path = str(ROOT / "inventory" / f"{inventory}.yaml")
    return run_command(["serve", "-i", path, "--dry-run", "--offline", *arguments])


def started_server(script: str) -> dict[str, Any]:
    """Return the server in a script."""
    (line,) = [line for line in script.splitlines() if '"processes"' in line]
    encoded = shlex.split(line.replace('"$(date +%s)"', "0"))[2]
    server: dict[str, Any] = json.loads(encoded)
    return server


def summarize(script: str) -> str:
    """Return a script's notes and, per process, its own variables and its command."""
    lines = re.findall(r"^# note: .*", script, re.MULTILINE)
    server = started_server(script)
    for process in server["processes"]:
        env = server["asked_for"].get("env", {})
        assignments = [f"{name}={value}" for name, value in env.items()]
        lines.append(f"{process['node']}: {' '.join([*assignments, shlex.join(process['argv'])])}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("name", "inventory", "arguments"),
    [
        ("deepseek", "h100-infiniband", ["deepseek-ai/DeepSeek-V3", "--hardware", "h200"]),
        (
            "qwen",
            "h100-infiniband",
            ["Qwen/Qwen3-235B-A22B-Instruct-2507", "--variant", "fp8", "--hardware", "h100"],
        ),
        ("gpt-oss", "amd", ["openai/gpt-oss-120b"]),
        (
            "features",
            "gb200",
            ["openai/gpt-oss-120b", "--feature=spec_decoding", "--feature=tool_calling=off"],
        ),
        ("split", "h100-infiniband", ["inclusionAI/Ling-2.6-flash", "--tp", "16", "--pp", "1"]),
    ],
)
def test_recipes(
    name: str, inventory: str, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The resulting command, and the notes."""
    assert serve("--recipe", *arguments, inventory=inventory) == 0
    golden.check(GOLDEN / f"recipe-{name}.txt", summarize(capsys.readouterr().out))


@pytest.mark.parametrize("stdin", [False, True])
def test_a_pasted_command(
    stdin: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Conflicting options are dropped, with their replacements."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(PASTED))

    assert serve("--command", "-" if stdin else PASTED) == 0
    golden.check(GOLDEN / "recipe-pasted.txt", summarize(capsys.readouterr().out))


def test_flags_replace_dropped_options(capsys: pytest.CaptureFixture[str]) -> None:
    """The model, the sizes, the address, and arguments after `--`."""
    arguments = [
        "--model",
        "/data/m",
        "--backend",
        "mp",
        "--tp",
        "4",
        "--pp",
        "2",
        "--port",
        "9000",
    ]

    assert serve("--command", PASTED, *arguments, "--", "--max-model-len=8") == 0
    out = capsys.readouterr().out

    assert "dropped `--tensor-parallel-size 16` (vlaunch sets TP 4 × PP 2)" in out
    assert "dropped `--port 9000` (vlaunch sets 9000)" in out
    assert "`--max-model-len=8` replaces `--max-model-len 32768`" in out
    argv = started_server(out)["processes"][0]["argv"]
    assert argv[:4] == ["vllm", "serve", "/data/m", "--max-model-len=8"]


def test_replicas_keep_their_load_balancing(capsys: pytest.CaptureFixture[str]) -> None:
    """With `--dp`, a pasted option for it stays."""
    text = "vllm serve m -dp 8 --data-parallel-hybrid-lb"

    assert serve("--command", text, "--dp", "2", "--backend", "mp") == 0
    out = capsys.readouterr().out
    assert "dropped `-dp 8` (vlaunch sets DP 2 × TP 8 × PP 1)" in out
    assert "--data-parallel-hybrid-lb" in started_server(out)["processes"][0]["argv"]


def test_a_part_of_the_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    """Their memory counts for the variant."""
    arguments = ["--recipe", "deepseek-ai/DeepSeek-V3", "--hardware", "h100"]

    assert serve(*arguments) == 0
    assert serve(*arguments, "--nodes", "gpu01", "--backend", "mp") == 2
    assert "variant default needs 805 GB, the GPUs have 640 GB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--variant", "fp8"], "--variant, --hardware and --feature go with --recipe"),
        (["--command", "vllm serve m", "--feature", "x"], "go with --recipe"),
        (["--recipe", "x", "--command", "vllm serve m"], "exclude each other"),
        (["--recipe", "openai/gpt-oss"], "did you mean `openai/gpt-oss-20b`?"),
        (
            ["--recipe", "openai/gpt-oss-20b", "--hardware", "mi300x"],
            "no recipe has hardware `mi300x`",
        ),
        (["--command", "ls"], "the pasted command cannot be used"),
        (["--command", "vllm serve m --seed $S"], "contains the shell's `$S`"),
        (["--command", "vllm serve m --api-key k"], "add `secrets: {VLLM_API_KEY:"),
    ],
)
def test_invalid_requests(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rejected before any contact with a node."""
    assert serve(*arguments) == 2
    assert text in capsys.readouterr().err


def test_secrets_of_a_pasted_command_are_not_shown(
    up: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not in the script, not in the audit log, not on the nodes."""
    text = "HF_TOKEN=secret-of-mine vllm serve acme/model"

    ran = up.run("serve", "--command", text, "--skip-network-check", "--no-wait", "--json")

    assert ran.code == 0, ran.err
    files = [str(machine.files) for machine in up.world.machines.values()]
    assert "secret-of-mine" not in "".join([ran.out, ran.err, *files])


def test_nodes_report_the_hardware(up: Cluster) -> None:
    """By the name of their GPUs; the variables reach the server's processes."""
    ran = up.run("serve", "--recipe", str(case.FILE), "--skip-network-check", "--no-wait", "--json")

    assert ran.code == 0, ran.err
    server = json.loads(up.world.machines["gpu01"].files["server/default/desired.json"])
    assert server["asked_for"]["env"] == {"ACME_BASE": "1", "ACME_LAYER": "hopper"}
    assert server["processes"][0]["env"]["ACME_LAYER"] == "hopper"
    texts = [event.get("text", "") for event in ran.events]
    assert any("variant default on h100" in text for text in texts)


def test_the_plan_may_choose_the_sizes(up: Cluster) -> None:
    """As for any server; the note does not name others."""
    for machine in up.world.machines.values():
        machine.config = models.LLAMA_8B
        machine.model = {"model.safetensors": 16_060_556_376, "config.json": 700}
    text = "vllm serve acme/Dense-8B -tp 2"
    ran = up.run("serve", "--command", text, "--plan", "auto", "--dry-run", "--skip-network-check")

    assert ran.code == 0, ran.err
    assert "dropped `-tp 2` (vlaunch sets the sizes of the plan)" in ran.out


@pytest.mark.parametrize(
    ("terms", "names"),
    [
        (["gpt-oss"], ["openai/gpt-oss-120b", "openai/gpt-oss-20b"]),
        (["OPENAI", "whisper"], ["openai/whisper-large-v3"]),
        (["qwen/qwen3-235b-a22b-fp8"], ["Qwen/Qwen3-235B-A22B-Instruct-2507"]),
        (["no-such-word"], []),
    ],
)
def test_a_list_is_filtered(
    terms: list[str], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By all terms, in any part of a recipe."""
    assert run_command(["recipes", "list", "--json", *terms]) == 0
    assert json.loads(capsys.readouterr().out)["recipes"] == names
    assert run_command(["recipes", "list", *terms]) == 0
    ran = capsys.readouterr()
    assert [line.split()[0] for line in ran.out.splitlines()] == names
    assert f"{len(names)} of 187 recipes from vLLM 0.33.0" in ran.err


def test_recipes_with_the_term_in_their_name_come_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before those with the term in an argument, such as the name of a parser."""
    assert run_command(["recipes", "list", "--json", "qwen"]) == 0
    named = ["qwen" in name.lower() for name in json.loads(capsys.readouterr().out)["recipes"]]

    assert named == sorted(named, reverse=True)
    assert set(named) == {True, False}


def test_a_recipe_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """A packaged one with its source, a file by its name."""
    assert run_command(["recipes", "show", "openai/gpt-oss-20b"]) == 0
    assert capsys.readouterr().out.startswith("# vLLM 0.33.0\n")
    assert run_command(["recipes", "show", str(case.FILE)]) == 0
    assert capsys.readouterr().out.startswith(f"# {case.FILE}\nmeta:\n  title: Dense 8B\n")
    assert run_command(["recipes", "show", "none"]) == 2


def test_names_are_completed() -> None:
    """As called by a shell."""
    context, parameter = click.Context(click.Command("x")), click.Argument(["name"])
    completions = serve_options.complete_recipes(context, parameter, "OPENAI/g")

    assert [item.value for item in completions] == ["openai/gpt-oss-120b", "openai/gpt-oss-20b"]
