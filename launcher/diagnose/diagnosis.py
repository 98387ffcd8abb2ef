"""One question to a node about what went wrong: its containers, servers, their logs, its kernel,
and what the keeper says.

The script only reads, and every part of it is bounded: a node may have gigabytes of logs, and what
reads them may hang. Parts stand between lines that begin with a mark that is new for each question,
so that no log can pretend to be another part.
"""

from __future__ import annotations

from launcher.core import shell
from launcher.core.domain import Argv

# the parts of an answer
STATE, RECORD, MODELS, KERNEL = "state", "record", "models", "kernel"
INSPECT, ENGINES, LOGS, INSIDE = "inspect", "engines", "logs", "inside"
DIAGNOSIS = (STATE, RECORD, MODELS, KERNEL, ENGINES, LOGS, INSIDE)


def ask(
    docker: Argv,
    *,
    mark: str,
    cluster: str,
    state_dir: str,
    hf_home: str = "",
    parts: tuple[str, ...] = DIAGNOSIS,
    lines: int = 2000,
    size: int = 500_000,
    since: float | None = None,
) -> Argv:
    """Ask a node for some parts; it changes nothing.

    Args:
        docker: what starts docker there.
        mark: begins the lines between parts; nobody may be able to guess it.
        cluster: whose containers.
        state_dir: where the launcher's folder is on the node, when not in the login's home.
        hf_home: the Hugging Face home, for models that are not finished.
        parts: what to tell; the containers' states always come.
        lines: the last of each log.
        size: bytes of each log, at most.
        since: seconds that the containers' logs go back, or all of it.
    """
    back = "" if since is None else f"{since:.0f}s"
    return (
        "sh",
        "-c",
        shell.program("diagnosis"),
        "doctor",
        mark,
        cluster,
        state_dir,
        hf_home,
        str(lines),
        str(size),
        back,
        " ".join(parts),
        shell.program("diagnosis_inside"),
        *docker,
    )
