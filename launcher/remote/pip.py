"""Run the control machine's pip on behalf of another Python: the one in a container image.

The user's own pip configuration applies: indexes, find-links, certificates, proxies and PIP_*
variables.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

from launcher.errors import RequestError, UnreadableAnswer, VlaunchError
from launcher.tools.image import ImagePython, normalise

Progress = Callable[[str], None]

_OLDEST_GLIBC_MINOR = {"x86_64": 5, "aarch64": 17}
_LEGACY_TAGS = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}  # PEP 600

# pip takes the image's tags as options but judges environment markers (`; python_version >=
# "3.12"`) by the Python it runs in, so the image's values are put in their place before it starts.
_PIP = """\
import json, runpy, sys
from pip._vendor.packaging import markers
values = json.loads(sys.argv.pop(1))
markers.default_environment.__name__
markers.default_environment = lambda: dict(values)
sys.argv[0] = "pip"
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


def download(
    asked: str,
    image: ImagePython,
    constraints: Path,
    into: Path,
    *,
    timeout: float,
    progress: Progress,
) -> None:
    """Download wheels of a requirement, and of all that it requires, as they would run in the
    image.

    Args:
        constraints: a file of constraints, as pip's option takes it.
        timeout: seconds, after which pip is killed.
        progress: told what is being fetched, one line at a time.

    Raises:
        RequestError: the requirements exclude each other, or no wheel can run in such an image.
        VlaunchError: something was not found, pip failed, or it took too long.
    """
    words = [
        "download",
        *_target(image),
        "--constraint",
        str(constraints),
        "--dest",
        str(into),
        asked,
    ]
    code, lines = _run(image, words, timeout=timeout, progress=progress)
    if code != 0:
        raise _failure(lines, image, asked, code=code, timeout=timeout)


def platform_tags(image: ImagePython) -> tuple[str, ...]:
    """Name the wheel platforms that run in the image, newest first (PEP 600: a wheel names the
    oldest glibc it needs).

    Raises:
        RequestError: it is no glibc CPython on x86_64 or aarch64, the only ones that Ray has Linux
            wheels for.
        UnreadableAnswer: the image's glibc version cannot be read.
    """
    if (image.implementation, image.libc) != (
        "cpython",
        "glibc",
    ) or image.machine not in _OLDEST_GLIBC_MINOR:
        raise RequestError(
            f"no Ray can be added to this image: it runs {image.implementation} on {image.machine}"
            f" with {image.libc or 'a C library other than glibc'}",
            hint="choose an image with glibc on x86_64 or aarch64, or one that has Ray in it",
        )
    match = re.fullmatch(r"2\.([0-9]{1,3})", image.libc_version)
    if match is None:
        raise UnreadableAnswer("cannot read the image's glibc version", evidence=image.libc_version)
    tags: list[str] = []
    for minor in range(int(match[1]), _OLDEST_GLIBC_MINOR[image.machine] - 1, -1):
        tags.append(f"manylinux_2_{minor}_{image.machine}")
        if minor in _LEGACY_TAGS:
            tags.append(f"{_LEGACY_TAGS[minor]}_{image.machine}")
    return (*tags, f"linux_{image.machine}")


def _run(
    image: ImagePython, words: list[str], *, timeout: float, progress: Progress
) -> tuple[int, list[str]]:
    """Run pip with the user's own configuration; return its exit status (124: out of time) and what
    it said.
    """
    env = {
        **os.environ,
        "PIP_NO_INPUT": "1",
        "PIP_REQUIRE_VIRTUALENV": "0",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_PROGRESS_BAR": "off",
        "NO_COLOR": "1",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", _PIP, json.dumps(_markers(image)), *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=env,
        start_new_session=True,
    )
    late = threading.Event()

    def end_late() -> None:
        late.set()
        _end(process)

    timer = threading.Timer(timeout, end_late)
    timer.start()
    lines: list[str] = []
    with process:
        try:
            for line in process.stdout or ():
                lines.append(line.rstrip())
                if line.lstrip().startswith(("Collecting ", "Downloading ", "Processing ")):
                    progress(line.strip())
        except BaseException:
            _end(process)
            raise
        finally:
            timer.cancel()
    return (124 if late.is_set() else process.returncode), lines


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)


