"""The command line of `serve` without a node: usage, and the script of a dry run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launcher.cli.main import run_command

INVENTORY = """
cluster: pair
image: vllm/vllm-openai:v0.32.0
secrets: {VLLM_API_KEY: {env: THE_KEY}}
serve: {model: org/m, tp: 4, pp: 4, args: [--seed, "1"]}
nodes:
  - {host: "gpu[01-02]", ip: "10.0.0.[1-2]", gpus: 8}
"""


SECRET = "hf_abcdefghijklmnopqrstuvwx"


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("THE_KEY", "sk-very-secret")
    path = tmp_path / "inventory.yaml"
    path.write_text(INVENTORY, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["other.yaml"], "pass the inventory with -i"),
        (["--max-model-len", "8"], "vLLM's own options go after `--`"),
        (["--offline"], "--offline requires --dry-run"),
        (["--bind", "eth0"], "--bind should be an IP address"),
        (["--", "-tp", "2"], "`-tp`: use vlaunch's `--tp`"),
        (["--", "--tensor-parallel", "3"], "`--tensor-parallel`: use vlaunch's `--tp`"),
        (["--", "--hf-token", SECRET], "`--hf-token`: use HF_TOKEN under `secrets:`"),
        (
            ["--", "--seed", "1", f"--override={SECRET}"],
            "argument 3 after `--` looks like a secret",
        ),
        (["--dry-run", "--offline", "--tp", "32"], "needs 32 GPUs, the cluster has 16"),
        (["--data-parallel-size", "0"], "0 is not in the range 1<=x<=1024"),
        (
            ["--", "--data-parallel-size", "2"],
            "`--data-parallel-size`: use vlaunch's `--data-parallel-size`",
        ),
        (["--", "-dpl", "2"], "`-dpl`: use vlaunch's `--data-parallel-size`"),
        (
            ["--dry-run", "--offline", "--dp", "3"],
            "16 GPUs cannot be divided equally between 3 replicas",
        ),
        (["--dry-run", "--offline", "--backend", "mp", "--tp", "16", "--pp", "2"], "needs 32 GPUs"),
        (
            ["--name", "Chat"],
            "--name should be at most 32 lower-case letters, digits and `-`, not `Chat`",
        ),
        (["--name", "../x"], "--name should be"),
        (["--nodes", "gpu[02-01]"], "--nodes should have its ranges count upwards"),
        (["--backend", "mp", "--nodes", "gpu[01-03]"], "no node `gpu03` in this cluster"),
        (["--backend", "mp", "--gpus", "9"], "gpu01 has 8 GPUs, not 9"),
        (["--backend", "mp", "--nodes", "gpu02", "--tp", "16"], "needs 16 GPUs, the cluster has 8"),
    ],
)
def test_invalid_requests(
    inventory: str, args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, a message, and no contact with a node."""
    code = run_command(["serve", "-i", inventory, *args])
    out, err = capsys.readouterr()

    assert (code, out) == (2, "")
    assert message in err
    assert SECRET not in err


