"""`vlaunch chat`: a conversation with the served model.

Standard output carries the model's text and nothing else.
"""

import ipaddress
import json
import sys
from collections import deque
from collections.abc import Mapping

import click

from launcher.agent.desired import Desired
from launcher.agent.health.task import HEALTH, task_named
from launcher.app import options, selection
from launcher.app.command import CommandContext, command
from launcher.app.session import Session
from launcher.app.terminal import say
from launcher.core import untrusted
from launcher.core.domain import Answer, Inventory
from launcher.core.errors import NodeError, RequestError, VlaunchError
from launcher.core.transport import Command
from launcher.front.front_plan import front_target
from launcher.serving import endpoints
from launcher.tools import agent_queries, docker
from launcher.tools.site import servers

_MAX_ANSWER_CHARS = 2**26  # ten times the longest context of a model
_PROMPT = "Say hello."


@command(shows="none")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Maximum tokens of an answer.",
)
@click.option(
    "--timeout",
    type=options.Duration("1s"),
    default="5m",
    show_default=True,
    help="Time limit for one answer.",
)
@options.SERVER
@click.argument("prompt", required=False)
def chat(
    call: CommandContext, max_tokens: int, timeout: float, server: str | None, prompt: str | None
) -> None:
    """Send PROMPT and stream the answer.

    Without PROMPT: start a conversation on a terminal, or read the prompt from a pipe. For a model
    that does not chat (embeddings, scores, transcriptions …), print how to query it.
    """
    interactive = prompt is None and sys.stdin.isatty()
    if prompt is None and not interactive:
        prompt = sys.stdin.read().strip()
    if not interactive and not prompt:
        raise click.UsageError("no prompt: give one as an argument, or pipe one in")
    with call.session(nodes=[call.inventory.head]) as session:
        head_state = selection.query_servers(session)
        chosen = servers.choose_server(head_state.running, server)
        task = task_named(chosen.task)
        fronts = call.inventory.front_nodes if server in (None, chosen.group) else ()
        spec, node = selection.select_server(session, head_state, server, fronts)
        direct = {"api_host": spec.api_host(node.name), "api": spec.port}
        target = front_target(chosen.group) if fronts else direct
        request = {**target, "max_tokens": max_tokens, "timeout": timeout}
        container = session.site.container_name(node)
        if task is not None and not task.generates:
            prompt = prompt or _PROMPT  # the answer names the model, and how to query it
        if not prompt:
            say(f"chatting with {spec.model}; exit with an empty line or Ctrl-D")
        messages: list[dict[str, str]] = []
        for message in [prompt] if prompt else iter(_prompt_user, ""):
            messages.append({"role": "user", "content": message})
            payload = json.dumps({**request, "messages": messages})
            command = Command(
                node=node.name,
                argv=docker.exec_(node.docker, container, *agent_queries.CHAT, stdin=True),
                timeout=timeout + 30,
                stdin=f"{payload}\n".encode,
                hold_stdin=True,
            )
            answer = _stream_answer(session, spec, command)
            messages.append({"role": "assistant", "content": answer})


def _prompt_user() -> str:
    try:
        text: str = click.prompt(
            "you", prompt_suffix="> ", default="", show_default=False, err=True
        )
    except (click.Abort, EOFError):
        click.echo(err=True)
        return ""
    return text.strip()


def _stream_answer(session: Session, spec: Desired, command: Command) -> str:
    """Stream one answer to standard output and return it."""
    sanitize = untrusted.sanitize if sys.stdout.isatty() else str
    chunks: list[str] = []
    error_lines: deque[str] = deque(maxlen=6)
    exit_code = length = 0
    for item in session.fleet.stream([command]):
        if isinstance(item, Answer):
            exit_code = item.code
            continue
        chunk = None if item.error else _parse_chunk(session.inventory, spec, item.text)
        if chunk is None:
            error_lines.append(item.text)
            continue
        length += len(chunk)
        if length > _MAX_ANSWER_CHARS:
            raise NodeError(
                command.node, "the answer is too long", hint="check the server: `vlaunch status`"
            )
        chunks.append(chunk)
        sys.stdout.write(sanitize(chunk))
        sys.stdout.flush()
    if exit_code:
        raise NodeError(
            command.node,
            f"the answer was cut off (exit code {exit_code})",
            evidence=list(error_lines),
            hint="check the server: `vlaunch status`, `vlaunch logs`",
        )
    sys.stdout.write("\n")
    return "".join(chunks)


def _parse_chunk(inventory: Inventory, spec: Desired, line: str) -> str | None:
    """Return the text in one line of the answer, None if the line has none.

    Raises VlaunchError for a line that reports an error.
    """
    try:
        raw = untrusted.loads(line)
    except ValueError:
        raw = None
    if not isinstance(raw, dict):
        return None
    if "error" in raw:
        raise _answer_error(inventory, spec, raw)
    text = raw.get("text")
    return text if isinstance(text, str) else None


def _answer_error(inventory: Inventory, spec: Desired, raw: Mapping[str, object]) -> VlaunchError:
    """Return the error of a server that gives no answer. For a model that does not generate text,
    its hint is the curl line that queries it.
    """
    status, error = raw.get("status", 0), str(raw["error"])
    task, model = task_named(str(raw.get("task"))), str(raw.get("model") or spec.model)
    if task is None or task.generates:
        if status:
            text = f"{spec.model} rejected the request (HTTP {status})"
            return VlaunchError(text, evidence=error)
        return VlaunchError(
            f"{spec.model} is not answering yet",
            evidence=error,
            hint="run `vlaunch status`, or watch it start with the same `vlaunch serve`",
        )
    if task is HEALTH:
        return RequestError(
            f"{spec.model} supports neither chat nor any other request that vlaunch sends",
            hint="run `vlaunch tunnel` to reach its API; see the model's documentation",
        )
    hints = [f"send a request: `{endpoints.client_curl_line(inventory, spec, task, model)}`"]
    if spec.host and not inventory.front and ipaddress.ip_address(spec.host).is_loopback:
        hints.append("run `vlaunch tunnel` first: the API listens on its own node only")
    text = f"{spec.model} does not support chat: it returns {task.noun_phrase}"
    return RequestError(text, hint="\n".join(hints))
