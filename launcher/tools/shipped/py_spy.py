"""py-spy, which shows the Python stacks of ranks without stopping them.

Its wheels contain a single program, for any version of Python.
"""

import hashlib
import io
import zipfile
from dataclasses import dataclass

from launcher.core.errors import UnreadableAnswer

VERSION = "0.4.3"
FILE = "payload/py-spy"  # below a node's state directory; mounted as /opt/vlaunch/py-spy


@dataclass(frozen=True)
class Build:
    """Build for an architecture, with the SHA-256 of its wheel and of the program in it."""

    machine: str
    wheel: str
    program: str


# By Docker's names of architectures.
BUILDS = {
    "amd64": Build(
        "x86_64",
        "8a4277225f470d394a85cca0cdd944bef87f0097b6f20150a6dd3ac2e92806b8",
        "a41205d4925beafd108e1ace85e66c0a1a7adbfcbebcd4441f07848b608886c0",
    ),
    "arm64": Build(
        "aarch64",
        "bbcec46930d464b3bfc142d6d02ade4dd8ad5627823263b3eff0280e80c7c132",
        "ad6e22882e8dcaced4f0a76fef10d372645cc7b94c48a289ebe1bedb754774ed",
    ),
}


def unpack(wheel: bytes, build: Build) -> bytes:
    """Extract the program of a wheel; raises UnreadableAnswer for any other file."""
    if hashlib.sha256(wheel).hexdigest() != build.wheel:
        raise UnreadableAnswer(f"not the wheel of py-spy {VERSION} for {build.machine}")
    with zipfile.ZipFile(io.BytesIO(wheel)) as archive:
        return archive.read(f"py_spy-{VERSION}.data/scripts/py-spy")
