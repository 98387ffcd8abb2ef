"""Value types of `nodes` entries: host ranges, addresses and GPUs."""

import contextlib
import ipaddress
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from launcher.core.values import LABEL, MAX_LENGTH, Bounds, Pattern, bare_error, value_error
from launcher.inventory import ranges

# IFNAMSIZ is 16, with the final NUL; dev_valid_name() forbids `.`, `..`, `/`, `:` and spaces.
Interface = Annotated[
    str,
    Pattern(
        r"(?!\.{1,2}$)[A-Za-z0-9._][A-Za-z0-9._@-]{0,14}",
        "the exact name of one network interface, at most 15 characters, such as eth0 (see `ip -br"
        " link`)",
    ),
]
Hca = Annotated[
    str,
    Pattern(
        r"[A-Za-z][A-Za-z0-9_-]{0,62}(?::[1-9][0-9]?)?",
        "the exact name of one RDMA device, such as mlx5_0 or mlx5_0:1 (see `ls"
        " /sys/class/infiniband`)",
    ),
]


def _expand(value: object) -> tuple[str, ...]:
    if not isinstance(value, str):
        raise value_error("should be text")
    if len(value) > MAX_LENGTH:
        raise value_error(f"should be at most {MAX_LENGTH} characters long")
    try:
        return ranges.expand_range(value)
    except ValueError as error:
        raise value_error(str(error)) from error


def limit_node_count(nodes: object) -> object:
    """Limit the total number of nodes before expanding ranges."""
    if isinstance(nodes, tuple):
        total = sum(_entry_node_count(entry) for entry in nodes)
        if total > ranges.MAX_NODES:
            raise bare_error(f"should be at most {ranges.MAX_NODES} nodes in all, not {total}")
    return nodes


def _entry_node_count(entry: object) -> int:
    texts = [entry.get(key) for key in ("host", "name", "ip")] if isinstance(entry, dict) else []
    largest = 1
    for text in texts:
        with contextlib.suppress(ValueError):  # reported when the range is expanded
            largest = max(
                largest,
                ranges.count_names(text)
                if isinstance(text, str) and len(text) <= MAX_LENGTH
                else 1,
            )
    return largest


def _match_all(pattern: str, description: str) -> AfterValidator:
    def check(values: tuple[str, ...]) -> tuple[str, ...]:
        if all(re.fullmatch(pattern, value) for value in values):
            return values
        raise value_error(f"should be {description}")

    return AfterValidator(check)


def _check_hosts(values: tuple[str, ...]) -> tuple[str, ...]:
    for value in values:
        if re.fullmatch(LABEL, value) is None and not _is_ipv6(value):
            raise value_error("should be a host name or address, or a range such as gpu[01-16]")
        if all(part.isdigit() for part in value.split(".")) and re.fullmatch(r"[0-9.]+", value):
            _address(value)
    return values


def _check_ips(values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_address(value) for value in values)


def _address(value: str) -> str:
    try:
        address = ipaddress.ip_address(value)
    except ValueError as error:
        raise value_error("should be an IP address, or a range such as 10.0.0.[11-26]") from error
    for kind, applies in (
        ("a loopback address", address.is_loopback),
        ("the unspecified address", address.is_unspecified or value.startswith("0.")),
        ("a broadcast address", value == "255.255.255.255"),
        ("a multicast address", address.is_multicast),
        # Link-local IPv6 needs a zone, which Ray and NCCL do not support; IPv4 (DGX Spark) works.
        ("a link-local IPv6 address", address.version == 6 and address.is_link_local),
    ):
        if applies:
            raise bare_error(f"should be an address that other nodes can reach: {value} is {kind}")
    return str(address)


def _is_ipv6(value: str) -> bool:
    try:
        return ipaddress.ip_address(value).version == 6 and "%" not in value
    except ValueError:
        return False


_MAX_GPUS = 128
# https://docs.nvidia.com/datacenter/tesla/mig-user-guide/: CUDA enumerates only one instance,
# without peer-to-peer or CUDA IPC between instances.
NO_MIG = (
    "cannot be instances of a GPU (MIG): CUDA shows a process only one of them, and ranks in two of"
    " them cannot share memory; name whole GPUs"
)
# As printed by `nvidia-smi -L`.
_UUID = "GPU-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"


class _Gpus:
    """Accepts a list of GPUs or their number."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Report the errors of a number for anything but a list."""
        count = Annotated[int, Bounds(ge=1, le=_MAX_GPUS)]
        gpu_id = (
            Annotated[int, Bounds(ge=0, le=_MAX_GPUS - 1)]
            | Annotated[str, Field(pattern=f"^{_UUID}$")]
        )

        def read(value: object, number: core_schema.ValidatorFunctionWrapHandler) -> object:
            return _parse_gpu_ids(value) if isinstance(value, tuple) else number(value)

        input_type = count | Annotated[list[gpu_id], Field(min_length=1, max_length=_MAX_GPUS)]
        return core_schema.no_info_wrap_validator_function(
            read,
            handler.generate_schema(count),
            json_schema_input_schema=handler.generate_schema(input_type),
        )


def _parse_gpu_ids(value: tuple[object, ...]) -> tuple[str, ...]:
    ids = tuple(str(item) for item in value if type(item) in (int, str))
    if any(item.startswith("MIG-") for item in ids):
        raise bare_error(NO_MIG)
    invalid = [item for item in value if type(item) not in (int, str) or not _is_gpu(str(item))]
    if invalid:
        raise bare_error(
            f"should list indexes or UUIDs of GPUs (see `nvidia-smi -L`), not {invalid[0]!r:.60}"
        )
    if len(set(ids)) < len(ids) or not ids:
        raise bare_error("should name each GPU once" if ids else "should name at least one GPU")
    return ids


def _is_gpu(text: str) -> bool:
    if re.fullmatch("[0-9]{1,3}", text):
        return int(text) < _MAX_GPUS
    return re.fullmatch(_UUID, text) is not None


Gpus = Annotated[int | tuple[str, ...], _Gpus()]
Hosts = Annotated[
    tuple[str, ...],
    BeforeValidator(_expand, json_schema_input_type=str),
    AfterValidator(_check_hosts),
]
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(_expand, json_schema_input_type=str),
    _match_all(
        r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?",
        "a name of at most 63 letters, digits, `-`, `_` and `.`",
    ),
]
Ips = Annotated[
    tuple[str, ...],
    BeforeValidator(_expand, json_schema_input_type=str),
    AfterValidator(_check_ips),
]
