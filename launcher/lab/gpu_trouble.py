"""What can be wrong with the stand-in GPUs of a practice host, in the words of `--gpu-trouble`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launcher.core.errors import RequestError

BUSY = "busy"
DISPLAY = "display"
ECC = "ecc"
LOST = "lost"
NO_TOOLKIT = "no-toolkit"

# What each kind is; all but the last are of one GPU.
KINDS = {
    BUSY: "somebody else's process holds three quarters of the GPU's memory",
    DISPLAY: "a display is attached to the GPU",
    ECC: "the GPU has counted uncorrected memory errors",
    LOST: "the GPU has fallen off the bus",
    NO_TOOLKIT: "the host lacks the NVIDIA container toolkit, so Docker hands out no GPU",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Something wrong with one GPU of a host; `index` is None where it concerns the whole host."""

    host: str
    kind: str
    index: int | None

    @property
    def meaning(self) -> str:
        """What is wrong, in words."""
        return KINDS[self.kind]

    def __str__(self) -> str:
        """As it is asked for: `node1:lost:3`."""
        return ":".join((self.host, self.kind, *(() if self.index is None else (str(self.index),))))


def read(words: Sequence[str], *, hosts: Sequence[str], gpus: int) -> tuple[Trouble, ...]:
    """Read `HOST:KIND[:INDEX]` of hosts that have `gpus` GPUs each; without an index it is GPU 0.

    Raises RequestError with every mistake.
    """
    mistakes = [text for word in words for text in _mistakes(word, hosts, gpus)]
    if mistakes:
        raise RequestError(
            "`--gpu-trouble` cannot be made"
            if len(mistakes) > 1
            else f"`--gpu-trouble`: {mistakes[0]}",
            evidence=mistakes if len(mistakes) > 1 else (),
            hint="write it like `--gpu-trouble node1:lost:3`; the kinds are " + ", ".join(KINDS),
        )
    return tuple(dict.fromkeys(_trouble(word) for word in words))


def _mistakes(word: str, hosts: Sequence[str], gpus: int) -> Iterator[str]:
    host, kind, index = _split(word)
    if host not in hosts:
        yield f"{word}: there is no host `{host}`, only {', '.join(hosts)}"
    if kind not in KINDS:
        yield f"{word}: `{kind}` is no kind of trouble"
    elif kind == NO_TOOLKIT and index:
        yield f"{word}: {kind} concerns the whole host and takes no index"
    elif index and not (index.isascii() and index.isdigit() and int(index) < gpus):
        yield f"{word}: there is no GPU {index}, only 0 to {gpus - 1}"


def _trouble(word: str) -> Trouble:
    host, kind, index = _split(word)
    return Trouble(
        host=host, kind=kind, index=None if kind == NO_TOOLKIT else int(index) if index else 0
    )


def _split(word: str) -> tuple[str, str, str]:
    host, _, rest = word.partition(":")
    kind, _, index = rest.partition(":")
    return host, kind, index
