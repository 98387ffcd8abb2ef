"""The image derived from one that lacks Ray: its content, its name, and the command that builds it.

Ray comes as wheels in the build context, so that building needs no network, and the image is named
by its content, so that every node ends up with the same thing under the same name. On CPUs it also
has the plugin that lets vLLM's CPU build run under Ray: the files of `launcher/lab/cpu_platform` as
pip would install them.
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

from launcher.core.domain import Argv
from launcher.core.errors import RequestError, VlaunchError
from launcher.tools.image import RAY_EXTRAS, ImagePython

BASE = "vlaunch.base"
RAY = "vlaunch.ray"
EXTRAS = "vlaunch.ray.extras"
PLUGIN = "vlaunch.plugin"
CONTENT = "vlaunch.image.content"
REPOSITORY = "vlaunch/ray"
PLUGIN_PACKAGE = "vlaunch_cpu_ray"
PLUGIN_SOURCE = Path(__file__).parents[1] / "lab" / "cpu_platform"
_PLUGIN_INFO = f"{PLUGIN_PACKAGE}-1.0.dist-info"


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
                hint="run the command again: it downloads the wheel",
            )
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSet:
    """The wheels an image lacks, in file name order, and the version of Ray they bring."""

    ray: str
    files: tuple[WheelFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A derived image to be: its name, its Dockerfile, and the other files of the build context."""

    tag: str
    dockerfile: str
    files: Mapping[str, bytes | WheelFile]

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
    plugin: Mapping[str, bytes] | None = None,
) -> Recipe | None:
    """Return the recipe of the derived image, or None when the base has all it needs.

    Args:
        base: how nodes call the base image (BuildKit cannot start from a bare image id).
        identity: the base image's id, the same on every node.
        wheels: what the image lacks of Ray; None when it lacks nothing.
        plugin: the files of the CPU platform plugin, for `accelerator: cpu`.

    Raises:
        RequestError: the image has neither uv nor pip.
    """
    packages = wheels.files if wheels else ()
    if not packages and not plugin:
        return None
    mark = plugin_mark(plugin)
    hashes = {file.name: file.sha256 for file in packages} | ({"plugin": mark} if mark else {})
    ray = wheels.ray if wheels else image.ray or ""
    text = dockerfile(base, image, identity=identity, ray=ray, wheels=bool(packages), plugin=mark)
    files: dict[str, bytes | WheelFile] = {f"wheels/{file.name}": file for file in packages}
    files |= {f"plugin/{path}": data for path, data in (plugin or {}).items()}
    return Recipe(tag=derived_tag(identity, hashes, text, ray=ray), dockerfile=text, files=files)


def plugin_mark(plugin: Mapping[str, bytes] | None) -> str:
    """Return the value of the label PLUGIN: a hash of the plugin's files, empty without one."""
    if not plugin:
        return ""
    hashes = [(path, hashlib.sha256(data).hexdigest()) for path, data in sorted(plugin.items())]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:12]


def fits(
    labels: Mapping[str, str],
    *,
    identity: str,
    ray: str | None,
    plugin: Mapping[str, bytes] | None,
) -> bool:
    """Return True where an existing image has the labels that a recipe would give it.

    Indexes gain releases, so that the same request may resolve to other wheels tomorrow; an image
    that all nodes have stays in use.
    """
    wanted = {
        BASE: identity,
        EXTRAS: RAY_EXTRAS,
        PLUGIN: plugin_mark(plugin),
        **({RAY: ray} if ray else {}),
    }
    return CONTENT in labels and all(labels.get(name) == value for name, value in wanted.items())


def dockerfile(
    base: str, image: ImagePython, *, identity: str, ray: str, wheels: bool, plugin: str = ""
) -> str:
    """Write the Dockerfile. Entry point, command and user stay those of the base image.

    The installation ends with importing Ray, so that an image in which it cannot start is never
    tagged.
    """
    proof = (
        f'import ray.serve, pyarrow; assert ray.__version__ == "{ray}", ray.__version__'
        if ray
        else f"import {PLUGIN_PACKAGE}"
    )
    folder = "/tmp/vlaunch"
    site = "$(python3 -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')"
    commands = [
        *([f"{_install(image)} {folder}/wheels/*.whl"] if wheels else []),
        *([f'cp -r {folder}/plugin/. "{site}"'] if plugin else []),
        f"rm -r {folder}",
        f"python3 -c {shlex.quote(proof)}",
    ]
    lines = [
        f"FROM {base}",
        f'LABEL {BASE}="{identity}" {RAY}="{ray}" {EXTRAS}="{RAY_EXTRAS}" {PLUGIN}="{plugin}"',
        *(_enable_plugin(image) if plugin else []),
        *(["USER 0"] if image.uid else []),
        f"COPY . {folder}/",
        f"RUN {' && '.join(commands)}",
        *([f"USER {image.uid}"] if image.uid else []),
    ]
    return "\n".join(lines) + "\n"


def derived_tag(identity: str, wheels: Mapping[str, str], dockerfile: str, *, ray: str) -> str:
    """Name the derived image by its content; the same inputs give the same name everywhere.

    Args:
        wheels: file name → sha256.
    """
    content = json.dumps([identity, sorted(wheels.items()), dockerfile])
    version = re.sub(r"[^A-Za-z0-9_.]", "_", ray) or "none"
    return f"{REPOSITORY}:{version}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def context(recipe: Recipe) -> bytes:
    """Pack the build context as a tar, the same bytes for the same content."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for path, content in sorted(
            {"Dockerfile": recipe.dockerfile.encode(), **recipe.files}.items()
        ):
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


def plugin_files() -> dict[str, bytes]:
    """Return the content of each file of the plugin by its path below `site-packages`."""
    package = {
        f"{PLUGIN_PACKAGE}/{file.name}": file.read_bytes()
        for file in sorted(PLUGIN_SOURCE.glob("*.py"))
    }
    metadata = f"Metadata-Version: 2.1\nName: {PLUGIN_PACKAGE.replace('_', '-')}\nVersion: 1.0\n"
    entry_points = f"[vllm.platform_plugins]\n{PLUGIN_PACKAGE} = {PLUGIN_PACKAGE}:register\n"
    return package | {
        f"{_PLUGIN_INFO}/METADATA": metadata.encode(),
        f"{_PLUGIN_INFO}/entry_points.txt": entry_points.encode(),
    }


def _enable_plugin(image: ImagePython) -> list[str]:
    """Adjust the image's variables that keep vLLM from loading the plugin: a target of `cpu` makes
    it skip plugins, VLLM_PLUGINS lists those to load.

    Without the target vLLM knows its CPU build by its version.
    """
    lines = []
    if image.env.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        lines.append('ENV VLLM_TARGET_DEVICE=""')
    if "VLLM_PLUGINS" in image.env:
        lines.append(f'ENV VLLM_PLUGINS="{image.env["VLLM_PLUGINS"]},{PLUGIN_PACKAGE}"')
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
