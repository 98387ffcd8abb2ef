"""Resolution of Ray's wheels for an image, by uv and pip, from a local folder of test wheels."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import zipfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from launcher.cluster import wheels
from launcher.cluster.wheels import fetch_py_spy
from launcher.core.errors import RequestError, UnreadableAnswer, VlaunchError
from launcher.tools import image as images
from launcher.tools.shipped import py_spy
from launcher.tools.shipped.derived import WheelSet
from launcher.tools.shipped.py_spy import VERSION, Build
from tests import wheel
from tests.ssh.conftest import IMAGE, Shelf


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def names(wheel_set: WheelSet) -> list[str]:
    return [file.name.split("-")[0] for file in wheel_set.files]


def leftovers(cache: Path) -> list[Path]:
    return list(cache.glob(".resolving-*"))


@pytest.mark.processes
def test_only_missing_packages_are_fetched(shelf: Shelf, cache: Path) -> None:
    """The image's packages stay, even if the index has a newer one and not the image's version."""
    shelf.ray("click>=7", 'colorful; extra == "default"')
    shelf.add("click", "9.0")
    shelf.add("colorful", "0.5.8")

    wheel_set = wheels.resolve_wheels(IMAGE, "2.60.0", cache)

    assert names(wheel_set) == ["colorful", "ray"]
    assert wheel_set.ray == "2.60.0"
    assert all(
        file.path.read_bytes() == (shelf.folder / file.name).read_bytes()
        for file in wheel_set.files
    )
    assert leftovers(cache) == []


@pytest.mark.processes
def test_the_newest_compatible_version_is_used(shelf: Shelf, cache: Path) -> None:
    """A dependency whose newest version needs a newer click is one version older."""
    shelf.ray("helper")
    shelf.add("helper", "1.0", "click>=8")
    shelf.add("helper", "2.0", "click>=9")
    shelf.add("click", "9.0")

    wheel_set = wheels.resolve_wheels(IMAGE, "2.60.0", cache)

    assert [file.name for file in wheel_set.files if "helper" in file.name] == [
        "helper-1.0-py3-none-any.whl"
    ]


@pytest.mark.processes
def test_markers_are_those_of_the_image(shelf: Shelf, cache: Path) -> None:
    """Not of the launcher's Python, system or processor."""
    shelf.ray(
        'modern; python_version >= "3.99"',
        'ancient; python_version < "3.99"',
        'arm; platform_machine == "aarch64"',
        'apple; sys_platform == "darwin"',
    )
    for name in ("modern", "ancient", "arm", "apple"):
        shelf.add(name, "1.0")

    assert names(wheels.resolve_wheels(IMAGE, "2.60.0", cache)) == ["modern", "ray"]
    arm = replace(IMAGE, machine="aarch64")
    shelf.ray('arm; platform_machine == "aarch64"', tags="cp399-cp399-manylinux2014_aarch64")
    assert names(wheels.resolve_wheels(arm, "2.60.0", cache)) == ["arm", "ray"]


@pytest.mark.processes
def test_a_wheel_for_a_newer_glibc_is_not_used(shelf: Shelf, cache: Path) -> None:
    """It would install and then fail to load."""
    shelf.ray("native")
    shelf.add("native", "1.0", tags="cp38-abi3-manylinux_2_28_x86_64")
    shelf.add("native", "2.0", tags="cp38-abi3-manylinux_2_34_x86_64")

    wheel_set = wheels.resolve_wheels(IMAGE, "2.60.0", cache)

    assert [file.name for file in wheel_set.files] == [
        "native-1.0-cp38-abi3-manylinux_2_28_x86_64.whl",
        "ray-2.60.0-cp399-cp399-manylinux2014_x86_64.whl",
    ]


