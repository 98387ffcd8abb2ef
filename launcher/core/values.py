"""Types of inventory and job values: patterns, bounds and parsers, for dataclass fields.

All text is safe in an argv or a name: no shell metacharacters, leading dashes or control
characters. pydantic validates these types but is not imported here.
"""

import ipaddress
import re
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

from . import sizes

MAX_LENGTH = 4096
_T = TypeVar("_T")


class InvalidValue(ValueError):
    """An invalid value; with `show_value`, the message ends with the value."""

    def __init__(self, text: str, *, show_value: bool) -> None:
        super().__init__(text)
        self.show_value = show_value


def value_error(text: str) -> InvalidValue:
    """Return an error such as `should be a size`; the message later adds the value."""
    return InvalidValue(text, show_value=True)


def bare_error(text: str) -> InvalidValue:
    """Return an error with a complete message, without the value."""
    return InvalidValue(text, show_value=False)


def is_whole_number(value: object) -> bool:
    """True for an integer; Python counts `True` and `False` among them."""
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of a number (`ge`, `gt`, `le`), or of the length of a list or a text."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    min_length: int | None = None
    max_length: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        """Add the bounds; pydantic's schemas are dictionaries
        (https://docs.pydantic.dev/latest/api/pydantic_core_schema/).
        """
        bounds = {key: bound for key, bound in asdict(self).items() if bound is not None}
        return {**handler(source), **bounds}


@dataclass(frozen=True, slots=True)
class Converter:
    """A converter from written values; `input_type` is their type."""

    convert: Callable[[object], object]
    input_type: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        """Convert before pydantic checks the type."""
        return {
            "type": "function-before",
            "function": {"type": "no-info", "function": self.convert},
            "schema": handler(source),
            "json_schema_input_schema": handler.generate_schema(self.input_type),
        }


@dataclass(frozen=True, slots=True)
class Pattern:
    """Text that fully matches `pattern`; `description` completes "should be …"."""

    pattern: str
    description: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        """Check after pydantic's type check."""
        return {
            "type": "function-after",
            "function": {"type": "no-info", "function": self._check},
            "schema": handler(source),
        }

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """Export the pattern to editors."""
        return {**handler(schema), "pattern": f"^(?:{self.pattern})$"}

    def _check(self, value: str) -> str:
        # Bound the length first: matching may take quadratic time.
        if len(value) > MAX_LENGTH or re.fullmatch(self.pattern, value) is None:
            raise value_error(f"should be {self.description}")
        return value


