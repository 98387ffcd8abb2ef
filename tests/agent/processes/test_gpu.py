"""Parser of `nvidia-smi`'s output, printed by a script on PATH in the real one's format."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.agent.processes import gpu

GPUS = "0, GPU-aa, 81559, 2\n1, GPU-bb, 81559, 70000\n"
APPS = "GPU-bb, 4711, /usr/bin/python3, 60000\nGPU-bb, 4712, [Not Found], 9000\nGPU-aa, 1, x, 1\n"
Smi = Callable[..., None]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Install an `nvidia-smi` that prints a text."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def make(gpus: str = GPUS, apps: str = APPS, code: int = 0) -> None:
        (tmp_path / "gpus").write_text(gpus)
        (tmp_path / "apps").write_text(apps)
        script = (
            f"case $1 in --query-gpu*) cat {tmp_path}/gpus ;; *) cat {tmp_path}/apps ;; esac\nexit"
            f" {code}\n"
        )
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return make


def test_gpus(smi: Smi) -> None:
    """One per line; other lines are ignored."""
    smi(GPUS + "some warning of the driver\n")

    assert [(item.index, item.used) for item in gpu.query_gpus()] == [(0, 2.0), (1, 70000.0)]


def test_used_memory_names_its_process(smi: Smi) -> None:
    """The process with the most memory."""
    smi()

    assert gpu.free_gpus(0.9, None, 2) == (
        1,
        "1 of 2 GPUs have 90% of their memory free, 2 needed: GPU 1 has 68.4 of 79.6 GiB in use,"
        " by /usr/bin/python3 (pid 4711, 58.6 GiB)",
    )


def test_several_used_gpus(smi: Smi) -> None:
    """One is named, with the number of others."""
    smi("0, GPU-aa, 81559, 70000\n1, GPU-bb, 81559, 70000\n", apps="")

    assert gpu.free_gpus(0.9, None, 1) == (
        0,
        "0 of 2 GPUs have 90% of their memory free, 1 needed: GPU 0 has 68.4 of 79.6 GiB in use"
        " (and 1 more)",
    )


def test_the_process_may_be_unknown(smi: Smi) -> None:
    """Processes of other containers are not listed, or have no name."""
    smi(apps="")
    assert gpu.free_gpus(0.9, (1,), 1)[1].endswith(": GPU 1 has 68.4 of 79.6 GiB in use")

    smi(apps="GPU-bb, 4712, [Not Found], 69000\n")
    assert gpu.free_gpus(0.9, (1,), 1)[1].endswith("GiB in use, by a process (pid 4712, 67.4 GiB)")


@pytest.mark.parametrize(
    ("share", "chosen", "count", "free"),
    [(0.9, (0,), 1, 1), (0.1, None, 2, 2), (0.0, (1,), 1, 1), (0.9, None, 1, 1)],
)
def test_sufficient_memory(
    smi: Smi, share: float, chosen: tuple[int, ...] | None, count: int, free: int
) -> None:
    """Only the server's GPUs count, only as many as it needs, and only the memory it claims."""
    smi()

    assert gpu.free_gpus(share, chosen, count) == (free, "")


