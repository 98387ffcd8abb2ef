"""Simulated GPU faults, as given to `--gpu-trouble`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.core.errors import RequestError

BUSY = "busy"
DISPLAY = "display"
ECC = "ecc"
LOST = "lost"
NO_TOOLKIT = "no-toolkit"

# All but the last concern one GPU.
KINDS = {
    BUSY: "another user's process holds three quarters of the GPU's memory",
    DISPLAY: "a display is attached to the GPU",
    ECC: "the GPU has counted uncorrected memory errors",
    LOST: "the GPU has fallen off the bus",
    NO_TOOLKIT: "the host lacks the NVIDIA container toolkit, so Docker exposes no GPU",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuTrouble:
    """Fault of a GPU, or of the whole host if `index` is None."""

    host: str
    kind: str
    index: int | None

    @property
    def meaning(self) -> str:
        """Description of the fault."""
        return KINDS[self.kind]

    def __str__(self) -> str:
        """Format as on the command line: `node1:lost:3`."""
        return ":".join((self.host, self.kind, *(() if self.index is None else (str(self.index),))))


def parse_troubles(
    arguments: Sequence[str], *, hosts: Sequence[str], gpus: int
) -> tuple[GpuTrouble, ...]:
    """Parse `HOST:KIND[:INDEX]` for hosts with `gpus` GPUs each; the default index is 0.

    Raises RequestError with all mistakes.
    """
    mistakes = [mistake for argument in arguments for mistake in _mistakes(argument, hosts, gpus)]
    if mistakes:
        raise RequestError(
            "invalid `--gpu-trouble`" if len(mistakes) > 1 else f"`--gpu-trouble`: {mistakes[0]}",
            evidence=mistakes if len(mistakes) > 1 else (),
            hint="write it like `--gpu-trouble node1:lost:3`; the kinds are " + ", ".join(KINDS),
        )
    return tuple(dict.fromkeys(_parse_trouble(argument) for argument in arguments))


def _mistakes(argument: str, hosts: Sequence[str], gpus: int) -> Iterator[str]:
    host, kind, index = _split(argument)
    if host not in hosts:
        yield f"{argument}: there is no host `{host}`, only {', '.join(hosts)}"
    if kind not in KINDS:
        yield f"{argument}: `{kind}` is an unknown kind"
    elif kind == NO_TOOLKIT and index:
        yield f"{argument}: {kind} applies to the entire host and takes no index"
    elif index and not (index.isascii() and index.isdigit() and int(index) < gpus):
        yield f"{argument}: there is no GPU {index}, only 0 to {gpus - 1}"


def _parse_trouble(argument: str) -> GpuTrouble:
    host, kind, index = _split(argument)
    return GpuTrouble(
        host=host, kind=kind, index=None if kind == NO_TOOLKIT else int(index) if index else 0
    )


def _split(argument: str) -> tuple[str, str, str]:
    host, _, rest = argument.partition(":")
    kind, _, index = rest.partition(":")
    return host, kind, index
