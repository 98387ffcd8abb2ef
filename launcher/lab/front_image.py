"""Image with Debian's HAProxy for lab hosts, which cannot pull the official one."""

import shutil
from pathlib import Path

from launcher.lab import image
from launcher.lab.machine import Say

NAME = "haproxy:lab"
PACKAGES = ("haproxy",)
_CONFIG = {"Env": [f"PATH={image.SEARCH}"], "Cmd": ["haproxy", "-v"]}


def ensure(cache: Path, say: Say) -> Path:
    """Return the image's Docker archive, building it if necessary."""
    archive = cache / f"front-{image.SUITE}.tar"
    with image.cache_lock(cache):
        if not archive.exists():
            say("building the front's image: Debian packages")
            building = cache / "building-front"
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir()
            try:
                image.install_debian(building / "rootfs", PACKAGES)
                image.drop_unneeded(building / "rootfs")
                image.pack(building / "rootfs", archive, NAME, _CONFIG)
            finally:
                shutil.rmtree(building, ignore_errors=True)
    return archive
