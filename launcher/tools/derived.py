"""The image we derive from one that lacks Ray: what goes into it, what it is called, and how it is
built.

Ray comes as wheels in the build context, so that building needs no network, and the image is named
by its content, so that every node ends up with the same thing under the same name.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shlex
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import RequestError, VlaunchError
from launcher.model import Argv
from launcher.tools import cpu_plugin
from launcher.tools.image import RAY_EXTRAS, ImagePython

BASE = "vlaunch.base"
RAY = "vlaunch.ray"
EXTRAS = "vlaunch.ray.extras"
PLUGIN = "vlaunch.plugin"
CONTENT = "vlaunch.image.content"
REPOSITORY = "vlaunch/ray"


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelFile:
    """One wheel on the control machine; `sha256` in hex."""

    name: str
    sha256: str
    path: Path

    def read(self) -> bytes:
        """Return its bytes; raises VlaunchError where they are not those that were resolved."""
        data = self.path.read_bytes()
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise VlaunchError(
                f"{self.path} has other bytes than were downloaded",
                hint="run the command again: it downloads the wheel anew",
            )
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSet:
    """The wheels an image lacks, in file name order, and the version of Ray they bring."""

    ray: str
    files: tuple[WheelFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A derived image to be: its name, its Dockerfile, and the wheels that go into the build
    context.
    """

    tag: str
    dockerfile: str
    wheels: Mapping[str, bytes | WheelFile]

    @property
    def content(self) -> str:
        """The hash in the tag, which is also the value of the label CONTENT."""
        return self.tag.rpartition("-")[2]


def recipe(
    *,
    base: str,
    identity: str,
    image: ImagePython,
    wheels: WheelSet | None,
    plugin: tuple[str, bytes] | None = None,
) -> Recipe | None:
    """Say how to build the derived image, or None when the base has all it needs.

    Args:
        base: how nodes call the base image (BuildKit cannot start from a bare image id).
        identity: the base image's id, the same on every node.
        wheels: what the image lacks of Ray; None when it lacks nothing.
        plugin: the wheel of the CPU platform plugin, for `accelerator: cpu`.

    Raises:
        RequestError: the image has neither uv nor pip.
    """
    content: dict[str, bytes | WheelFile] = (
        {file.name: file for file in wheels.files} if wheels else {}
    )
    hashes = {file.name: file.sha256 for file in wheels.files} if wheels else {}
    if plugin:
        content[plugin[0]] = plugin[1]
        hashes[plugin[0]] = hashlib.sha256(plugin[1]).hexdigest()
    if not content:
        return None
    ray = wheels.ray if wheels else image.ray or ""
    text = dockerfile(base, image, identity=identity, ray=ray, plugin=plugin_mark(plugin))
    return Recipe(tag=derived_tag(identity, hashes, text, ray=ray), dockerfile=text, wheels=content)


def plugin_mark(plugin: tuple[str, bytes] | None) -> str:
    """Return the value of the label PLUGIN: a hash of the plugin's wheel, empty without one."""
    return hashlib.sha256(plugin[1]).hexdigest()[:12] if plugin else ""


def fits(
    labels: Mapping[str, str], *, identity: str, ray: str | None, plugin: tuple[str, bytes] | None
) -> bool:
    """Say whether a derived image that is there already is what a recipe would make, as far as its
    labels tell.

    Indexes gain releases, so that the same wish may resolve to other wheels tomorrow; what all
    nodes have is good as it is.
    """
    wanted = {
        BASE: identity,
        EXTRAS: RAY_EXTRAS,
        PLUGIN: plugin_mark(plugin),
        **({RAY: ray} if ray else {}),
    }
    return CONTENT in labels and all(labels.get(name) == value for name, value in wanted.items())


def dockerfile(base: str, image: ImagePython, *, identity: str, ray: str, plugin: str = "") -> str:
    """Write the Dockerfile. Entry point, command and user stay those of the base image.

    The installation ends with importing Ray, so that an image in which it cannot start is never
    tagged.
    """
    proof = (
        f'import ray.serve, pyarrow; assert ray.__version__ == "{ray}", ray.__version__'
        if ray
        else f"import {cpu_plugin.PACKAGE}"
    )
    folder = "/tmp/vlaunch-wheels"
    lines = [
        f"FROM {base}",
        f'LABEL {BASE}="{identity}" {RAY}="{ray}" {EXTRAS}="{RAY_EXTRAS}" {PLUGIN}="{plugin}"',
        *(_let_vllm_load_the_plugin(image) if plugin else []),
        *(["USER 0"] if image.uid else []),
        f"COPY wheels/ {folder}/",
        (
            f"RUN {_install(image)} {folder}/*.whl && rm -r {folder} && python3 -c"
            f" {shlex.quote(proof)}"
        ),
        *([f"USER {image.uid}"] if image.uid else []),
    ]
    return "\n".join(lines) + "\n"


def derived_tag(identity: str, wheels: Mapping[str, str], dockerfile: str, *, ray: str) -> str:
    """Name the derived image by what goes into it; the same inputs give the same name everywhere.

    Args:
        wheels: file name → sha256.
    """
    content = json.dumps([identity, sorted(wheels.items()), dockerfile])
    version = re.sub(r"[^A-Za-z0-9_.]", "_", ray) or "none"
    return f"{REPOSITORY}:{version}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def context(dockerfile: str, wheels: Mapping[str, bytes | WheelFile]) -> bytes:
    """Pack the build context as a tar, the same bytes for the same content."""
    buffer = io.BytesIO()
    files: dict[str, bytes | WheelFile] = {
        "Dockerfile": dockerfile.encode(),
        **{f"wheels/{name}": content for name, content in wheels.items()},
    }
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, content in sorted(files.items()):
            data = content if isinstance(content, bytes) else content.read()
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o644
            archive.addfile(entry, io.BytesIO(data))
    return buffer.getvalue()


def build(docker: Argv, made: Recipe) -> Argv:
    """Build the derived image from a context on standard input, without network, leaving nothing
    behind on failure.
    """
    options = (
        "--network",
        "none",
        "--force-rm",
        "--label",
        f"{CONTENT}={made.content}",
        "--tag",
        made.tag,
    )
    return (*docker, "build", *options, "-")


def _let_vllm_load_the_plugin(image: ImagePython) -> list[str]:
    """Adjust what the image sets against it: a target of `cpu` makes vLLM skip plugins,
    VLLM_PLUGINS lists the wanted.

    Without the target vLLM knows its CPU build by its version.
    """
    lines = []
    if image.env.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        lines.append('ENV VLLM_TARGET_DEVICE=""')
    if "VLLM_PLUGINS" in image.env:
        lines.append(f'ENV VLLM_PLUGINS="{image.env["VLLM_PLUGINS"]},{cpu_plugin.PACKAGE}"')
    return lines


def _install(image: ImagePython) -> str:
    if image.uv:
        return (
            "uv pip install --python python3 --break-system-packages"
            " --no-config --offline --no-cache --no-index --no-deps --compile-bytecode"
        )
    if image.pip:
        force = " --break-system-packages" if image.managed else ""
        return f"python3 -m pip --isolated install --no-cache-dir --no-index --no-deps{force}"
    raise RequestError(
        "the image has neither `uv` nor `pip`, so Ray cannot be added to it",
        hint=(
            "choose an image with Ray in it, or add pip to yours: `RUN apt-get install -y"
            " python3-pip`"
        ),
    )