@pytest.mark.processes
def test_a_conflict_names_both_requirements(shelf: Shelf, cache: Path) -> None:
    """Ray's requirement, the image's version, and the key of the inventory to change."""
    shelf.ray("click>=9")
    shelf.add("click", "9.0")

    with pytest.raises(RequestError) as caught:
        wheels.resolve_wheels(IMAGE, "2.60.0", cache)

    assert "fit the packages of the image" in caught.value.message
    assert "click>=9" in "".join(caught.value.evidence)
    assert "click==8.1.0+vendor.1" in "".join(caught.value.evidence)
    assert "`ray:`" in caught.value.hint
    assert str(cache) not in str(caught.value.evidence)
    assert leftovers(cache) == []


@pytest.mark.processes
def test_missing_wheels_are_named_with_a_fix(shelf: Shelf, cache: Path) -> None:
    """Without an index: a command that downloads the wheels elsewhere, for the image's Python."""
    shelf.ray(version="2.59.0")

    with pytest.raises(VlaunchError) as caught:
        wheels.resolve_wheels(IMAGE, "2.60.0", cache)

    assert "ray[default,data,serve]==2.60.0" in caught.value.message
    assert "Python 3.99.1 on x86_64" in caught.value.message
    assert "there is no version of ray" in "".join(caught.value.evidence)
    assert "PIP_FIND_LINKS" in caught.value.hint
    assert "--python-version 3.99.1" in caught.value.hint
    assert "--platform manylinux_2_17_x86_64" in caught.value.hint


@pytest.mark.processes
def test_the_resolution_is_cached(shelf: Shelf, cache: Path) -> None:
    """For the same image and Ray, even without an index."""
    shelf.ray()
    first = wheels.resolve_wheels(IMAGE, "2.60.0", cache)
    shelf.clear()

    assert wheels.resolve_wheels(IMAGE, "2.60.0", cache) == first
    with pytest.raises(VlaunchError):
        wheels.resolve_wheels(replace(IMAGE, distributions={}), "2.60.0", cache)


@pytest.mark.processes
@pytest.mark.parametrize("harm", ["changed", "missing", "torn list"])
def test_a_damaged_cache_is_repaired(shelf: Shelf, cache: Path, harm: str) -> None:
    """Hashes of cached files are verified before use."""
    shelf.ray()
    first = wheels.resolve_wheels(IMAGE, "2.60.0", cache)
    if harm == "changed":
        first.files[0].path.write_bytes(b"not a wheel")
    elif harm == "missing":
        first.files[0].path.unlink()
    else:
        (cache / wheels.cache_key(IMAGE, "2.60.0") / "wheels.json").write_text('{"ray')

    again = wheels.resolve_wheels(IMAGE, "2.60.0", cache)

    assert again == first
    assert again.files[0].path.read_bytes() == (shelf.folder / again.files[0].name).read_bytes()


@pytest.mark.processes
def test_a_changed_wheel_is_rejected(shelf: Shelf, cache: Path) -> None:
    """For another image, or in place of a damaged one: the hash of a file name is stored until a
    user removes it.
    """
    shelf.ray()
    first = wheels.resolve_wheels(IMAGE, "2.60.0", cache)
    first.files[0].path.write_bytes(b"damaged")
    shelf.ray("aiohttp")
    shelf.add("aiohttp", "3.12.0")
    for image in (IMAGE, replace(IMAGE, distributions={})):
        with pytest.raises(VlaunchError, match="has a different hash") as caught:
            wheels.resolve_wheels(image, "2.60.0", cache)
        assert first.files[0].sha256 in caught.value.evidence
    _, command, _ = caught.value.hint.split("`")
    subprocess.run(command, shell=True, check=True, env={"PATH": os.defpath})

    assert wheels.resolve_wheels(IMAGE, "2.60.0", cache).files[-1].sha256 != first.files[0].sha256


@pytest.mark.processes
def test_an_invalid_version_is_never_replaced(shelf: Shelf, cache: Path) -> None:
    """Debian's own version strings cannot be pinned, so a replacement is rejected afterwards."""
    shelf.ray("blinker")
    shelf.add("blinker", "1.9")
    odd = replace(IMAGE, distributions={"blinker": "1.7ubuntu1"})

    with pytest.raises(
        RequestError, match=r"would replace the image's blinker 1\.7ubuntu1 by 1\.9"
    ):
        wheels.resolve_wheels(odd, "2.60.0", cache)


