"""Dependencies on other programs: each text, flag, metric or class of vLLM, Ray, NCCL and Docker
that vlaunch relies on, in a data file per program.

Code refers to an entry as `text("vllm.application-ready")`.
"""

from __future__ import annotations

from .texts import load_texts

PROGRAMS = ("vllm", "ray", "nccl", "docker", "nvidia-container-toolkit")


def text(reference: str) -> str:
    """Return the pattern or name of an entry: `text("ray.gcs-unreachable")`."""
    program, _, entry = reference.partition(".")
    return load_texts(program)[entry]


def any_of(*references: str) -> str:
    """Return a pattern that matches any of these entries."""
    return "|".join(map(text, references))
