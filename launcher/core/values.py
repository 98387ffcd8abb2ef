"""What a value may look like, in words and as a pattern, and how it is read.

All are safe in an argv or a name: the patterns are conservative on purpose, and none admits a shell
metacharacter, a leading dash or a control character.

Dataclasses name these as types of their fields, so that pydantic can validate them as they are;
pydantic itself is not imported here.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal, TypeVar

from launcher.core import sizes

LONGEST = 4096
_T = TypeVar("_T")


class Wrong(ValueError):
    """A value is not what it should be; `shown` when what it is should be told, too."""

    def __init__(self, text: str, *, shown: bool) -> None:
        super().__init__(text)
        self.shown = shown


def should(text: str) -> Wrong:
    """An error that reads `should be …`; the value it complains about is added where errors are put
    into words.
    """
    return Wrong(text, shown=True)


def plainly(text: str) -> Wrong:
    """An error whose words are complete: the value is not shown."""
    return Wrong(text, shown=False)


@dataclass(frozen=True, slots=True)
class Bounds:
    """A number that is at least `ge` (or greater than `gt`) and at most `le`, or a list of at least
    `min_length` items.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    min_length: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        """Add the bounds; a schema of pydantic's is a dictionary
        (https://docs.pydantic.dev/latest/api/pydantic_core_schema/).
        """
        bounds = {key: bound for key, bound in asdict(self).items() if bound is not None}
        return {**handler(source), **bounds}


@dataclass(frozen=True, slots=True)
class Read:
    """A value that `read` makes from what people write; `written` is the type of that."""

    read: Callable[[object], object]
    written: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        """Read before pydantic looks at the type."""
        return {
            "type": "function-before",
            "function": {"type": "no-info", "function": self.read},
            "schema": handler(source),
            "json_schema_input_schema": handler.generate_schema(self.written),
        }


@dataclass(frozen=True, slots=True)
class Like:
    """Text that matches `pattern` from end to end; `what` completes "should be …"."""

    pattern: str
    what: str

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        """Check after pydantic has seen that it is text."""
        return {
            "type": "function-after",
            "function": {"type": "no-info", "function": self._check},
            "schema": handler(source),
        }

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        """Give editors the same pattern."""
        return {**handler(schema), "pattern": f"^(?:{self.pattern})$"}

    def _check(self, value: str) -> str:
        # The length is bounded first: matching may take time that grows with its square.
        if len(value) > LONGEST or re.fullmatch(self.pattern, value) is None:
            raise should(f"should be {self.what}")
        return value


