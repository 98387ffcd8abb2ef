"""What pip is asked for an image's platform."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.errors import RequestError, UnreadableAnswer
from launcher.remote import pip
from tests.remote.conftest import IMAGE

pytestmark = pytest.mark.processes


def test_platforms_go_from_the_images_glibc_down() -> None:
    """With the older names of the same platforms, which most wheels still carry."""
    tags = pip.platform_tags(IMAGE)

    assert tags[0] == "manylinux_2_31_x86_64"
    assert {
        "manylinux_2_17_x86_64",
        "manylinux2014_x86_64",
        "manylinux1_x86_64",
        "linux_x86_64",
    } <= set(tags)
    assert "manylinux1_aarch64" not in pip.platform_tags(replace(IMAGE, machine="aarch64"))


@pytest.mark.parametrize(
    "other", [{"libc": "", "libc_version": ""}, {"machine": "riscv64"}, {"implementation": "pypy"}]
)
def test_an_image_no_ray_can_run_in_is_refused(other: dict[str, str]) -> None:
    """Before pip is asked for what does not exist."""
    with pytest.raises(RequestError, match="no Ray can be added"):
        pip.platform_tags(replace(IMAGE, **other))  # type: ignore[arg-type]


def test_a_glibc_version_that_is_none_is_shown() -> None:
    """It decides which wheels load, so it is not guessed."""
    with pytest.raises(UnreadableAnswer) as caught:
        pip.platform_tags(replace(IMAGE, libc_version="two"))
    assert caught.value.evidence == "two"
