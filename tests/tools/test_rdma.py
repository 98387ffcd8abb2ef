"""Where RDMA devices sit."""

from __future__ import annotations

import pytest

from launcher.tools import rdma

pytestmark = pytest.mark.processes


def test_a_device_sits_behind_bridges() -> None:
    """The last PCI address of the path is the device's own."""
    assert (
        rdma.pci("/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0/0000:18:00.0") == "0000:18:00.0"
    )
    assert rdma.pci("/sys/devices/pci0000:00/0000:00:03.0/virtio1") == "0000:00:03.0"
