"""The packaged recipes, and recipes in files."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks import package_recipes
from launcher.cli.main import run_command
from launcher.core.errors import RequestError
from launcher.recipes import library
from launcher.recipes.adapt import adapt_command
from launcher.recipes.library import find_hardware, match_hardware
from launcher.recipes.merge import merge_recipe
from launcher.tools.host import Gpu
from tests.recipes import case

ROOT = Path(__file__).parents[2]
DATA = ROOT / "launcher" / "recipes" / "data"
NVIDIA = library.load_library().hardware_by_name("nvidia")


@pytest.mark.parametrize(
    ("gpu", "count", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 8, "h100"),
        ("NVIDIA H100 80GB HBM3", 4, "h100"),
        ("NVIDIA GB300", 4, "gb300"),
        ("NVIDIA GB300", 1, "dgx_station_gb300"),
        ("NVIDIA GB10", 1, "dgx_spark_gb10"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 4, "rtx_pro_6000_2x"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 8, "rtx_pro_6000_8x"),
        ("NVIDIA GeForce RTX 4090", 1, "rtx_4090_2x"),
        ("NVIDIA A100-SXM4-80GB", 8, None),
    ],
)
def test_profiles_of_hardware(gpu: str, count: int, name: str | None) -> None:
    """With this number of GPUs, else the largest with fewer, else the smallest."""
    gpus = [Gpu(index=0, name=gpu, memory_total=80_000, memory_used=0, driver="580")]
    hardware = match_hardware(gpus, count, NVIDIA)

    assert (hardware and hardware.name) == name


def test_no_gpus() -> None:
    """Nodes may report none."""
    assert match_hardware([], 8, NVIDIA) is None


def test_unknown_names_of_hardware() -> None:
    """Only hardware of the inventory's accelerator is offered."""
    assert find_hardware("h200", NVIDIA).generation == "hopper"
    with pytest.raises(
        RequestError,
        match=r"no recipe has hardware `h20` for this accelerator; did you mean `h200`\?",
    ):
        find_hardware("h20", NVIDIA)
    with pytest.raises(RequestError, match="no recipe has hardware `mi300x`"):
        find_hardware("mi300x", NVIDIA)
    assert set(library.load_library().hardware_by_name("cpu")) == {"xeon5", "xeon6"}


def test_every_packaged_recipe_is_merged_on_all_its_hardware() -> None:
    """It gives a valid command, with all variants and features, or its own reason."""
    packaged = library.load_library()
    inventory = case.nodes()
    count = 0
    for name in packaged.recipes:
        recipe = packaged.load_recipe(name)
        for hardware in packaged.hardware_by_name("nvidia").values():
            if hardware.is_excluded(recipe.meta.hardware):
                continue
            for variant, checkpoint in recipe.variants.items():
                if hardware.name not in (checkpoint.supported_hardware or [hardware.name]):
                    continue
                command = merge_recipe(name, recipe, hardware, 16, variant=variant)
                adapt_command(command, inventory, args=(), replicas=1, backend="mp")
                count += 1
    assert count > 5000


def test_the_package_names_source_and_licence() -> None:
    """Without guides, strategies and recipes of vLLM-Omni."""
    packaged = library.load_library()
    notice = (DATA / "NOTICE").read_text()
    text = (DATA / "recipes.json").read_text()

    assert packaged.source == f"vLLM {packaged.vllm}"
    assert packaged.source in notice
    assert "Apache License" in (DATA / "LICENSE").read_text()
    assert len(packaged.recipes) > 140
    assert len(text) < 400_000
    for key in ('"guide"', '"strategy_overrides"', '"omni"', '"description"'):
        assert key not in text


@pytest.mark.parametrize("name", ["openai/gpt-oss-120b", "deepseek-ai/DeepSeek-V4-Flash"])
def test_a_shown_recipe_is_a_file_of_its_format(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It can be edited and served."""
    assert run_command(["recipes", "show", name]) == 0
    path = tmp_path / "mine.yaml"
    path.write_text(capsys.readouterr().out)

    assert library.read_recipe(path) == library.load_library().load_recipe(name)


def test_unknown_names() -> None:
    """The nearest one is suggested."""
    with pytest.raises(RequestError, match=r"did you mean `openai/gpt-oss-120b`\?") as raised:
        library.load_library().load_recipe("openai/gpt-oss-12b")
    assert raised.value.hint == "list similar recipes: `vlaunch recipes list gpt-oss-12b`"


@pytest.mark.parametrize(
    ("text", "evidence"),
    [
        ("model: {base_args: 5}\n", ["1: model.base_args: should be a list", "model_id"]),
        ("meta: {}\n", ["1: `model` is missing"]),
        (
            "model:\n  model_id: a/b\nvariants:\n  x:\n    tp: 0\n",
            ["5: variants.x.tp: should be at least 1"],
        ),
        ("model: [\n", ["not valid YAML"]),
        ("- 1\n", ["should be a mapping"]),
    ],
)
def test_every_mistake_has_its_line(tmp_path: Path, text: str, evidence: list[str]) -> None:
    """In a file."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)

    with pytest.raises(RequestError, match="is invalid") as raised:
        library.load_library().load_recipe(str(path))
    for part in evidence:
        assert part in raised.value.evidence


def test_a_missing_file() -> None:
    """Is no mistake in YAML."""
    with pytest.raises(RequestError, match=r"none\.yaml cannot be used") as caught:
        library.load_library().load_recipe("none.yaml")
    assert caught.value.evidence == "no such file or directory"


def test_writing_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From vLLM's sources, for NVIDIA, AMD and CPUs, without recipes that cannot run."""
    source, profiles, data = (tmp_path / name for name in ("vllm", "profiles", "data"))
    folder = source / "recipes" / "models" / "acme"
    for path in (folder, profiles, data):
        path.mkdir(parents=True)
    (source / "PKG-INFO").write_text("Name: vllm\nVersion: 0.40.0\n")
    (folder / "Dense-8B.yaml").write_text(case.FILE.read_text())
    (folder / "Sound.yaml").write_text("meta: {tasks: [omni]}\nmodel: {model_id: acme/Sound}\n")
    profile = "gpu_count: 8, vram_gb: 640, display_name: X"
    (profiles / "taxonomy.yaml").write_text(
        "hardware_profiles:\n"
        f"  big: {{brand: NVIDIA, generation: x, {profile}}}\n"
        f"  tpu: {{brand: Google, generation: tpu, {profile}}}\n"
    )
    git = ["git", "-C", str(profiles), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *arguments], check=True)
    monkeypatch.setattr(package_recipes, "DATA", data)
    monkeypatch.setattr(library, "_DATA", data / "recipes.json")

    package_recipes.main(source, profiles)

    packaged = library.load_packaged()
    assert (packaged.source, packaged.vllm) == ("vLLM 0.40.0", "0.40.0")
    assert list(packaged.recipes) == ["acme/Dense-8B"]
    assert packaged.load_recipe("acme/Dense-8B") == case.recipe()
    assert list(packaged.hardware_by_name("nvidia")) == ["big"]
    assert "vLLM 0.40.0" in (data / "NOTICE").read_text()