@pytest.mark.processes
def test_ray_itself_is_not_fetched_again_when_only_its_dashboard_is_missing(
    shelf: Shelf, cache: Path
) -> None:
    """The image has plain `ray`; only the rest of `ray[default]` is missing."""
    shelf.ray('colorful; extra == "default"')
    shelf.add("colorful", "0.5.8")

    assert names(
        wheels.resolve_wheels(replace(IMAGE, distributions={"ray": "2.60.0"}), "2.60.0", cache)
    ) == ["colorful"]


@pytest.mark.processes
def test_other_parts_of_ray_are_resolved_again(
    shelf: Shelf, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resolution for fewer extras does not have the packages of the others."""
    shelf.ray('colorful; extra == "default"', 'reflection; extra == "serve"')
    shelf.add("colorful", "0.5.8")
    shelf.add("reflection", "1.0")
    with monkeypatch.context() as fewer:
        fewer.setattr(wheels, "RAY_EXTRAS", "default,data")
        before = wheels.resolve_wheels(IMAGE, "2.60.0", cache)

    assert names(before) == ["colorful", "ray"]
    assert names(wheels.resolve_wheels(IMAGE, "2.60.0", cache)) == ["colorful", "ray", "reflection"]


@pytest.mark.processes
def test_an_image_with_ray_gets_ray_data_for_its_own_version(shelf: Shelf, cache: Path) -> None:
    """`ray[data]` of another version may require another pyarrow."""
    shelf.ray('pyarrow>=9,<20; extra == "data"', 'unwanted; extra == "llm"', version="2.56.1")
    shelf.ray('pyarrow>=20; extra == "data"')
    for version in ("19.0", "24.0"):
        shelf.add("pyarrow", version)

    wheel_set = wheels.resolve_wheels(
        replace(IMAGE, distributions={"ray": "2.56.1"}), "2.56.1", cache
    )

    assert [file.name for file in wheel_set.files] == ["pyarrow-19.0-py3-none-any.whl"]
    assert wheel_set.ray == "2.56.1"


@pytest.mark.processes
def test_uv_is_killed_at_the_deadline(shelf: Shelf, cache: Path) -> None:
    """The error names the time, and nothing is left behind."""
    shelf.ray()

    with pytest.raises(VlaunchError, match="timed out after 0 s"):
        wheels.resolve_wheels(IMAGE, "2.60.0", cache, timeout=0.01)
    assert leftovers(cache) == []


@pytest.mark.processes
def test_pips_configuration_is_also_uvs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files and environment variables, in pip's order, and lists of values."""
    config = tmp_path / "pip.conf"
    config.write_text(
        "[global]\nindex-url = https://a/simple\nclient-cert = /a.pem\nextra-index-url =\n"
        "    https://b/simple\n    https://c/simple\n[download]\nno-index = false\n"
    )
    monkeypatch.setenv("PIP_CONFIG_FILE", str(config))
    monkeypatch.setenv("PIP_INDEX_URL", "https://d/simple")

    options, environment = wheels._uv_settings("x86_64-manylinux_2_31", IMAGE)

    text = " ".join(options)
    assert "--default-index https://d/simple" in text
    assert "--index https://b/simple --index https://c/simple" in text
    assert "--no-index" not in options
    assert environment["SSL_CLIENT_CERT"] == "/a.pem"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("libc_version", "platform"),
    [("2.31", "2_31"), ("2.30", "2_28"), ("2.39", "2_39"), ("2.99", "2_40"), ("2.12", "2_17")],
)
def test_uv_gets_the_newest_platform_that_it_knows(libc_version: str, platform: str) -> None:
    """uv has platforms for only some versions of glibc."""
    image = replace(IMAGE, libc_version=libc_version)
    assert wheels._uv_platform(image) == f"x86_64-manylinux_{platform}"


