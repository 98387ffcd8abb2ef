"""Transport levels."""

from __future__ import annotations

import pytest

from launcher.network import nccl_log
from launcher.network.levels import find_worst_link


@pytest.mark.parametrize(
    ("via", "provider", "level"),
    [
        ("FastSocket/0", "", "any"),
        ("SOCKET/0", "", "any"),
        ("AWS Libfabric/0", "tcp", "any"),
        ("OFI/0/GDRDMA", "sockets", "any"),
        ("AWS Libfabric/0", "udp;ofi_rxd", "any"),
        ("AWS Libfabric/0", "efa", "rdma"),
        ("OFI/0/GDRDMA", "verbs;ofi_rxm", "gdrdma"),
        ("AWS Libfabric/0", "", "rdma"),
        ("GPUDirectTCPX_v7/0/GDRDMA", "", "gdrdma"),
        ("FasTrak/1", "", "rdma"),
        ("IB/0", "tcp", "rdma"),
    ],
)
def test_levels_of_networks(via: str, provider: str, level: str) -> None:
    """Sockets are TCP under any name, and so is libfabric over them."""
    extra = (
        f"gpu01:1:2 [0] NCCL INFO NET/OFI Selected Provider is {provider} (found 1 nics)\n"
        if provider
        else ""
    )
    line = f"gpu01:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/{via}\n"
    result = find_worst_link(nccl_log.parse_log([(line + extra).encode()]))

    assert result is not None
    assert result.level == level
