"""What a container that will serve sees: asked in the one that runs, or in a throw-away one with
the same rights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from launcher.errors import UnreadableAnswer
from launcher.model import Answer, Argv
from launcher.tools import decode, payload, untrusted

# A package that is broken has none.
_Version = Annotated[str, decode.Or("")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """A container's view.

    `memlock` and `shm` are bytes (`None`: no limit, or not known); `capabilities` are names such as
    `IPC_LOCK`; `libibverbs` is the library's path or empty; `env` holds only network variables
    (NCCL_*, GLOO_*, …).
    """

    running: bool
    memlock: int | None = None
    memlock_unlimited: bool = False
    capabilities: tuple[str, ...] = ()
    infiniband: tuple[str, ...] = ()
    imex: tuple[str, ...] = ()
    libibverbs: decode.Text = ""
    shm: int | None = None
    python: str = ""
    ray: _Version = ""
    torch: _Version = ""
    nccl: _Version = ""
    cuda: str = ""
    env: Mapping[str, decode.Text] = field(default_factory=dict)
    error: decode.Text = ""


# Bits of CapEff in the kernel's order (include/uapi/linux/capability.h).
_CAPABILITIES = (
    "CHOWN",
    "DAC_OVERRIDE",
    "DAC_READ_SEARCH",
    "FOWNER",
    "FSETID",
    "KILL",
    "SETGID",
    "SETUID",
    "SETPCAP",
    "LINUX_IMMUTABLE",
    "NET_BIND_SERVICE",
    "NET_BROADCAST",
    "NET_ADMIN",
    "NET_RAW",
    "IPC_LOCK",
    "IPC_OWNER",
    "SYS_MODULE",
    "SYS_RAWIO",
    "SYS_CHROOT",
    "SYS_PTRACE",
    "SYS_PACCT",
    "SYS_ADMIN",
    "SYS_BOOT",
    "SYS_NICE",
    "SYS_RESOURCE",
    "SYS_TIME",
    "SYS_TTY_CONFIG",
    "MKNOD",
    "LEASE",
    "AUDIT_WRITE",
    "AUDIT_CONTROL",
    "SETFCAP",
    "MAC_OVERRIDE",
    "MAC_ADMIN",
    "SYSLOG",
    "WAKE_ALARM",
    "BLOCK_SUSPEND",
    "AUDIT_READ",
    "PERFMON",
    "BPF",
    "CHECKPOINT_RESTORE",
)


def look() -> Argv:
    """Print what a container sees, as one JSON object (`payload/inside.py`); to be run inside it,
    with the image's Python.
    """
    return ("python3", "-c", payload.source("inside"))


def parse_look(answer: Answer, *, running: bool = True) -> Inside:
    """Read the answer; `running` is whether the container that serves was asked and not a
    throw-away one.

    A container that cannot be asked is a fact as well: its words are in `error`. Raises
    UnreadableAnswer when it answered, but not with what was asked.
    """
    if not answer.ok:
        return Inside(running=running, error=answer.tail or f"exit status {answer.code}")
    line = answer.out.strip().rpartition("\n")[2]
    try:
        said = untrusted.loads(line)
        bits = int(str(said["capeff"]), 16)
        found = {
            **said,
            "running": running,
            "memlock_unlimited": said["memlock"] is None,
            "capabilities": [name for bit, name in enumerate(_CAPABILITIES) if bits >> bit & 1],
        }
    except (KeyError, TypeError, ValueError) as error:
        raise UnreadableAnswer(
            f"the container's answer has another form ({error!r})",
            evidence=untrusted.shown(answer.out, last=True),
        ) from None
    return decode.fit(Inside, found, "the container's answer")