@pytest.mark.processes
def test_pip_gets_all_platforms_up_to_the_images_glibc() -> None:
    """With older aliases, which most wheels still use."""
    argv = images.pip_download("3.11", "x86_64", 31)
    platforms = [value for option, value in pairwise(argv) if option == "--platform"]

    assert argv[argv.index("--abi") + 1] == "cp311"
    assert platforms[0] == "manylinux_2_31_x86_64"
    assert {"manylinux_2_17_x86_64", "manylinux2014_x86_64", "linux_x86_64"} <= set(platforms)


@pytest.mark.processes
@pytest.mark.parametrize(
    "other",
    [
        {"libc": "", "libc_version": ""},
        {"machine": "riscv64"},
        {"implementation": "pypy"},
        {"abiflags": "t"},
    ],
)
def test_an_image_that_cannot_run_ray_is_rejected(other: dict[str, str], cache: Path) -> None:
    """Before a program runs."""
    with pytest.raises(RequestError, match="Ray cannot be added"):
        wheels.resolve_wheels(replace(IMAGE, **other), "2.60.0", cache)  # type: ignore[arg-type]


@pytest.mark.processes
def test_an_unreadable_glibc_version_is_shown(cache: Path) -> None:
    """It decides which wheels load, so it is not guessed."""
    with pytest.raises(UnreadableAnswer) as caught:
        wheels.resolve_wheels(replace(IMAGE, libc_version="two"), "2.60.0", cache)
    assert caught.value.evidence == "two"


@pytest.mark.processes
def test_leftovers_of_a_killed_run_are_removed_a_day_later(shelf: Shelf, cache: Path) -> None:
    """A younger folder may belong to another run."""
    shelf.ray()
    for name in ("old", "young"):
        (cache / f".resolving-{name}").mkdir(parents=True)
    os.utime(cache / ".resolving-old", (0, 0))

    wheels.resolve_wheels(IMAGE, "2.60.0", cache)

    assert [path.name for path in leftovers(cache)] == [".resolving-young"]


@pytest.fixture
def build(shelf: Shelf) -> Build:
    """A build whose wheel is on the shelf."""
    _, data = wheel.build("py-spy", VERSION)
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.writestr(zipfile.ZipInfo(f"py_spy-{VERSION}.data/scripts/py-spy"), "program")
    name = f"py_spy-{VERSION}-py2.py3-none-manylinux1_x86_64.manylinux_2_5_x86_64.whl"
    (shelf.folder / name).write_bytes(buffer.getvalue())
    digest = hashlib.sha256(buffer.getvalue()).hexdigest()
    return Build("x86_64", digest, hashlib.sha256(b"program").hexdigest())


def test_the_wheel_is_cached(build: Build, shelf: Shelf, tmp_path: Path) -> None:
    """A second call needs no index."""
    assert fetch_py_spy(build, tmp_path / "cache") == b"program"
    shelf.clear()
    assert fetch_py_spy(build, tmp_path / "cache") == b"program"
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_damaged_wheel_is_replaced(build: Build, tmp_path: Path) -> None:
    """It is downloaded once more."""
    fetch_py_spy(build, tmp_path)
    (cached,) = tmp_path.glob("*.whl")
    cached.write_bytes(b"damaged")

    assert fetch_py_spy(build, tmp_path) == b"program"


def test_no_index(build: Build, shelf: Shelf, tmp_path: Path) -> None:
    """The hint describes the steps without an index; no file stays in the cache."""
    shelf.clear()
    with pytest.raises(VlaunchError, match="cannot download py-spy") as error:
        fetch_py_spy(build, tmp_path / "cache")

    assert "PIP_FIND_LINKS" in error.value.hint
    assert list((tmp_path / "cache").iterdir()) == []


def test_another_wheel_of_that_name(shelf: Shelf, build: Build, tmp_path: Path) -> None:
    """A wheel with another hash than the pinned one is refused."""
    with pytest.raises(VlaunchError, match="cannot download"):
        fetch_py_spy(Build("x86_64", "0" * 64, build.program), tmp_path)
    with pytest.raises(UnreadableAnswer):
        py_spy.unpack(b"another", build)
