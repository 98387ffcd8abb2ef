"""`vlaunch serve --recipe`: what is started on the clusters of the sample inventories, and why."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import run
from tests import golden
from tests.capacity import models
from tests.cli.conftest import Cluster
from tests.recipes import acme

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
CLUSTERS = {"h100": "h100-infiniband", "mi300x": "amd", "dgx_spark_gb10": "dgx-spark"}


def wanted(script: str) -> dict[str, Any]:
    """Return the server that a script asks for."""
    (line,) = [each for each in script.splitlines() if '"processes"' in each]
    word = shlex.split(line.replace('"$(date +%s)"', "0"))[2]
    said: dict[str, Any] = json.loads(word)
    return said


def told(script: str) -> str:
    """Return the notes of a script and, for each process, its variables and its command."""
    lines = re.findall(r"^# note: .*", script, re.MULTILINE)
    for each in wanted(script)["processes"]:
        env = [f"{name}={text}" for name, text in each["env"].items() if name[:4] == "ACME"]
        lines.append(f"{each['node']}: {' '.join([*env, shlex.join(each['argv'])])}")
    return "\n".join(lines).replace(str(acme.FOLDER), "RECIPES") + "\n"


def serve(on: str, recipe: str, *words: str) -> int:
    """Dry-run on the cluster of a sample inventory."""
    inventory = str(ROOT / "inventory" / f"{CLUSTERS[on]}.yaml")
    source = ["--recipes", str(acme.FOLDER)]
    asked = ["--recipe", recipe, "--hardware", on, *source, "--dry-run", "--offline"]
    return run(["serve", "-i", inventory, *asked, *words])


@pytest.mark.parametrize("on", CLUSTERS)
@pytest.mark.parametrize("recipe", ["Dense-8B", "Experts-600B", "Own-Image-27B"])
def test_three_recipes_on_three_clusters(
    on: str, recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is started, with every difference from the recipe; or why nothing can be."""
    code = serve(on, f"acme/{recipe}")
    ran = capsys.readouterr()

    text = told(ran.out) if code == 0 else ran.err
    golden.check(GOLDEN / f"recipe-{recipe}-{on}.txt", text)