@dataclass(frozen=True, slots=True)
class _FromMapping:
    """Reads a dataclass from a mapping: keys without a value count as unset, lists become tuples,
    and values are as strict as the file around them.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        """Prepare the mapping before pydantic checks its values."""
        keys = {key_of(field.name) for field in fields(source)}

        def read(value: object) -> object:
            if not isinstance(value, dict):
                return value
            return {
                key: tuple(item) if isinstance(item, list) else item
                for key, item in without_unset(value, keys).items()
            }

        schema = handler(source)
        handler.resolve_ref_schema(schema)["strict"] = False  # otherwise it requires an instance
        return {
            "type": "function-before",
            "function": {"type": "no-info", "function": read},
            "schema": schema,
        }


FromMapping = Annotated[_T, _FromMapping()]


def key_of(name: str) -> str:
    """Return the key of a field: `class` for `class_`, whose underscore avoids a Python keyword."""
    return name.removesuffix("_")


# Settings of pydantic for files.
STRICT: Any = {
    "extra": "forbid",
    "strict": True,
    "frozen": True,
    "hide_input_in_errors": True,
    "use_attribute_docstrings": True,
    "alias_generator": key_of,
}


def without_unset(value: dict[Any, Any], keys: Collection[str]) -> dict[Any, Any]:
    """Return a mapping without the known keys that have no value."""
    return {key: item for key, item in value.items() if item is not None or key not in keys}


def expand_shorthand(key: str, *kinds: type) -> Callable[[object], object]:
    """Let `section: VALUE` stand for `section: {key: VALUE}` if VALUE is of one of `kinds`."""

    def read(value: object) -> object:
        return {key: value} if isinstance(value, kinds) and not isinstance(value, bool) else value

    return read


LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?"
# No `..`: the path must be the one that the user reads.
_ABSOLUTE = r"/(?!.*(?:^|/)\.\.(?:/|$))[A-Za-z0-9._@%+=/-]*[A-Za-z0-9._@%+=-]/?"
_LOCAL = r"(?:~/|/|\./|\.\./)?[A-Za-z0-9._@%+=][A-Za-z0-9 ._@%+=/-]*"

# https://github.com/distribution/reference: domain/path:tag@digest, path in lower case.
_PATH_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = (
    rf"(?:(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?"
    rf"|\[[0-9a-fA-F:]+\])(?::[0-9]{{1,5}})?/)?{_PATH_PART}(?:/{_PATH_PART})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)

HostName = Annotated[
    str, Pattern(rf"{LABEL}|[0-9a-fA-F:]+", "a host name or an IP address, without a port")
]
ClusterName = Annotated[
    str,
    Pattern(
        r"[a-z0-9](?:[a-z0-9_.-]{0,38}[a-z0-9])?",
        "a name of at most 40 lower-case letters, digits, `-`, `_` and `.`",
    ),
]
Image = Annotated[
    str, Pattern(_REFERENCE, "an image reference such as vllm/vllm-openai:v0.33.0 or name@sha256:…")
]
ArgvItem = Annotated[
    str, Pattern(r"[A-Za-z0-9_./=+@:-]+", "one word without spaces or shell characters")
]
ArgvItems = Annotated[tuple[ArgvItem, ...], Bounds(min_length=1)]
RayVersion = Annotated[
    str,
    Pattern(
        r"none|[0-9]+\.[0-9]+\.[0-9]+(?:(?:a|b|rc)[0-9]+)?(?:\.(?:post|dev)[0-9]+)?",
        'a full version such as "2.60.0", or none',
    ),
]
User = Annotated[str, Pattern(r"[A-Za-z_][A-Za-z0-9_.-]*(?:@[A-Za-z0-9.-]+)?", "a user name")]
Jump = Annotated[
    str,
    Pattern(
        rf"(?:[A-Za-z_][A-Za-z0-9_.-]*@)?{LABEL}(?::[0-9]{{1,5}})?",
        "a host such as ops@bastion.example:22",
    ),
]
NodePath = Annotated[
    str,
    Pattern(
        _ABSOLUTE,
        "an absolute path on the nodes, without spaces or `..`, such as /data/huggingface",
    ),
]
LocalPath = Annotated[str, Pattern(_LOCAL, "a path on this machine, such as ~/.ssh/id_ed25519")]
EnvName = Annotated[
    str,
    Pattern(
        r"[A-Za-z_][A-Za-z0-9_]*",
        "the name of an environment variable: letters, digits and `_`, not starting with a digit",
    ),
]
Model = Annotated[
    str,
    Pattern(
        r"[A-Za-z0-9_/.][A-Za-z0-9_./@:+=-]*",
        "a model such as Qwen/Qwen3-8B, or a path inside the container",
    ),
]
NonEmpty = Annotated[str, Pattern(r"[^\x00-\x1f\x7f]+", "text of one line that is not empty")]

# HOST[:CONTAINER][:rwm] or a CDI name, as for `docker run --device`.
Device = Annotated[
    str,
    Pattern(
        r"/dev/(?!.*\.\.)[A-Za-z0-9._/-]*[A-Za-z0-9](?::/[A-Za-z0-9._/-]+)?(?::(?=[rwm])r?w?m?)?"
        r"|[a-z0-9][a-z0-9.-]*/[A-Za-z0-9][A-Za-z0-9_-]*=[A-Za-z0-9][A-Za-z0-9_.:-]*",
        "a device of the nodes such as /dev/gdrdrv or /dev/gdrdrv:/dev/gdrdrv:rw, or a CDI name"
        " such as vendor.com/class=name",
    ),
]
# capabilities(7), and Docker's ALL.
_CAPABILITIES = (
    "ALL AUDIT_CONTROL AUDIT_READ AUDIT_WRITE BLOCK_SUSPEND BPF CHECKPOINT_RESTORE CHOWN"
    " DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID IPC_LOCK IPC_OWNER KILL LEASE LINUX_IMMUTABLE"
    " MAC_ADMIN MAC_OVERRIDE MKNOD NET_ADMIN NET_BIND_SERVICE NET_BROADCAST NET_RAW PERFMON"
    " SETFCAP SETGID SETPCAP SETUID SYSLOG SYS_ADMIN SYS_BOOT SYS_CHROOT SYS_MODULE SYS_NICE"
    " SYS_PACCT SYS_PTRACE SYS_RAWIO SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG WAKE_ALARM"
)


def _parse_capability(value: object) -> object:
    return value.upper().removeprefix("CAP_") if isinstance(value, str) else value


Capability = Annotated[
    str,
    Pattern(
        _CAPABILITIES.replace(" ", "|"),
        "a capability such as IPC_LOCK or SYS_PTRACE (see `man capabilities`)",
    ),
    Converter(_parse_capability, str),
]
# Limits of Docker: ulimit.go of https://github.com/docker/go-units.
UlimitName = Annotated[
    str,
    Pattern(
        "core|cpu|data|fsize|locks|memlock|msgqueue|nice|nofile|nproc|rss|rtprio|rttime|sigpending"
        "|stack",
        "a limit that Docker supports, such as memlock, nofile, nproc or stack",
    ),
]


def _parse_ulimit(value: object) -> str:
    """Parse a limit as in Docker Compose: number, SOFT:HARD or mapping; -1 means no limit."""
    if isinstance(value, dict) and value.keys() == {"soft", "hard"}:
        value = f"{value['soft']}:{value['hard']}"
    text = str(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    if not re.fullmatch(r"(?:-1|[0-9]{1,18})(?::(?:-1|[0-9]{1,18}))?", text):
        raise value_error("should be a number (-1: no limit), SOFT:HARD, or {soft: …, hard: …}")
    soft, hard = int(text.partition(":")[0]), int(text.rpartition(":")[2])
    if hard != -1 and not 0 <= soft <= hard:
        raise value_error("should have a soft limit that is not above the hard one")
    return text


Ulimit = Annotated[str, Converter(_parse_ulimit, int | str | dict[str, int])]
Port = Annotated[int, Bounds(ge=1, le=65535)]


def _parse_argument(value: object) -> object:
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


Argument = Annotated[NonEmpty, Converter(_parse_argument, str | int | float)]


def to_json_value(value: object) -> object:
    """Return `value` as plain JSON types: a WrittenFloat becomes a float."""
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return [to_json_value(item) for item in value]
    if isinstance(value, dict):
        return {key: to_json_value(item) for key, item in value.items()}
    return value


EngineArg = Annotated[
    str,
    Pattern(
        r"(?:--)?[A-Za-z][A-Za-z0-9_-]{0,99}", "the name of an argument, such as max_model_len"
    ),
]
JsonValue = Annotated[Any, Converter(to_json_value, Any)]


LogDriver = Annotated[
    str,
    Pattern(
        r"(?!none$)[A-Za-z0-9][A-Za-z0-9._/:-]*",
        "a Docker log driver such as json-file, local or journald; none would leave nothing to"
        " read",
    ),
]
LogOption = Annotated[
    str, Pattern(r"[a-z][a-z0-9_.-]*", "an option of the log driver, such as max-size or max-file")
]


def _parse_bind(value: object) -> object:
    try:
        return str(ipaddress.ip_address(value)) if isinstance(value, str) else value
    except ValueError as error:
        raise value_error(
            "should be an IP address of the head, or 0.0.0.0 for all of them"
        ) from error


Bind = Annotated[str, Converter(_parse_bind, str)]


def _parse_size(value: object) -> int:
    try:
        return sizes.parse_size(value)
    except ValueError as error:
        raise value_error("should be a size such as 2GiB or 200MB") from error


Size = Annotated[int, Converter(_parse_size, int | str)]


def _parse_duration(value: object) -> float:
    try:
        return sizes.parse_duration("" if isinstance(value, bool) else str(value))
    except ValueError as error:
        raise value_error("should be a duration such as 90s, 10m or 1h") from error


DURATION = Converter(_parse_duration, int | float | str)


def _parse_shm(value: object) -> object:
    try:
        return value if value in ("private", "host") else sizes.parse_size(value)
    except ValueError as error:
        raise value_error('should be "private", "host" or a size such as 10GiB') from error


Shm = Annotated[int | Literal["private", "host"], Converter(_parse_shm, int | str)]


def _parse_env_value(value: object) -> str:
    if isinstance(value, bool):
        literal = "true" if value else "false"
        raise bare_error(
            f'should be in quotes: "{literal}" or "{int(value)}", whichever the program that reads'
            " it expects"
        )
    if isinstance(value, (str, int, float)):
        text = str(value)
        if any(character < " " or character == "\x7f" for character in text):
            raise bare_error("should be one line without control characters")
        return text
    if value is None:
        raise bare_error('should have a value; write "" for an empty one')
    raise value_error("should be text or a number")


EnvValue = Annotated[str, Converter(_parse_env_value, str | int | float)]


def parse_mount(value: object) -> object:
    """Parse Docker's short form `SOURCE:TARGET[:ro]` into a mapping."""
    if not isinstance(value, str):
        return value
    source, _, rest = value.partition(":")
    target, _, mode = rest.partition(":")
    if not target or mode not in ("", "ro", "rw"):
        raise value_error("should be SOURCE:TARGET or SOURCE:TARGET:ro, both absolute paths")
    return {"source": source, "target": target, "read_only": mode == "ro"}


def _parse_question(value: object) -> str:
    if value is True:
        return ""
    if isinstance(value, str) and re.fullmatch(r"[^\x00-\x1f\x7f]{1,200}", value):
        return value
    raise value_error("should be true, or one line of text for the prompt")


Question = Annotated[str, Converter(_parse_question, bool | str)]
