"""CPU communicator for several hosts, with the two collectives that MoE data parallelism needs."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.utils.network_utils import get_ip

from . import experts

SHARED_MEMORY = Path("/dev/shm")


def shared_memory_id() -> tuple[str, str, int]:
    """Identify the shared memory of this process: host name, address, and device of `/dev/shm`.

    The device differs between containers on one host that have their own `/dev/shm`.
    """
    return socket.gethostname(), get_ip(), SHARED_MEMORY.stat().st_dev


def gather_uneven(tensor: torch.Tensor, sizes: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Concatenate the rows of all ranks; rank `i` has `sizes[i]` of them.

    Gloo gathers equal shapes only, so rows are padded to the longest part and truncated again.
    """
    padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def reduce_scatter_uneven(
    tensor: torch.Tensor, sizes: list[int], rank: int, group: dist.ProcessGroup
) -> torch.Tensor:
    """Return this rank's rows of the sum of `tensor` over all ranks; the input is not modified."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    start = sum(sizes[:rank])
    return total[start : start + sizes[rank]].contiguous()


class RayCpuCommunicator(CpuCommunicator):
    """Stock communicator, extended for ranks on different hosts."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.unique_name.startswith("ep"):
            # Workers create the expert group after importing vLLM and before loading the model.
            experts.patch_experts()

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        # Under Ray the stock test is always true: all ranks derive the name from the same port.
        places: list[object] = [None] * self.world_size
        dist.all_gather_object(places, shared_memory_id(), group=self.device_group)
        return len(set(places)) == 1 and super()._all_group_ranks_share_shm_group_name()

    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Gather different numbers of rows from all ranks, for one tensor or a list."""
        if dim != 0:
            raise ValueError(f"all_gatherv along dimension {dim}: only 0 is supported on CPU")
        tensors = [input_] if isinstance(input_, torch.Tensor) else input_
        parts = sizes or [tensors[0].shape[0]] * self.world_size
        gathered = [gather_uneven(tensor, parts, self.device_group) for tensor in tensors]
        return gathered[0] if isinstance(input_, torch.Tensor) else gathered

    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Sum over all ranks and return this rank's share of dimension `dim`."""
        rows = input_.movedim(dim, 0)
        parts = sizes or [rows.shape[0] // self.world_size] * self.world_size
        mine = reduce_scatter_uneven(rows, parts, self.rank_in_group, self.device_group)
        return mine.movedim(0, dim).contiguous()
