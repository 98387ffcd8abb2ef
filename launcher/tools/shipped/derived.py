"""Derived image that adds Ray to one without it: content, tag and build command.

The build context contains Ray's wheels, so that the build needs no network. The tag is a hash of
the content, so that all nodes have the same image. For CPUs the image also contains the plugin that
lets vLLM's CPU build run under Ray, as installed by pip.
"""

import hashlib
import io
import json
import re
import shlex
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launcher import upstream
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
_PLUGIN_INFO = f"{PLUGIN_PACKAGE}-1.0.dist-info"


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelFile:
    """Wheel on the control machine; `sha256` in hex."""

    name: str
    sha256: str
    path: Path

    def read(self) -> bytes:
        """Return the bytes; raises VlaunchError if they do not match the hash."""
        data = self.path.read_bytes()
        if hashlib.sha256(data).hexdigest() != self.sha256:
            raise VlaunchError(
                f"{self.path} changed after the download",
                hint="run the command again: it downloads the wheel",
            )
        return data


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelSet:
    """Wheels that an image lacks, in file name order, and their version of Ray."""

    ray: str
    files: tuple[WheelFile, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageRecipe:
    """Inputs of a derived image: tag, Dockerfile, and the other files of the build context."""

    tag: str
    dockerfile: str
    files: Mapping[str, bytes | WheelFile]

    @property
    def content(self) -> str:
        """Hash in the tag, also the value of the label CONTENT."""
        return self.tag.rpartition("-")[2]


def make_recipe(
    *,
    base: str,
    identity: str,
    image: ImagePython,
    wheels: WheelSet | None,
    plugin: Mapping[str, bytes] | None = None,
) -> ImageRecipe | None:
    """Return the recipe of the derived image; None when the base image is complete.

    Args:
        base: name of the base image on the nodes (BuildKit does not accept image ids).
        identity: the base image's id, the same on every node.
        wheels: Ray's wheels that the image lacks; None if it lacks none.
        plugin: files of the CPU platform plugin, for `accelerator: cpu`.

    Raises:
        RequestError: the image has neither uv nor pip.
    """
    packages = wheels.files if wheels else ()
    if not packages and not plugin:
        return None
    plugin_digest = plugin_hash(plugin)
    hashes = {file.name: file.sha256 for file in packages} | (
        {"plugin": plugin_digest} if plugin_digest else {}
    )
    ray = wheels.ray if wheels else image.ray or ""
    text = write_dockerfile(
        base, image, identity=identity, ray=ray, wheels=bool(packages), plugin=plugin_digest
    )
    files: dict[str, bytes | WheelFile] = {f"wheels/{file.name}": file for file in packages}
    files |= {f"plugin/{path}": data for path, data in (plugin or {}).items()}
    return ImageRecipe(
        tag=derived_tag(identity, hashes, text, ray=ray), dockerfile=text, files=files
    )


def plugin_hash(plugin: Mapping[str, bytes] | None) -> str:
    """Return the label PLUGIN: a hash of the plugin's files, empty without a plugin."""
    if not plugin:
        return ""
    hashes = [(path, hashlib.sha256(data).hexdigest()) for path, data in sorted(plugin.items())]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:12]


def labels_match(
    labels: Mapping[str, str],
    *,
    identity: str,
    ray: str | None,
    plugin: Mapping[str, bytes] | None,
) -> bool:
    """Return True if an existing image has the labels of a recipe.

    It then stays in use, although the same request may resolve to newer wheels now.
    """
    expected = {
        BASE: identity,
        EXTRAS: RAY_EXTRAS,
        PLUGIN: plugin_hash(plugin),
        **({RAY: ray} if ray else {}),
    }
    return CONTENT in labels and all(labels.get(name) == value for name, value in expected.items())


def write_dockerfile(
    base: str, image: ImagePython, *, identity: str, ray: str, wheels: bool, plugin: str = ""
) -> str:
    """Return the Dockerfile; entry point, command and user are those of the base image.

    The build ends with an import of Ray, so that a broken image is never tagged.
    """
    import_check = (
        f'import ray.serve, pyarrow; assert ray.__version__ == "{ray}", ray.__version__'
        if ray
        else f"import {PLUGIN_PACKAGE}"
    )
    folder = "/tmp/vlaunch"
    site = "$(python3 -c 'import sysconfig; print(sysconfig.get_path(\"purelib\"))')"
    commands = [
        *([f"{_install_command(image)} {folder}/wheels/*.whl"] if wheels else []),
        *([f'cp -r {folder}/plugin/. "{site}"'] if plugin else []),
        f"rm -r {folder}",
        f"python3 -c {shlex.quote(import_check)}",
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
    """Return the derived image's tag, a hash of its content; `wheels` maps file names to sha256."""
    content = json.dumps([identity, sorted(wheels.items()), dockerfile])
    version = re.sub(r"[^A-Za-z0-9_.]", "_", ray) or "none"
    return f"{REPOSITORY}:{version}-{hashlib.sha256(content.encode()).hexdigest()[:12]}"


def build_context(recipe: ImageRecipe) -> bytes:
    """Pack the build context as a reproducible tar archive."""
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


def build_image(docker: Argv, recipe: ImageRecipe) -> Argv:
    """Build the derived image from a context on standard input, without network; a failed build
    leaves nothing behind.
    """
    options = (
        "--network",
        "none",
        "--force-rm",
        "--label",
        f"{CONTENT}={recipe.content}",
        "--tag",
        recipe.tag,
    )
    return (*docker, "build", *options, "-")


def plugin_files(source: Path) -> dict[str, bytes]:
    """Return the files of the plugin in a folder by their paths below `site-packages`."""
    package = {
        f"{PLUGIN_PACKAGE}/{file.name}": file.read_bytes() for file in sorted(source.glob("*.py"))
    }
    metadata = f"Metadata-Version: 2.1\nName: {PLUGIN_PACKAGE.replace('_', '-')}\nVersion: 1.0\n"
    entry_points = (
        f"[{upstream.text('vllm.plugin-group')}]\n{PLUGIN_PACKAGE} = {PLUGIN_PACKAGE}:register\n"
    )
    return package | {
        f"{_PLUGIN_INFO}/METADATA": metadata.encode(),
        f"{_PLUGIN_INFO}/entry_points.txt": entry_points.encode(),
    }


def _enable_plugin(image: ImagePython) -> list[str]:
    """Adjust variables of the image that prevent vLLM from loading the plugin.

    With the target `cpu` vLLM skips plugins, and VLLM_PLUGINS lists those to load. Without a
    target, vLLM recognises its CPU build by the version.
    """
    lines = []
    if image.env.get("VLLM_TARGET_DEVICE", "").lower() == "cpu":
        lines.append('ENV VLLM_TARGET_DEVICE=""')
    if "VLLM_PLUGINS" in image.env:
        lines.append(f'ENV VLLM_PLUGINS="{image.env["VLLM_PLUGINS"]},{PLUGIN_PACKAGE}"')
    return lines


def _install_command(image: ImagePython) -> str:
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
