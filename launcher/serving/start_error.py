"""Error of a server that did not start, from its supervisor's record and its log."""

from collections.abc import Sequence
from dataclasses import dataclass

from launcher.agent.cause import LoggedException
from launcher.agent.observed import Fault
from launcher.core import untrusted
from launcher.core.errors import ServerError
from launcher.failures.explain import Explanation, explain
from launcher.tools import vllm
from launcher.tools.site.servers import Server

# characters of an exception in an error's first line; the evidence has all of it
_LINE = 160
_LAST_LINES = 8  # of the log, as evidence when nothing else is known


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cause:
    """Cause of a failed start, as far as known.

    `outcome` is what the supervisor says, `exception` the error of the engine; `logged` is the same
    exception as found in the log, `node` that of the fault. `failure` is the known failure in all
    lines, and `log` has their last ones.
    """

    outcome: str
    exception: str
    logged: LoggedException | None
    node: str
    failure: Explanation | None
    log: Sequence[str]

    @property
    def known(self) -> Explanation | None:
        """The known failure, if it tells more than the exception."""
        failure = self.failure
        return None if failure is None or (failure.vague and self.exception) else failure

    @property
    def headline(self) -> str:
        text = self.known.cause if self.known else self.exception or self.outcome
        return text if len(text) <= _LINE else f"{text[:_LINE]}…"

    @property
    def origin(self) -> str:
        """Node and process that raised the exception, as far as known."""
        if self.logged is None:
            return self.node
        return ", ".join(filter(None, (self.logged.address or self.node, self.logged.process)))

    @property
    def located_exception(self) -> str:
        """The exception with its origin, without repeating the headline."""
        if not self.exception or not self.origin:
            return self.exception
        if self.headline == self.exception:
            return f"raised on {self.origin}"
        return f"{self.origin}: {self.exception}"

    @property
    def evidence(self) -> list[str]:
        """All that the headline does not say."""
        texts = [self.located_exception]
        if self.known and (not self.exception or self.exception[:_LINE] not in self.known.line):
            texts.append(self.known.line)
        texts.append(self.outcome)
        if self.known is None and self.logged is None:
            texts += self.log
        return [text for text in dict.fromkeys(texts) if text and text != self.headline]


def start_error(server: Server, lines: Sequence[str], *, hung: bool) -> ServerError:
    """Return the error of a server that exited, or that `hung` after the log `lines`."""
    cause = _find_cause(server, lines, hung=hung)
    hints = [cause.failure.fix if cause.failure else "find the cause: `vlaunch doctor`"]
    if hung:
        hints.append(f"stop it: `vlaunch stop {server.name}`")
    return ServerError(
        f"the server {'cannot continue' if hung else 'did not start'}: {cause.headline}",
        evidence=cause.evidence,
        hint="\n".join(hints),
    )


def _find_cause(server: Server, lines: Sequence[str], *, hung: bool) -> _Cause:
    fault = server.observed.last_fault if server.observed and not hung else None
    reported = untrusted.sanitize(fault.cause) if fault else ""
    evidence = [untrusted.sanitize(line) for line in fault.evidence.splitlines()] if fault else []
    log = [*evidence, *lines]
    logged = vllm.find_exception("\n".join(log))
    exception = reported or (logged.text if logged else "")
    if logged and logged.text[:_LINE] != exception[:_LINE]:
        logged = None  # the agent's cause is more precise
    return _Cause(
        outcome=_describe_outcome(server, fault, hung=hung),
        exception=exception,
        logged=logged,
        node=_node_of(fault, server) if fault else "",
        failure=explain("\n".join([reported, *log])),
        log=(evidence or list(lines))[-_LAST_LINES:],
    )


def _describe_outcome(server: Server, fault: Fault | None, *, hung: bool) -> str:
    record = server.observed
    if record is None or hung:
        return f"{server.label} is still running"
    outcome = fault.what if fault else record.doing or "it failed"
    if record.state == "gave-up":
        outcome = f"the supervisor gave up: {outcome}"
    return untrusted.sanitize(outcome)


def _node_of(fault: Fault, server: Server) -> str:
    return fault.node or (server.desired.api_node if server.desired else "")
