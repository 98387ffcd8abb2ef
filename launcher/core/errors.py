"""What can go wrong, as one tree. Library exceptions stop at the adapter that imports the library.

* VlaunchError            exit 1  it failed
  * RequestError          exit 2  what was asked cannot be done: nothing was touched
    * InventoryError              every mistake in an inventory, each with its line
    * JobError                    every mistake in a batch job, each with its line
      (`launcher/batch/shape.py`)
    * PlacementError              this TP × PP × model does not fit this cluster
  * NodeError                     one or more nodes did not do as told
    * ConnectError                a node could not be reached or logged in to
    * LockError                   another operator works on the cluster, or took it from us
  * ServerError                   a server did not start, cannot go on, or gives no completion
    * StoppedError                somebody stopped what was watched: nothing went wrong
    * UnwatchedError              what was watched cannot be asked any more, and may well go on
  * BatchError                    a batch job failed, or it or its output cannot be had any more
  * DeadlineError                 a wait ran out of time
  * GateError                     a check between two stages failed
  * HookError                     a hook of the user's failed
  * UnreadableAnswer              a tool said something that cannot be read
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.core.domain import fold


class VlaunchError(Exception):
    """Root of everything vlaunch raises on purpose.

    Args:
        message: where and what happened, one line, no full stop.
        evidence: the lines that show it, as they were seen.
        hint: what to do, with a command to run.
    """

    exit_code = 1

    def __init__(self, message: str, *, evidence: str | Sequence[str] = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.evidence = evidence if isinstance(evidence, str) else "\n".join(evidence)
        self.hint = hint

    @property
    def reason(self) -> str:
        """What happened, without the name of the node where it did."""
        return self.message

    @property
    def brief(self) -> str:
        """What happened and the last line that shows it, on one line."""
        return ": ".join(part for part in (self.reason, *self.evidence.splitlines()[-1:]) if part)


class RequestError(VlaunchError):
    """The request was wrong; nothing was touched."""

    exit_code = 2


class InventoryError(RequestError):
    """The inventory has mistakes; `mistakes` holds one line each: `FILE:LINE: path: what`."""

    def __init__(self, message: str, mistakes: Sequence[str], *, hint: str = "") -> None:
        super().__init__(message, evidence=mistakes, hint=hint)
        self.mistakes = tuple(mistakes)


class PlacementError(RequestError):
    """The asked-for parallelism cannot run on this cluster or with this model."""


class NodeError(VlaunchError):
    """A node did not do as told; `node` names it (or several, folded)."""

    def __init__(
        self, node: str, message: str, *, evidence: str | Sequence[str] = "", hint: str = ""
    ) -> None:
        super().__init__(f"{node}: {message}", evidence=evidence, hint=hint)
        self.node = node

    @property
    def reason(self) -> str:
        return self.message.removeprefix(f"{self.node}: ")


class ConnectError(NodeError):
    """A node could not be reached, or refused the login."""


class LockError(NodeError):
    """The cluster's lock is held by somebody else, or was lost while it was needed."""


class ServerError(VlaunchError):
    """A server did not start, cannot go on, or does not answer as it should."""


class StoppedError(ServerError):
    """Somebody stopped the server while it was being watched."""


class UnwatchedError(ServerError):
    """Nobody could say for too long how a server is; it may well go on."""


class BatchError(VlaunchError):
    """A batch job failed or was stopped, or it cannot be watched or gathered any more."""


class DeadlineError(VlaunchError):
    """A wait ran out of time."""


class HookError(VlaunchError):
    """An executable in `hooks/` failed, or did not end in time."""


class GateError(VlaunchError):
    """A check between two stages failed; the stages after it did not run."""


class UnreadableAnswer(VlaunchError):
    """A tool's output could not be read; `evidence` is the line."""


def together(errors: Sequence[NodeError], summary: str = "did not answer") -> NodeError:
    """Make one error of several nodes' errors: every node's story, equal ones folded; `what` is
    true of all of them.
    """
    if len(errors) == 1:
        return errors[0]
    groups: dict[tuple[str, str], list[NodeError]] = {}
    for error in errors:
        groups.setdefault((error.reason, error.hint), []).append(error)
    lines: list[str] = []
    hints: list[str] = []
    for (text, hint), group in groups.items():
        lines.append(f"{_names(group)}: {text}")
        lines += group[0].evidence.splitlines()[-2:]
        hints += [line for line in hint.splitlines() if line not in hints]
    kind = ConnectError if all(isinstance(error, ConnectError) for error in errors) else NodeError
    text = "cannot be reached" if kind is ConnectError else summary
    return kind(_names(errors), text, evidence=lines, hint="\n".join(hints))


def _names(errors: Sequence[NodeError]) -> str:
    return fold([error.node for error in errors])