@pytest.mark.parametrize(
    ("name", "recipe", "words"),
    [
        ("strategy", "acme/Experts-600B", ["--strategy", "multi_node_tp"]),
        ("replicas", "acme/Experts-600B", ["--strategy", "multi_node_dep", "--backend", "mp"]),
        ("variant", "acme/Dense-8B-FP8", ["--tp", "1", "--nodes", "gpu01", "--backend", "mp"]),
        (
            "features",
            "acme/Dense-8B",
            ["--feature", "spec_decoding=eagle", "--without-feature", "tool_calling"],
        ),
        ("own-words", "acme/Dense-8B", ["--model", "/data/dense", "--", "--max-num-seqs=8"]),
    ],
)
def test_what_is_asked_for(
    name: str, recipe: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own split, replicas, the model of a variant, features, and words of one's own."""
    assert serve("h100", recipe, *words) == 0
    golden.check(GOLDEN / f"recipe-{name}.txt", told(capsys.readouterr().out))


def test_the_command_is_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    """With its own strategy, vLLM gets word for word what the recipe says; only who starts the
    ranks, and where it listens, is the cluster's.
    """
    assert serve("h100", "acme/Experts-600B", "--strategy", "multi_node_tp") == 0
    (process,) = wanted(capsys.readouterr().out)["processes"]

    theirs = "vllm serve acme/Experts-600B --trust-remote-code --enable-expert-parallel"
    theirs += " --disable-custom-all-reduce --reasoning-parser acme"
    theirs += " --chat-template examples/acme.jinja --tensor-parallel-size 16"
    ours = "--pipeline-parallel-size 1 --distributed-executor-backend ray"
    ours += " --host 0.0.0.0 --port 8000"
    assert shlex.join(process["argv"]) == f"{theirs} {ours}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--variant", "fp8"], "go with --recipe"),
        (["--recipe", "acme/Dense-9B"], "did you mean `acme/Dense-8B`"),
        (["--recipe", "acme/Dense-8B"], "which hardware the nodes are is not known"),
        (["--recipe", "none.yaml"], "`none.yaml` cannot be used"),
        (
            ["--recipe", str(acme.FOLDER / "sparkrun.yaml"), "--variant", "fp8"],
            "--variant cannot be chosen",
        ),
        (["--recipe", "acme/Sound", "--hardware", "h100"], "vLLM-Omni"),
    ],
)
def test_wrong_requests(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Are refused before anything is touched."""
    monkeypatch.setenv("VLAUNCH_RECIPES", str(acme.FOLDER))
    inventory = str(ROOT / "inventory" / "h100-infiniband.yaml")

    assert run(["serve", "-i", inventory, "--dry-run", "--offline", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_recipe_of_sparkrun(capsys: pytest.CaptureFixture[str]) -> None:
    """Its file is named; nothing else is needed."""
    inventory = str(ROOT / "inventory" / "dgx-spark.yaml")
    recipe = str(acme.FOLDER / "sparkrun.yaml")

    assert run(["serve", "-i", inventory, "--recipe", recipe, "--dry-run", "--offline"]) == 0
    golden.check(GOLDEN / "recipe-sparkrun.txt", told(capsys.readouterr().out))


def test_a_file_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What hardware and strategies are, the recipes around it say, or those that are named."""
    text = (acme.FOLDER / "models" / "acme" / "Dense-8B.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("acme/Dense-8B", "me/Mine"))

    assert serve("h100", str(tmp_path / "mine.yaml")) == 0
    assert wanted(capsys.readouterr().out)["model"] == "me/Mine"
    inventory = str(ROOT / "inventory" / "h100-infiniband.yaml")
    path = str(acme.FOLDER / "models" / "acme" / "Dense-8B.yaml")
    asked = ["--recipe", path, "--hardware", "h100", "--dry-run", "--offline"]
    assert run(["serve", "-i", inventory, *asked]) == 0


def test_a_deadline_of_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Is what a start may take, unless the command line says so."""
    text = (acme.FOLDER / "models" / "acme" / "Dense-8B.yaml").read_text()
    env = 'base_env: {VLLM_ENGINE_READY_TIMEOUT_S: "7200"}'
    (tmp_path / "slow.yaml").write_text(text.replace('base_env: {ACME_BASE: "1"}', env))
    seen = []
    for words in ([], ["--timeout", "60"]):
        assert serve("h100", str(tmp_path / "slow.yaml"), *words) == 0
        said = wanted(capsys.readouterr().out)
        ready = said["processes"][0]["env"]["VLLM_ENGINE_READY_TIMEOUT_S"]
        seen.append((said["policy"]["start_timeout"], ready))

    assert seen == [(7200.0, "7200"), (60.0, "3600")]


@pytest.fixture
def there(up: Cluster, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """A cluster that is up, and our recipes."""
    monkeypatch.setenv("VLAUNCH_RECIPES", str(acme.FOLDER))
    return up


def test_nodes_are_asked_what_they_are(there: Cluster) -> None:
    """The GPU's name tells the hardware, and a model that lies there is judged by `plan`."""
    for machine in there.world.machines.values():
        machine.config = models.LLAMA_8B
        machine.model = {"model.safetensors": 16_060_556_376, "config.json": 700}

    ran = there.run("serve", "--recipe", "acme/Dense-8B", "--dry-run", "--skip-network-check")

    assert ran.code == 0, ran.err
    assert "variant `default` on h100: fits: `vlaunch plan` says fits" in ran.out
    assert wanted(ran.out)["processes"][0]["env"]["ACME_HOPPER"] == "1"


def test_the_plan_may_choose_the_split(there: Cluster) -> None:
    """Of a recipe as of any server; a strategy is a split that is named."""
    for machine in there.world.machines.values():
        machine.config = models.LLAMA_8B
        machine.model = {"model.safetensors": 16_060_556_376, "config.json": 700}
    words = ("serve", "--recipe", "acme/Dense-8B", "--plan", "auto", "--dry-run")

    ran = there.run(*words, "--skip-network-check")
    said = wanted(ran.out)["asked_for"]

    assert (said["tp"], said["pp"]) == (1, 1)
    assert said["env"] == {"ACME_BASE": "1", "ACME_HOPPER": "1"}
    named = there.run(*words, "--strategy", "single_node_tp")
    assert (named.code, "--plan auto chooses" in named.err) == (2, True)


def test_a_model_that_is_not_there_has_the_recipes_figure(there: Cluster) -> None:
    """So that a choice can be made before a download."""
    for machine in there.world.machines.values():
        machine.model = {}

    ran = there.run("serve", "--recipe", "acme/Experts-600B", "--dry-run", "--skip-network-check")

    assert ran.code == 0, ran.err
    assert "variant `default` on h100: fits: 720 GB by the recipe's own figure" in ran.out


def test_the_image_is_asked_for_its_vllm(there: Cluster) -> None:
    """Where its tag does not say: a recipe for a newer one is refused, and what helps is named."""
    inventory = there.path.read_text().replace("v0.32.0", "mine")
    there.write(inventory)
    assert there.run("up").code == 0
    newer = ("--variant", "nvfp4", "--hardware", "b200", "--dry-run", "--skip-network-check")

    ran = there.run("serve", "--recipe", "acme/Own-Image-27B", *newer)

    assert ran.code == 2
    assert "it needs vLLM 0.33.0, and vllm/vllm-openai:mine has 0.32.0" in ran.err
    assert "name acme/vllm:nv-130 as `image:` in the inventory" in ran.err


def test_a_server_is_started(there: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the head is told has the recipe's variables, and the differences are said."""
    ran = there.run(
        "serve", "--recipe", "acme/Dense-8B", "--skip-network-check", "--no-wait", "--json"
    )

    assert ran.code == 0, ran.err
    said = json.loads(there.world.machines["gpu01"].files["server/default/desired.json"])
    assert said["asked_for"]["env"] == {"ACME_BASE": "1", "ACME_HOPPER": "1"}
    assert said["processes"][0]["env"]["ACME_HOPPER"] == "1"
    texts = [each.get("text", "") for each in ran.events]
    assert any("vlaunch takes its own" in text for text in texts)
