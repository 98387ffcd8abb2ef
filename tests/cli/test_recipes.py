"""`vlaunch recipes`: list, show, update, and the copy that is kept."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from launcher.cli import recipe_source
from launcher.cli.main import run
from tests import golden
from tests.recipes import acme

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
CONTEXT, PARAMETER = click.Context(click.Command("x")), click.Argument(["name"])


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a copy would lie."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("VLAUNCH_RECIPES", raising=False)
    return tmp_path / "data" / "vlaunch" / "recipes.json"


@pytest.fixture
def taken(kept: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """A copy of our recipes."""
    assert run(["recipes", "update", "--from", str(acme.FOLDER)]) == 0
    capsys.readouterr()
    return kept


def test_a_copy_is_kept(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With its digest; from then on it is what all commands read."""
    assert run(["recipes", "update", "--from", str(acme.FOLDER), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["recipes"], said["wrong"], said["unknown"]) == (4, {}, {})
    assert said["origin"]["digest"] == acme.library().origin.digest
    assert said["kept"] == str(kept)

    assert run(["recipes", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in listed["recipes"]] == list(acme.library().paths)


def test_what_is_wrong_or_not_known_is_named(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When a copy is taken; one recipe that cannot be read spoils no other."""
    folder = tmp_path / "recipes"
    shutil.copytree(acme.FOLDER, folder)
    (folder / "models/acme/Bad.yaml").write_text("model: {model_id: 5}\n")
    (folder / "models/acme/New.yaml").write_text("model: {model_id: a/b, shine: 1}\n")

    assert run(["recipes", "update", "--from", str(folder)]) == 0
    ran = capsys.readouterr()

    assert "6 recipes from" in ran.out
    assert "acme/Bad cannot be read: models/acme/Bad.yaml:1: model.model_id: should be text" in (
        ran.err
    )
    assert "`model.shine` is not known to vlaunch, and not used: in acme/New" in ran.err
    assert run(["recipes", "list", "bad"]) == 0
    assert "acme/Bad  cannot be read: models/acme/Bad.yaml:1" in capsys.readouterr().out


def test_a_copy_stays_when_another_cannot_be_had(
    taken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of nonsense, nothing is kept."""
    before = taken.read_bytes()
    folder = tmp_path / "recipes"
    (folder / "models" / "a").mkdir(parents=True)
    (folder / "taxonomy.yaml").write_text("hardware_profiles: {}")
    (folder / "models" / "a" / "b.yaml").write_text("model: 5")

    assert run(["recipes", "update", "--from", str(folder)]) == 2
    assert "has no recipe that can be read" in capsys.readouterr().err
    (folder / "taxonomy.yaml").write_text("hardware_profiles: 7")
    assert run(["recipes", "update", "--from", str(folder)]) == 2
    assert taken.read_bytes() == before


def test_a_damaged_copy_is_noticed(taken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By every command, with the way out."""
    taken.write_bytes(taken.read_bytes().replace(b"--max-num-seqs", b"--max-num-seq5"))

    for words in (["list"], ["show", "acme/Dense-8B"]):
        assert run(["recipes", *words]) == 2
        ran = capsys.readouterr()
        assert "are damaged: they are not what was written" in ran.err
        assert "hint: take them anew: `vlaunch recipes update`" in ran.err


def test_none_are_kept(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is said how to take them."""
    assert run(["recipes", "list"]) == 2
    assert "no recipes are kept on this machine" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ([], ["Dense-8B", "Experts-600B", "Own-Image-27B", "Sound"]),
        (["dense"], ["Dense-8B"]),
        (["FP4"], ["Experts-600B", "Own-Image-27B"]),
        (["acme", "multimodal"], ["Own-Image-27B"]),
        (["--hardware", "dgx_spark_gb10"], ["Dense-8B"]),
        (["--hardware", "mi300x"], ["Dense-8B", "Experts-600B", "Sound"]),
        (["nothing"], []),
    ],
)
def test_a_list_is_filtered(
    taken: Path, words: list[str], names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """By words, and by hardware."""
    assert run(["recipes", "list", *words]) == 0
    ran = capsys.readouterr()

    assert [line.split()[0] for line in ran.out.splitlines()] == [f"acme/{name}" for name in names]
    assert f"{len(names)} of 4 recipes, from {acme.FOLDER}" in ran.err


def test_no_such_hardware(taken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Is no empty list."""
    assert run(["recipes", "list", "--hardware", "h10"]) == 2
    assert "did you mean `h100`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("dense", ["acme/Dense-8B"]),
        ("experts", ["acme/Experts-600B", "--hardware", "h100"]),
        ("own-image", ["acme/Own-Image-27B-NVFP4", "--hardware", "b200"]),
        ("of-nodes", ["acme/Dense-8B", "--hardware", "mi300x", "-i", "inventory/amd.yaml"]),
    ],
)
def test_show(
    taken: Path,
    name: str,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a recipe says, and what vlaunch would do with it, or why it would not."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_TOKEN", "x")
    run(["recipes", "show", *words])
    ran = capsys.readouterr()

    text = (ran.out + ran.err).replace(str(acme.FOLDER), "RECIPES")
    golden.check(GOLDEN / f"recipes-show-{name}.txt", text)


def test_show_for_machines(taken: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same, with what would be served."""
    assert run(["recipes", "show", "acme/Dense-8B", "--hardware", "h200", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)

    assert said["variants"]["fp8"]["vram_minimum_gb"] == 10
    assert said["features"]["spec_decoding"] == {"on": False, "modes": ["mtp", "eagle"], "args": []}
    assert said["serving"]["env"] == {"ACME_BASE": "1", "ACME_HOPPER": "1"}
    assert (said["serving"]["tp"], said["refused"]) == (None, [])

    assert run(["recipes", "show", "acme/Sound", "--hardware", "h200", "--json"]) == 2
    said = json.loads(capsys.readouterr().out)
    assert said["serving"] is None
    assert said["refused"][1] == "it is a recipe for vLLM-Omni, which vlaunch does not start"


def test_hardware_that_vlaunch_cannot_run_on(
    taken: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is said to be that."""
    assert run(["recipes", "show", "acme/Dense-8B", "--hardware", "ironwood"]) == 2
    assert "ironwood is Google's" in capsys.readouterr().err


def test_from_elsewhere(
    kept: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source that is named, or that the environment names, is read as it is; nothing is kept."""
    assert run(["recipes", "list", "--from", str(acme.FOLDER)]) == 0
    monkeypatch.setenv("VLAUNCH_RECIPES", str(acme.FOLDER))
    assert run(["recipes", "show", "acme/Dense-8B"]) == 0
    assert run(["recipes", "show", str(acme.FOLDER / "sparkrun.yaml")]) == 2
    assert "is a recipe of sparkrun" in capsys.readouterr().err
    assert not kept.exists()


def test_a_checkout_has_its_commit(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which is kept, and shown."""
    folder = tmp_path / "recipes"
    shutil.copytree(acme.FOLDER, folder)
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    done = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)

    assert run(["recipes", "update", "--from", str(folder)]) == 0
    assert f"at commit {done.stdout[:12]}" in capsys.readouterr().out


def test_a_file_of_its_own(taken: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Is shown with what the kept recipes know of hardware; a mistake has its line."""
    text = (acme.FOLDER / "models" / "acme" / "Dense-8B.yaml").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace("acme/Dense-8B", "me/Mine"))

    assert run(["recipes", "show", str(tmp_path / "mine.yaml"), "--hardware", "h100"]) == 0
    assert f"recipe       me/Mine, from {tmp_path}/mine.yaml" in capsys.readouterr().out

    (tmp_path / "mine.yaml").write_text("meta: {}\nmodel: {base_args: 5}\n")
    assert run(["recipes", "show", str(tmp_path / "mine.yaml")]) == 2
    assert "mine.yaml:2: model.base_args: should be a list" in capsys.readouterr().err


def test_names_are_completed(taken: Path) -> None:
    """As the shell asks for them."""
    found = recipe_source.complete(CONTEXT, PARAMETER, "ACME/d")

    assert [each.value for each in found] == ["acme/Dense-8B"]
    taken.unlink()
    assert recipe_source.complete(CONTEXT, PARAMETER, "") == []