def test_too_few_gpus(smi: Smi) -> None:
    """All are free, so a wait would never end."""
    smi()

    assert gpu.free_gpus(0.1, None, 4) == (2, "")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replace the kernel's files."""
    root = tmp_path / "root"
    root.mkdir()
    monkeypatch.setattr(gpu, "_ROOT", f"{root}/")

    def write(**texts: str) -> None:
        for name, text in texts.items():
            file = root / name.replace("__", "/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    return write


@pytest.mark.parametrize("none", ["[N/A]", "[Not Supported]"])
def test_unified_memory_is_the_hosts(smi: Smi, files: Callable[..., None], none: str) -> None:
    """A GB10 reports no figures: the host's available memory decides, as in vLLM."""
    smi(f"0, GPU-aa, {none}, {none}\n", apps="")
    files(proc__meminfo="MemTotal:       125829120 kB\nMemAvailable:   52428800 kB\n")

    assert gpu.free_gpus(0.4, None, 1) == (1, "")
    assert gpu.free_gpus(0.7, None, 1) == (
        0,
        "0 of 1 GPUs have 70% of their memory free, 1 needed: GPU 0 shares the host's memory, 70.0"
        " of 120.0 GiB in use",
    )


def test_unreadable_memory_counts_as_free(smi: Smi) -> None:
    """A MIG instance in a container is not unified memory."""
    hidden = "[Insufficient Permissions]"
    smi(f"0, GPU-aa, {hidden}, {hidden}\n")

    assert gpu.free_gpus(0.9, None, 1) == (1, "")


def amd(files: Callable[..., None], *used: int, cores: int = 0) -> None:
    """Simulate AMD GPUs with some GiB in use, of 192."""
    for at, gib in enumerate(used):
        device = f"sys__class__drm__renderD{128 + at}__device"
        node = f"sys__class__kfd__kfd__topology__nodes__{9 + at}__properties"
        files(
            **{
                node: f"cpu_cores_count {cores}\nsimd_count 1216\ndrm_render_minor {128 + at}\n",
                f"dev__dri__renderD{128 + at}": "",
                f"{device}__mem_info_vram_total": f"{192 << 30}\n",
                f"{device}__mem_info_vram_used": f"{gib << 30}\n",
            }
        )


@pytest.fixture
def no_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove `nvidia-smi`."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.usefixtures("no_smi")
def test_amd_gpus_are_read_from_the_kernel(files: Callable[..., None]) -> None:
    """Of the container's render nodes, in topology order (9 before 10)."""
    amd(files, 1, 150)
    files(sys__class__kfd__kfd__topology__nodes__0__properties="cpu_cores_count 96\n")
    hidden = "cpu_cores_count 0\ndrm_render_minor 135\n"
    files(sys__class__kfd__kfd__topology__nodes__8__properties=hidden)

    assert [(item.index, item.total, item.used) for item in gpu.query_gpus()] == [
        (0, 192 * 1024.0, 1024.0),
        (1, 192 * 1024.0, 150 * 1024.0),
    ]
    assert gpu.free_gpus(0.9, None, 1) == (1, "")
    assert gpu.free_gpus(0.9, None, 2) == (
        1,
        "1 of 2 GPUs have 90% of their memory free, 2 needed: GPU 1 has 150.0 of 192.0 GiB in use",
    )


@pytest.mark.usefixtures("no_smi")
def test_an_apu_is_not_judged(files: Callable[..., None]) -> None:
    """A desktop may fill its memory, while programs get the host's."""
    amd(files, 191, cores=16)

    assert gpu.free_gpus(0.9, None, 1) == (1, "")


@pytest.mark.parametrize(
    "text",
    [
        "Failed to initialize NVML: Unknown Error",
        "Failed to initialize NVML: GPU access blocked by the operating system",
        "No devices were found",
    ],
)
@pytest.mark.parametrize("code", [0, 255])
def test_a_container_that_has_lost_its_gpus(smi: Smi, text: str, code: int) -> None:
    """It must be restarted, unlike one without a driver."""
    smi(f"{text}\n", code=code)

    with pytest.raises(gpu.GpuLost, match=text.partition(":")[0]):
        gpu.free_gpus(0.9, None, 1)


LOST = "Unable to determine the device handle for GPU0000:3B:00.0: Unknown Error\n"


def test_a_lost_gpu_concerns_its_own_server_only(smi: Smi) -> None:
    """The reason is the driver's line, not the row of a GPU that works."""
    smi(GPUS + LOST, code=15)

    assert gpu.free_gpus(0.9, (0,), 1) == (1, "")
    assert gpu.free_gpus(0.9, None, 1) == (1, "")
    for indices, count in (((2,), 1), ((0, 1, 2), 3), (None, 3)):
        with pytest.raises(
            gpu.GpuLost, match=r"^Unable to determine the device handle for GPU0000"
        ):
            gpu.free_gpus(0.9, indices, count)


def test_a_lost_gpu_that_hides_the_others(smi: Smi, tmp_path: Path) -> None:
    """The server's own ones are queried by index."""
    smi(GPUS, code=0)
    script = (tmp_path / "nvidia-smi").read_text().removeprefix("#!/bin/sh\n")
    missing = f"case $*: in *--id=0,1:) ;; *) echo '{LOST.strip()}'; exit 15 ;; esac\n"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{missing}{script}")

    assert gpu.free_gpus(0.1, (0, 1), 2) == (2, "")
    with pytest.raises(gpu.GpuLost, match=r"^Unable"):
        gpu.free_gpus(0.9, (2,), 1)


@pytest.mark.parametrize("why", ["absent", "failing"])
def test_no_working_nvidia_smi(
    smi: Smi, files: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    """It is missing, or fails: the engine may start."""
    if why == "absent":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        smi("NVIDIA-SMI has failed because it could not communicate with the driver\n", code=9)

    assert (gpu.query_gpus(), gpu.free_gpus(0.9, None, 1)) == ([], (None, ""))