def _markers(image: ImagePython) -> dict[str, str]:
    """Return the environment markers' values in the image (names: the dependency specifiers'
    standard).
    """
    return {
        "implementation_name": "cpython",
        "implementation_version": image.python,
        "os_name": "posix",
        "platform_machine": image.machine,
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": image.python,
        "python_version": ".".join(image.python.split(".")[:2]),
        "sys_platform": "linux",
    }


def _failure(
    lines: list[str], image: ImagePython, asked: str, *, code: int, timeout: float
) -> VlaunchError:
    """Say what went wrong, with pip's own lines."""
    where = f"for Python {image.python} on {image.machine}"
    told = [_readable(line) for line in lines if line.strip()]
    if code == 124:
        return VlaunchError(
            f"finding {asked} {where} took longer than {timeout:.0f} s",
            evidence=told[-6:],
            hint=(
                "see that this machine reaches its package index: `python3 -m pip download"
                " --no-deps ray`"
            ),
        )
    clash = _clash(told)
    if clash:
        return RequestError(
            f"{asked} does not fit the packages of the image: {', but '.join(clash[:2])}",
            evidence=clash,
            hint=(
                "choose another version as `ray:` in the inventory, or an image that has Ray in it"
            ),
        )
    missing = _missing(told)
    text = (
        f"no wheel of `{missing}` found {where}, which {asked} needs"
        if missing
        else f"pip could not fetch {asked} {where}"
    )
    return VlaunchError(text, evidence=_errors(told), hint=_air_gapped(image, asked))


def _missing(told: list[str]) -> str:
    """Return the requirement that the index has no wheel for; empty when pip names none."""
    for line in told:
        if match := re.search(r"No matching distribution found for (.+)", line):
            return match[1]
    return ""


def _errors(told: list[str]) -> list[str]:
    """Return pip's last retry and its errors, or how it ended."""
    retries = [line for line in told if "Retrying (" in line]
    errors = [line for line in told if line.startswith("ERROR:")]
    return [*retries[-1:], *(errors or told[-6:])]


def _clash(told: list[str]) -> list[str]:
    """Return pip's account of requirements that exclude each other; the last account is the one
    that counts.
    """
    starts = [
        index for index, line in enumerate(told) if line.startswith("The conflict is caused by")
    ]
    if not starts:
        return []
    account = []
    for line in told[starts[-1] + 1 :]:
        if not line.startswith("    "):
            break
        account.append(line.strip())
    return account


def _air_gapped(image: ImagePython, asked: str) -> str:
    platforms = (
        f"--platform manylinux_2_28_{image.machine} --platform manylinux2014_{image.machine}"
    )
    target = f"--python-version {_release(image)} {platforms}"
    return (
        "vlaunch uses this machine's pip configuration; without an index, run on a machine that"
        f" has one\n`pip download --only-binary :all: {target} --dest wheels '{asked}'`,\ncopy the"
        " folder here, and set `PIP_FIND_LINKS` to it and `PIP_NO_INDEX=1`"
    )


def _readable(line: str) -> str:
    """Say what a stand-in stands for, and shorten the list of all versions there are to the newest
    ones.
    """
    line = re.sub(
        r"The user requested \(constraint\) \S+ \(from"
        r" file:\S+/([^/\s-]+)-([^/\s-]+)-py3-none-any\.whl\)",
        lambda match: f"the image has {normalise(match[1])} {unquote(match[2])}",
        line,
    )
    return re.sub(r"\(from versions: .*?((?:[^,]+, ){0,4}[^,]+)\)$", r"(newest versions: \1)", line)


def _target(image: ImagePython) -> list[str]:
    major, minor = image.python.split(".")[:2]
    abi = f"cp{major}{minor}{image.abiflags}"
    options = [
        "--only-binary",
        ":all:",
        "--python-version",
        _release(image),
        "--implementation",
        "cp",
        "--abi",
        abi,
    ]
    return options + [
        word for platform in platform_tags(image) for word in ("--platform", platform)
    ]


def _release(image: ImagePython) -> str:
    """Return the Python version as pip's option takes it: three numbers, without a suffix such as
    `rc1`.
    """
    match = re.match(r"\d+\.\d+\.\d+", image.python)
    return match[0] if match else image.python
