"""Exceptions of vlaunch, as one tree. Adapters convert the exceptions of the libraries they import.

* VlaunchError            exit 1  the command failed
  * RequestError          exit 2  invalid request; nothing changed
    * InventoryError              all mistakes in an inventory, with their lines
    * JobError                    all mistakes in a batch job, with their lines
      (`launcher/batch/checked_job.py`)
    * PlacementError              TP × PP × model does not fit this cluster
  * NodeError                     a command failed on one or more nodes
    * ConnectError                no connection or no SSH login
    * LockError                   another operator holds the cluster lock, or broke ours
  * ServerError                   a server did not start, failed, or returned no completion
    * StoppedError                an operator stopped the server; not a fault
    * UnwatchedError              the server's state is unknown; it may still be running
  * BatchError                    a batch job failed, or its state or output is unavailable
  * DeadlineError                 a wait timed out
  * GateError                     a check between two stages failed
  * HookError                     a user's hook failed
  * UnreadableAnswer              unparsable output of a tool
"""

from collections.abc import Sequence

from launcher.core.domain import fold


class VlaunchError(Exception):
    """Root of all intended exceptions.

    Args:
        message: subject and failure, one line without a full stop.
        evidence: the output lines that show it, verbatim.
        hint: the remedy, with a command to run.
    """

    exit_code = 1

    def __init__(self, message: str, *, evidence: str | Sequence[str] = "", hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.evidence = evidence if isinstance(evidence, str) else "\n".join(evidence)
        self.hint = hint

    @property
    def reason(self) -> str:
        """The message without the node's name."""
        return self.message

    @property
    def brief(self) -> str:
        """The reason and the last line of evidence, on one line."""
        return ": ".join(part for part in (self.reason, *self.evidence.splitlines()[-1:]) if part)


class RequestError(VlaunchError):
    """An invalid request; nothing changed."""

    exit_code = 2


class InventoryError(RequestError):
    """An invalid inventory; `mistakes` has lines such as `FILE:LINE: path: text`."""

    def __init__(self, message: str, mistakes: Sequence[str], *, hint: str = "") -> None:
        super().__init__(message, evidence=mistakes, hint=hint)
        self.mistakes = tuple(mistakes)


class PlacementError(RequestError):
    """The requested parallelism does not fit this cluster or this model."""


class NodeError(VlaunchError):
    """A failure on `node` (or on several, folded)."""

    def __init__(
        self, node: str, message: str, *, evidence: str | Sequence[str] = "", hint: str = ""
    ) -> None:
        super().__init__(f"{node}: {message}", evidence=evidence, hint=hint)
        self.node = node

    @property
    def reason(self) -> str:
        return self.message.removeprefix(f"{self.node}: ")


class ConnectError(NodeError):
    """A node is unreachable or rejected the SSH login."""


class LockError(NodeError):
    """Another operator holds the cluster lock, or it was lost during the command."""


class ServerError(VlaunchError):
    """A server did not start, failed, or returned an invalid response."""


class StoppedError(ServerError):
    """An operator stopped the server during the wait."""


class UnwatchedError(ServerError):
    """The server's state could not be read for too long; it may still be running."""


class BatchError(VlaunchError):
    """A batch job failed or was stopped, or its state or output is unavailable."""


class DeadlineError(VlaunchError):
    """A wait timed out."""


class HookError(VlaunchError):
    """An executable in `hooks/` failed or timed out."""


class GateError(VlaunchError):
    """A check between two stages failed; later stages did not run."""


class UnreadableAnswer(VlaunchError):
    """Unparsable output of a tool; `evidence` is the line."""


def combine_errors(errors: Sequence[NodeError], summary: str = "did not answer") -> NodeError:
    """Combine errors of several nodes; equal ones are folded. `summary` completes "NODES …"."""
    if len(errors) == 1:
        return errors[0]
    groups: dict[tuple[str, str], list[NodeError]] = {}
    for error in errors:
        groups.setdefault((error.reason, error.hint), []).append(error)
    lines: list[str] = []
    hints: list[str] = []
    for (text, hint), group in groups.items():
        lines.append(f"{_folded_names(group)}: {text}")
        lines += group[0].evidence.splitlines()[-2:]
        hints += [line for line in hint.splitlines() if line not in hints]
    kind = ConnectError if all(isinstance(error, ConnectError) for error in errors) else NodeError
    text = "cannot be reached" if kind is ConnectError else summary
    return kind(_folded_names(errors), text, evidence=lines, hint="\n".join(hints))


def _folded_names(errors: Sequence[NodeError]) -> str:
    return fold([error.node for error in errors])
