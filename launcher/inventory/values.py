"""The types of values that only the file has: ranges of hosts, the environment, shared memory."""

from __future__ import annotations

import contextlib
import ipaddress
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from launcher import sizes
from launcher.inventory import ranges
from launcher.values import LABEL, LONGEST, EnvName, Like, plainly, should

# https://github.com/distribution/reference: domain/path:tag@digest, path in lower case.
_PATH_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = (
    rf"(?:(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?"
    rf"|\[[0-9a-fA-F:]+\])(?::[0-9]{{1,5}})?/)?{_PATH_PART}(?:/{_PATH_PART})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)

ClusterName = Annotated[
    str,
    Like(
        r"[a-z0-9](?:[a-z0-9_.-]{0,38}[a-z0-9])?",
        "a name of at most 40 lower-case letters, digits, `-`, `_` and `.`",
    ),
]
Image = Annotated[
    str, Like(_REFERENCE, "an image reference such as vllm/vllm-openai:v0.32.0 or name@sha256:…")
]
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
Word = Annotated[str, Like(r"[A-Za-z0-9_./=+@:-]+", "one word without spaces or shell characters")]


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
    if isinstance(nodes, list):
        total = sum(_most(entry) for entry in nodes)
        if total > ranges.MAX_NODES:
            raise plainly(f"should be at most {ranges.MAX_NODES} nodes in all, not {total}")
    return nodes


def _most(entry: object) -> int:
    texts = [entry.get(key) for key in ("host", "name", "ip")] if isinstance(entry, dict) else []
    most = 1
    for text in texts:
        with contextlib.suppress(ValueError):  # told where the range is expanded
            most = max(
                most, ranges.count(text) if isinstance(text, str) and len(text) <= LONGEST else 1
            )
    return most


def _each(pattern: str, what: str) -> AfterValidator:
    def check(values: tuple[str, ...]) -> tuple[str, ...]:
        if all(re.fullmatch(pattern, value) for value in values):
            return values
        raise should(f"should be {what}")

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
    for kind, fits in (
        ("a loopback address", address.is_loopback),
        ("the unspecified address", address.is_unspecified or value.startswith("0.")),
        ("a broadcast address", value == "255.255.255.255"),
        ("a multicast address", address.is_multicast),
        # A link-local IPv6 address needs a zone, which Ray and NCCL cannot be given; IPv4's (DGX
        # Spark) need none.
        ("a link-local IPv6 address", address.version == 6 and address.is_link_local),
    ):
        if fits:
            raise should(f"should be an address the other nodes can reach: {value} is {kind}")
    return str(address)


def _is_ipv6(value: str) -> bool:
    try:
        return ipaddress.ip_address(value).version == 6 and "%" not in value
    except ValueError:
        return False


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


def _shm(value: object) -> int | str:
    try:
        return value if value in ("private", "host") else sizes.read(value)
    except ValueError as error:
        raise should('should be "private", "host" or a size such as 10GiB') from error


Shm = Annotated[Any, BeforeValidator(_shm, json_schema_input_type=int | str)]


def _env_value(value: object) -> str:
    if isinstance(value, bool):
        word = "true" if value else "false"
        raise plainly(
            f'should be in quotes: "{word}" or "{int(value)}", whichever the program that reads it'
            " expects"
        )
    if isinstance(value, (str, int, float)):
        text = str(value)
        if any(character < " " or character == "\x7f" for character in text):
            raise plainly("should be one line without control characters")
        return text
    if value is None:
        raise plainly('should have a value; write "" for an empty one')
    raise should("should be text or a number")


EnvValue = Annotated[str, BeforeValidator(_env_value, json_schema_input_type=str | int | float)]
EnvMap = dict[EnvName, EnvValue]
