"""The types of values that only entries of `nodes` have: ranges of hosts, and which GPUs."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from launcher.core.values import LABEL, LONGEST, Bounds, Like, plainly, should
from launcher.inventory import ranges

# IFNAMSIZ is 16 with the closing NUL; the kernel's dev_valid_name() forbids `.`, `..`, `/`, `:` and
# spaces.
Interface = Annotated[
    str,
    Like(
        r"(?!\.{1,2}$)[A-Za-z0-9._][A-Za-z0-9._@-]{0,14}",
        "the exact name of one network interface, at most 15 characters, such as eth0 (see `ip -br"
        " link`)",
    ),
]
Hca = Annotated[
    str,
    Like(
        r"[A-Za-z][A-Za-z0-9_-]{0,62}(?::[1-9][0-9]?)?",
        "the exact name of one RDMA device, such as mlx5_0 or mlx5_0:1 (see `ls"
        " /sys/class/infiniband`)",
    ),
]


def _expand(value: object) -> tuple[str, ...]:
    if not isinstance(value, str):
        raise should("should be text")
    if len(value) > LONGEST:
        raise should(f"should be at most {LONGEST} characters long")
    try:
        return ranges.expand(value)
    except ValueError as error:
        raise should(str(error)) from error


def few_enough(nodes: object) -> object:
    """Bound the nodes of all entries together, before any range is expanded."""
    if isinstance(nodes, tuple):
        total = sum(_most(entry) for entry in nodes)
        if total > ranges.MAX_NODES:
            raise plainly(f"should be at most {ranges.MAX_NODES} nodes in all, not {total}")
    return nodes


def _most(entry: object) -> int:
    texts = [entry.get(key) for key in ("host", "name", "ip")] if isinstance(entry, dict) else []
    largest = 1
    for text in texts:
        with contextlib.suppress(ValueError):  # told where the range is expanded
            largest = max(
                largest, ranges.count(text) if isinstance(text, str) and len(text) <= LONGEST else 1
            )
    return largest


def _each(pattern: str, description: str) -> AfterValidator:
    def check(values: tuple[str, ...]) -> tuple[str, ...]:
        if all(re.fullmatch(pattern, value) for value in values):
            return values
        raise should(f"should be {description}")

    return AfterValidator(check)


def _host(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if re.fullmatch(LABEL, value) is None and not _is_ipv6(value):
            raise should("should be a host name or address, or a range such as gpu[01-16]")
        if all(part.isdigit() for part in value.split(".")) and re.fullmatch(r"[0-9.]+", value):
            _usable(value)
    return values


def _ips(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_usable(value) for value in values)


def _usable(value: str) -> str:
    try:
        address = ipaddress.ip_address(value)
    except ValueError as error:
        raise should("should be an IP address, or a range such as 10.0.0.[11-26]") from error
    for kind, applies in (
        ("a loopback address", address.is_loopback),
        ("the unspecified address", address.is_unspecified or value.startswith("0.")),
        ("a broadcast address", value == "255.255.255.255"),
        ("a multicast address", address.is_multicast),
        # A link-local IPv6 address needs a zone, which Ray and NCCL cannot be given; IPv4's (DGX
        # Spark) need none.
        ("a link-local IPv6 address", address.version == 6 and address.is_link_local),
    ):
        if applies:
            raise should(f"should be an address the other nodes can reach: {value} is {kind}")
    return str(address)


def _is_ipv6(value: str) -> bool:
    try:
        return ipaddress.ip_address(value).version == 6 and "%" not in value
    except ValueError:
        return False


_MOST_GPUS = 128
# As `nvidia-smi -L` prints it.
_UUID = "GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


class _Gpus:
    """Reads a list of GPUs; everything else should be their number."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Keep the errors of a number for what is no list."""
        count = Annotated[int, Bounds(ge=1, le=_MOST_GPUS)]
        which = (
            Annotated[int, Bounds(ge=0, le=_MOST_GPUS - 1)]
            | Annotated[str, Field(pattern=f"^{_UUID}$")]
        )

        def read(value: object, number: core_schema.ValidatorFunctionWrapHandler) -> object:
            return _gpu_ids(value) if isinstance(value, tuple) else number(value)

        written = count | Annotated[list[which], Field(min_length=1, max_length=_MOST_GPUS)]
        return core_schema.no_info_wrap_validator_function(
            read,
            handler.generate_schema(count),
            json_schema_input_schema=handler.generate_schema(written),
        )


def _gpu_ids(value: tuple[object, ...]) -> tuple[str, ...]:
    ids = tuple(str(item) for item in value if type(item) in (int, str))
    if any(item.startswith("MIG-") for item in ids):
        # https://docs.nvidia.com/datacenter/tesla/mig-user-guide/: CUDA enumerates one instance,
        # and there is no peer-to-peer or CUDA IPC between instances.
        raise plainly(
            "cannot be instances of a GPU (MIG): CUDA shows a process only one of them, and ranks"
            " in two of them cannot share memory; name whole GPUs"
        )
    invalid = [item for item in value if type(item) not in (int, str) or not _is_gpu(str(item))]
    if invalid:
        raise plainly(
            f"should list indexes or UUIDs of GPUs (see `nvidia-smi -L`), not {invalid[0]!r:.60}"
        )
    if len(set(ids)) < len(ids) or not ids:
        raise plainly("should name each GPU once" if ids else "should name at least one GPU")
    return ids


def _is_gpu(text: str) -> bool:
    if re.fullmatch("[0-9]{1,3}", text):
        return int(text) < _MOST_GPUS
    return re.fullmatch(_UUID, text) is not None


Gpus = Annotated[int | tuple[str, ...], _Gpus()]
Hosts = Annotated[
    tuple[str, ...], BeforeValidator(_expand, json_schema_input_type=str), AfterValidator(_host)
]
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(_expand, json_schema_input_type=str),
    _each(
        r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?",
        "a name of at most 63 letters, digits, `-`, `_` and `.`",
    ),
]
Ips = Annotated[
    tuple[str, ...], BeforeValidator(_expand, json_schema_input_type=str), AfterValidator(_ips)
]
