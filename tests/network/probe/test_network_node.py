"""Facts of a node, and its logs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.processes


def test_an_address_of_another_node_is_no_rendezvous(payload: SimpleNamespace) -> None:
    """The head's address must be on the head."""
    with pytest.raises(
        payload.node.PortUnusable, match=r"192\.0\.2\.1 is not an address of this node"
    ):
        payload.node.reserve_port("192.0.2.1", 29577)


def test_a_long_log_is_cut(payload: SimpleNamespace) -> None:
    """At a line, with a note; only relevant lines count."""
    line = "gpu1:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0\n"
    cut = payload.node.cap_log("NCCL INFO threadThresholds 8/8/64\n" + line * 100, 1000)

    assert len(cut) <= 1000
    assert cut.startswith(line)
    assert cut.endswith("more characters)\n")
    assert set(cut.splitlines(keepends=True)[:-1]) == {line}


def test_links_survive_repeated_lines(payload: SimpleNamespace, tmp_path: Path) -> None:
    """A pair's share is small among many nodes, and every communicator prints its devices."""
    devices = "".join(
        f"n1:7:9 [0] NCCL INFO NET/IB : GPU Direct RDMA Enabled for HCA {i} 'mlx5_{i}'\n"
        for i in range(8)
    )
    link = "n1:7:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/IB/0/GDRDMA\n"
    (tmp_path / "nccl.n1.7.log").write_text(devices * 60 + devices + link)
    start = len(devices * 60)
    saved = payload.node.read_pair_log(str(tmp_path), 7, start, start + len(devices + link), 1500)

    assert saved.startswith(link)
    assert saved.count("GPU Direct RDMA Enabled for HCA 3 ") <= 2


@pytest.mark.parametrize(
    ("env", "folder"),
    [
        ({}, None),
        ({"VLLM_ENABLE_CUDA_COMPATIBILITY": "0", "VLLM_CUDA_COMPATIBILITY_PATH": "own"}, None),
        ({"VLLM_ENABLE_CUDA_COMPATIBILITY": "1", "VLLM_CUDA_COMPATIBILITY_PATH": "own"}, "own"),
        (
            {
                "VLLM_ENABLE_CUDA_COMPATIBILITY": "True",
                "VLLM_CUDA_COMPATIBILITY_PATH": "missing",
                "CONDA_PREFIX": "conda",
            },
            "conda/cuda-compat",
        ),
        ({"VLLM_ENABLE_CUDA_COMPATIBILITY": "1"}, None),
    ],
)
def test_older_drivers_load_cuda_s_compatibility_libraries_as_vllm_does(
    payload: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    env: dict[str, str],
    folder: str | None,
) -> None:
    """Only with vLLM's switch; its folder comes first, once."""
    (tmp_path / "own").mkdir()
    (tmp_path / "conda/cuda-compat").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    env = {**env, "LD_LIBRARY_PATH": f"/usr/lib:{folder}"}

    expected = {} if folder is None else {"LD_LIBRARY_PATH": f"{folder}:/usr/lib"}
    assert payload.node.cuda_compatibility(env) == expected


@pytest.mark.parametrize(
    ("gpu", "card", "shared"),
    [
        ("0000:15:01.0/0000:16:00.0/0000:18:00.0", "0000:15:01.0/0000:16:00.0/0000:19:00.0", True),
        ("0000:15:01.0/0000:18:00.0", "0000:15:03.0/0000:19:00.0", False),
        ("0000:15:01.0/0000:18:00.0", None, None),
        (None, "0000:15:01.0/0000:19:00.0", None),
    ],
)
def test_a_shared_pcie_switch(
    payload: SimpleNamespace, tmp_path: Path, gpu: str | None, card: str | None, shared: bool | None
) -> None:
    """GPU and card are below the same root port; without one of them the result is unknown."""
    root = tmp_path / "devices/pci0000:15"
    for path, vendor, kind in ((gpu, "0x10de", "0x030200"), (card, "0x15b3", "0x020700")):
        if path is None:
            continue
        (root / path).mkdir(parents=True)
        (root / path / "vendor").write_text(f"{vendor}\n")
        (root / path / "class").write_text(f"{kind}\n")
        link = tmp_path / "bus/pci/devices" / Path(path).name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(root / path)
    if card is not None:
        device = tmp_path / "class/infiniband/mlx5_0/device"
        device.parent.mkdir(parents=True)
        device.symlink_to(root / card)

    assert payload.node.has_shared_switch(str(tmp_path)) is shared


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "13.0"),
        ("cuda = '12.4'\n", "12.4"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.0'\n", ""),
    ],
)
def test_cuda_of_torch_without_an_import(
    payload: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    version: str,
) -> None:
    """An import would load the driver's libraries too early for another path."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "version.py").write_text(f"__all__ = ['cuda']\n{text}")
    monkeypatch.syspath_prepend(str(tmp_path))

    assert payload.node._torch_cuda() == version