@dataclass(frozen=True, slots=True)
class _FromMapping:
    """Reads a mapping in the file as a dataclass: a known key without a value counts as not
    written, lists become tuples, and each value is as strict as the file around it.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        """Make a mapping ready before pydantic looks at its values."""
        keys = {field.name for field in fields(source)}

        def read(value: object) -> object:
            if not isinstance(value, dict):
                return value
            return {
                key: tuple(item) if isinstance(item, list) else item
                for key, item in without_unset(value, keys).items()
            }

        schema = handler(source)
        handler.resolve_ref_schema(schema)["strict"] = False  # or it wants an instance
        return {
            "type": "function-before",
            "function": {"type": "no-info", "function": read},
            "schema": schema,
        }


FromMapping = Annotated[_T, _FromMapping()]


def without_unset(value: dict[Any, Any], keys: Collection[str]) -> dict[Any, Any]:
    """Return what a mapping holds but for known keys without a value, which count as not
    written.
    """
    return {key: item for key, item in value.items() if item is not None or key not in keys}


def shorthand(key: str, *kinds: type) -> Callable[[object], object]:
    """Let `section: VALUE` stand for `section: {key: VALUE}`, where VALUE is of one of `kinds`."""

    def read(value: object) -> object:
        return {key: value} if isinstance(value, kinds) and not isinstance(value, bool) else value

    return read


LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?"
# No component may be `..`: what is mounted or written should be what is read.
_ABSOLUTE = r"/(?!.*(?:^|/)\.\.(?:/|$))[A-Za-z0-9._@%+=/-]*[A-Za-z0-9._@%+=-]/?"
_LOCAL = r"(?:~/|/|\./|\.\./)?[A-Za-z0-9._@%+=][A-Za-z0-9 ._@%+=/-]*"

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
Word = Annotated[str, Like(r"[A-Za-z0-9_./=+@:-]+", "one word without spaces or shell characters")]
Words = Annotated[tuple[Word, ...], Bounds(min_length=1)]
RayVersion = Annotated[
    str,
    Like(
        r"none|[0-9]+\.[0-9]+\.[0-9]+(?:(?:a|b|rc)[0-9]+)?(?:\.(?:post|dev)[0-9]+)?",
        'a full version such as "2.60.0", or none',
    ),
]
User = Annotated[str, Like(r"[A-Za-z_][A-Za-z0-9_.-]*(?:@[A-Za-z0-9.-]+)?", "a login name")]
Jump = Annotated[
    str,
    Like(
        rf"(?:[A-Za-z_][A-Za-z0-9_.-]*@)?{LABEL}(?::[0-9]{{1,5}})?",
        "a host such as ops@bastion.example:22",
    ),
]
NodePath = Annotated[
    str,
    Like(
        _ABSOLUTE,
        "an absolute path on the nodes, without spaces or `..`, such as /data/huggingface",
    ),
]
LocalPath = Annotated[str, Like(_LOCAL, "a path on this machine, such as ~/.ssh/id_ed25519")]
EnvName = Annotated[
    str,
    Like(
        r"[A-Za-z_][A-Za-z0-9_]*",
        "the name of an environment variable: letters, digits and `_`, not starting with a digit",
    ),
]
Model = Annotated[
    str,
    Like(
        r"[A-Za-z0-9_/.][A-Za-z0-9_./@:+=-]*",
        "a model such as Qwen/Qwen3-8B, or a path inside the container",
    ),
]
NonEmpty = Annotated[str, Like(r"[^\x00-\x1f\x7f]+", "text of one line that is not empty")]

# HOST[:CONTAINER][:rwm], or a CDI name, as `docker run --device` takes them.
Device = Annotated[
    str,
    Like(
        r"/dev/(?!.*\.\.)[A-Za-z0-9._/-]*[A-Za-z0-9](?::/[A-Za-z0-9._/-]+)?(?::(?=[rwm])r?w?m?)?"
        r"|[a-z0-9][a-z0-9.-]*/[A-Za-z0-9][A-Za-z0-9_-]*=[A-Za-z0-9][A-Za-z0-9_.:-]*",
        "a device of the nodes such as /dev/gdrdrv or /dev/gdrdrv:/dev/gdrdrv:rw, or a CDI name"
        " such as vendor.com/class=name",
    ),
]
# capabilities(7); ALL is Docker's own.
_CAPABILITIES = (
    "ALL AUDIT_CONTROL AUDIT_READ AUDIT_WRITE BLOCK_SUSPEND BPF CHECKPOINT_RESTORE CHOWN"
    " DAC_OVERRIDE DAC_READ_SEARCH FOWNER FSETID IPC_LOCK IPC_OWNER KILL LEASE LINUX_IMMUTABLE"
    " MAC_ADMIN MAC_OVERRIDE MKNOD NET_ADMIN NET_BIND_SERVICE NET_BROADCAST NET_RAW PERFMON"
    " SETFCAP SETGID SETPCAP SETUID SYSLOG SYS_ADMIN SYS_BOOT SYS_CHROOT SYS_MODULE SYS_NICE"
    " SYS_PACCT SYS_PTRACE SYS_RAWIO SYS_RESOURCE SYS_TIME SYS_TTY_CONFIG WAKE_ALARM"
)


def _capability(value: object) -> object:
    return value.upper().removeprefix("CAP_") if isinstance(value, str) else value


Capability = Annotated[
    str,
    Like(
        _CAPABILITIES.replace(" ", "|"),
        "a capability such as IPC_LOCK or SYS_PTRACE (see `man capabilities`)",
    ),
    Read(_capability, str),
]
# What Docker knows: ulimit.go of https://github.com/docker/go-units.
UlimitName = Annotated[
    str,
    Like(
        "core|cpu|data|fsize|locks|memlock|msgqueue|nice|nofile|nproc|rss|rtprio|rttime|sigpending"
        "|stack",
        "a limit that Docker knows, such as memlock, nofile, nproc or stack",
    ),
]


def _ulimit(value: object) -> str:
    """Read what Docker Compose takes, too: a number, SOFT:HARD, or both by name; -1: no limit."""
    if isinstance(value, dict) and value.keys() == {"soft", "hard"}:
        value = f"{value['soft']}:{value['hard']}"
    text = str(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else ""
    if not re.fullmatch(r"(?:-1|[0-9]{1,18})(?::(?:-1|[0-9]{1,18}))?", text):
        raise should("should be a number (-1: no limit), SOFT:HARD, or {soft: …, hard: …}")
    soft, hard = int(text.partition(":")[0]), int(text.rpartition(":")[2])
    if hard != -1 and not 0 <= soft <= hard:
        raise should("should have a soft limit that is not above the hard one")
    return text


Ulimit = Annotated[str, Read(_ulimit, int | str | dict[str, int])]
Port = Annotated[int, Bounds(ge=1, le=65535)]


def _argument(value: object) -> object:
    return str(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


Argument = Annotated[NonEmpty, Read(_argument, str | int | float)]


def plain(value: object) -> object:
    """Return `value` as JSON has it: a decimal number no longer remembers how it was written."""
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


EngineArg = Annotated[
    str,
    Like(r"(?:--)?[A-Za-z][A-Za-z0-9_-]{0,99}", "the name of an argument, such as max_model_len"),
]
Plain = Annotated[Any, Read(plain, Any)]


LogDriver = Annotated[
    str,
    Like(
        r"(?!none$)[A-Za-z0-9][A-Za-z0-9._/:-]*",
        "a log driver of Docker's such as json-file, local or journald; of none, nothing could be"
        " read",
    ),
]
LogOption = Annotated[
    str, Like(r"[a-z][a-z0-9_.-]*", "an option of the log driver, such as max-size or max-file")
]


def _bind(value: object) -> object:
    try:
        return str(ipaddress.ip_address(value)) if isinstance(value, str) else value
    except ValueError as error:
        raise should("should be an IP address of the head, or 0.0.0.0 for all of them") from error


Bind = Annotated[str, Read(_bind, str)]


def _size(value: object) -> int:
    try:
        return sizes.read(value)
    except ValueError as error:
        raise should("should be a size such as 2GiB or 200MB") from error


Size = Annotated[int, Read(_size, int | str)]


def _shm(value: object) -> object:
    try:
        return value if value in ("private", "host") else sizes.read(value)
    except ValueError as error:
        raise should('should be "private", "host" or a size such as 10GiB') from error


Shm = Annotated[int | Literal["private", "host"], Read(_shm, int | str)]


def _env_value(value: object) -> str:
    if isinstance(value, bool):
        literal = "true" if value else "false"
        raise plainly(
            f'should be in quotes: "{literal}" or "{int(value)}", whichever the program that reads'
            " it expects"
        )
    if isinstance(value, (str, int, float)):
        text = str(value)
        if any(character < " " or character == "\x7f" for character in text):
            raise plainly("should be one line without control characters")
        return text
    if value is None:
        raise plainly('should have a value; write "" for an empty one')
    raise should("should be text or a number")


EnvValue = Annotated[str, Read(_env_value, str | int | float)]


def mount(value: object) -> object:
    """Read `SOURCE:TARGET[:ro]`, which is short for a mapping, as Docker's `--volume` has it."""
    if not isinstance(value, str):
        return value
    source, _, rest = value.partition(":")
    target, _, mode = rest.partition(":")
    if not target or mode not in ("", "ro", "rw"):
        raise should("should be SOURCE:TARGET or SOURCE:TARGET:ro, both absolute paths")
    return {"source": source, "target": target, "read_only": mode == "ro"}


def _question(value: object) -> str:
    if value is True:
        return ""
    if isinstance(value, str) and re.fullmatch(r"[^\x00-\x1f\x7f]{1,200}", value):
        return value
    raise should("should be true, or a line of text to ask with")


Question = Annotated[str, Read(_question, bool | str)]