def test_a_path_with_a_prefix_of_secrets(
    inventory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`task-…` ends in the prefix `sk-`."""
    template = ("--chat-template", "/data/task-specific-chat-template.jinja")
    code = run_command(["serve", "-i", inventory, "--dry-run", "--offline", "--", *template])

    assert code == 0
    assert template[1] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "file", "supervised"),
    [
        ((), "", True),
        (("--no-supervise",), "", False),
        ((), "supervise: false, ", False),
        ((), "restarts: 7, canary: 2.5, stuck: 60, ", True),
    ],
)
def test_a_server_is_supervised(
    inventory: str,
    args: tuple[str, ...],
    file: str,
    supervised: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Unless the command line or the inventory disables it; the inventory sets the limits."""
    path = Path(inventory)
    path.write_text(INVENTORY.replace("serve: {", f"serve: {{{file}"), encoding="utf-8")
    code = run_command(["serve", "-i", inventory, "--dry-run", "--offline", *args])
    text = capsys.readouterr().out

    assert code == 0
    assert ('"restarts": 0' in text) is not supervised
    assert ('"canary": 2.5, "stuck": 60.0, "restarts": 7' in text) is ("restarts" in file)
    assert ('"canary": 5.0, "stuck": 360.0, "restarts": null' in text) is (supervised and not file)


@pytest.mark.parametrize(
    ("file", "args", "seconds"),
    [
        ("", (), "1800.0"),
        ("timeout: 3600, ", (), "3600.0"),
        ("timeout: 3600, ", ("--timeout", "77"), "77.0"),
    ],
)
def test_timeout_of_a_start(
    inventory: str,
    file: str,
    args: tuple[str, ...],
    seconds: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Half an hour, or the inventory's value; the flag overrides both."""
    path = Path(inventory)
    path.write_text(INVENTORY.replace("serve: {", f"serve: {{{file}"), encoding="utf-8")
    code = run_command(["serve", "-i", inventory, "--dry-run", "--offline", *args])

    assert code == 0
    assert f'"start_timeout": {seconds}' in capsys.readouterr().out


@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_an_offline_script(
    inventory: str, backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is valid bash, names secrets by source, and has the inventory's defaults."""
    code = run_command(
        [
            "serve",
            "-i",
            inventory,
            "--dry-run",
            "--offline",
            "--backend",
            backend,
            "--",
            "--max-model-len",
            "4096",
        ]
    )
    text = capsys.readouterr().out
    script = tmp_path / "script.sh"
    script.write_text(text, encoding="utf-8")

    assert code == 0
    assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    assert "sk-very-secret" not in text
    for argument in ("org/m", "--seed", "--max-model-len", "--pipeline-parallel-size"):
        assert argument in text


def test_flags_replace_all_parallel_sizes(
    inventory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """--tp or --pp on the command line overrides both of the inventory's."""
    run_command(["serve", "-i", inventory, "--dry-run", "--offline", "--tp", "8"])

    assert "TP 8 × PP 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "split"),
    [
        ([], "TP 4 × PP 4 (as requested)"),
        (["--data-parallel-size", "2"], "DP 2 × TP 8 × PP 1"),
        (["--dp", "4", "--tp", "2"], "DP 4 × TP 2 × PP 1"),
        (["--dp", "1"], "TP 8 × PP 2"),
    ],
)
@pytest.mark.parametrize("backend", ["ray", "mp"])
def test_replicas_on_the_command_line(
    inventory: str, backend: str, args: list[str], split: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They override the inventory's sizes, and two scripts are equal."""
    start = ["serve", "-i", inventory, "--dry-run", "--offline", "--backend", backend, *args]
    texts = [(run_command(start), capsys.readouterr().out) for _ in range(2)]

    assert texts[0] == texts[1]
    assert texts[0][0] == 0
    assert f"note: {split}" in texts[0][1]
    assert ("--data-parallel-size" in texts[0][1]) is split.startswith("DP")


def test_replicas_of_the_inventory(inventory: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The inventory's sizes apply without flags; one flag replaces all of them."""
    path = Path(inventory)
    path.write_text(INVENTORY.replace("tp: 4, pp: 4", "tp: 4, dp: 3"), encoding="utf-8")

    assert run_command(["serve", "-i", inventory, "--dry-run", "--offline"]) == 0
    assert "DP 3 × TP 4 × PP 1" in capsys.readouterr().out
    assert run_command(["serve", "-i", inventory, "--dry-run", "--offline", "--tp", "8"]) == 0
    assert "note: TP 8 × PP 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "ranks"),
    [
        (["--nodes", "gpu02"], "8 on gpu02"),
        (["--nodes", "gpu[01-02]", "--gpus", "2"], "2 on gpu01, 2 on gpu02"),
        (["--nodes", "gpu02,gpu01", "--gpus", "2"], "2 on gpu01, 2 on gpu02"),
        (["--gpus", "4", "--tp", "4", "--pp", "1"], "4 on gpu01"),
    ],
)
def test_placement(
    inventory: str, args: list[str], ranks: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parallelism follows from the selected GPUs; nodes are named as in inventories."""
    path = Path(inventory)
    path.write_text(INVENTORY.replace("tp: 4, pp: 4, ", ""), encoding="utf-8")

    assert (
        run_command(["serve", "-i", inventory, "--dry-run", "--offline", "--backend", "mp", *args])
        == 0
    )
    assert f"ranks expected {ranks}\n" in capsys.readouterr().out


def test_mp_names_the_nodes_with_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nodes too small for an equal share are omitted."""
    path = tmp_path / "uneven.yaml"
    nodes = "".join(
        f"  - {{host: n{i}, ip: 10.0.0.{i}, gpus: {count}}}\n"
        for i, count in ((1, 2), (2, 1), (3, 2))
    )
    path.write_text(
        f"cluster: uneven\nimage: i:1\nserve: {{model: org/m}}\nnodes:\n{nodes}", encoding="utf-8"
    )
    args = ["--dry-run", "--offline", "--backend", "mp", "--tp", "2", "--pp", "2"]

    assert run_command(["serve", "-i", str(path), *args]) == 0
    assert "ranks expected 2 on n1, 2 on n3" in capsys.readouterr().out
