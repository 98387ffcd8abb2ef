"""`vlaunch chat`: talk to the served model.

Standard output carries the model's words and nothing else.
"""

from __future__ import annotations

import ipaddress
import json
import sys
from collections import deque
from collections.abc import Mapping

import click

from launcher.agent.desired import Desired
from launcher.agent.task import HEALTH, named
from launcher.app import choose, options
from launcher.app.command import Call, command
from launcher.app.session import Session
from launcher.app.terminal import say
from launcher.core import untrusted
from launcher.core.domain import Answer, Inventory
from launcher.core.errors import NodeError, RequestError, VlaunchError
from launcher.core.transport import Command
from launcher.serving import endpoints
from launcher.serving.endpoints import url
from launcher.tools import agent_queries, docker, servers

_LONGEST = 2**26  # characters of an answer; the longest context of a model is a tenth of it
_PROMPT = "Say hello."


@command(shows="none")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Most tokens of an answer.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(1),
    default=300.0,
    show_default=True,
    help="Seconds for one answer.",
)
@options.SERVER
@click.argument("prompt", required=False)
def chat(
    call: Call, max_tokens: int, timeout: float, server: str | None, prompt: str | None
) -> None:
    """Send PROMPT and stream the answer.

    Without PROMPT: a conversation in a terminal, or what is piped in. For a model that does not
    chat (embeddings, scores, transcriptions …) it says how to ask it.
    """
    talk = prompt is None and sys.stdin.isatty()
    if prompt is None and not talk:
        prompt = sys.stdin.read().strip()
    if not talk and not prompt:
        raise click.UsageError("there is no prompt: give one as an argument, or pipe one in")
    with call.session(nodes=[call.inventory.head]) as session:
        found = choose.kept(session)
        spec, node = choose.api(session, found, server)
        way = named(servers.choose(found.running, server).task)
        limits = {"max_tokens": max_tokens, "timeout": timeout}
        request = {"api_host": spec.api_host, "api": spec.port, **limits}
        container = session.site.container_name(node)
        if way is not None and not way.generates:
            prompt = prompt or _PROMPT  # the answer names the model, and how to query it
        if not prompt:
            say(f"talking to {spec.model}; an empty line or Ctrl-D ends it")
        messages: list[dict[str, str]] = []
        for words in [prompt] if prompt else iter(_ask, ""):
            messages.append({"role": "user", "content": words})
            text = json.dumps({**request, "messages": messages})
            command = Command(
                node=node.name,
                argv=docker.exec_(node.docker, container, *agent_queries.CHAT, stdin=True),
                timeout=timeout + 30,
                stdin=f"{text}\n".encode,
                hold_stdin=True,
            )
            answer = _answer(session, spec, command)
            messages.append({"role": "assistant", "content": answer})


def _ask() -> str:
    try:
        words: str = click.prompt(
            "you", prompt_suffix="> ", default="", show_default=False, err=True
        )
    except (click.Abort, EOFError):
        click.echo(err=True)
        return ""
    return words.strip()


def _answer(session: Session, spec: Desired, command: Command) -> str:
    """Stream one answer to standard output and return it."""
    clean = untrusted.plain if sys.stdout.isatty() else str
    pieces: list[str] = []
    complaints: deque[str] = deque(maxlen=6)
    code = length = 0
    for item in session.fleet.stream([command]):
        if isinstance(item, Answer):
            code = item.code
            continue
        piece = None if item.error else _piece(session.inventory, spec, item.text)
        if piece is None:
            complaints.append(item.text)
            continue
        length += len(piece)
        if length > _LONGEST:
            raise NodeError(
                command.node, "the answer does not end", hint="look at the server: `vlaunch status`"
            )
        pieces.append(piece)
        sys.stdout.write(clean(piece))
        sys.stdout.flush()
    if code:
        raise NodeError(
            command.node,
            f"the answer broke off (exit code {code})",
            evidence=list(complaints),
            hint="look at the server: `vlaunch status`, `vlaunch logs`",
        )
    sys.stdout.write("\n")
    return "".join(pieces)


def _piece(inventory: Inventory, spec: Desired, line: str) -> str | None:
    """Return the piece of the answer that a line brings, None when it brings none; raises
    VlaunchError when it says why there is no answer.
    """
    try:
        raw = untrusted.loads(line)
    except ValueError:
        raw = None
    if not isinstance(raw, dict):
        return None
    if "error" in raw:
        raise _refusal(inventory, spec, raw)
    text = raw.get("text")
    return text if isinstance(text, str) else None


def _refusal(inventory: Inventory, spec: Desired, raw: Mapping[str, object]) -> VlaunchError:
    """Return the error of a server that gives no answer; for a model that does not generate, with
    the line that queries it.
    """
    status, error = raw.get("status", 0), str(raw["error"])
    way, model = named(str(raw.get("task"))), str(raw.get("model") or spec.model)
    if way is None or way.generates:
        if status:
            text = f"{spec.model} refused the request ({status})"
            return VlaunchError(text, evidence=error)
        return VlaunchError(
            f"{spec.model} does not answer yet",
            evidence=error,
            hint="watch it start with the same `vlaunch serve`, or look at `vlaunch status`",
        )
    if way is HEALTH:
        return RequestError(
            f"{spec.model} does not chat, and answers nothing else that vlaunch asks",
            hint="its documentation says how to ask it; `vlaunch tunnel` brings its API here",
        )
    at = url(inventory, spec.host, spec.port, spec.api_node)
    keyed = "VLLM_API_KEY" in inventory.secrets
    hints = [f"ask it so: `{endpoints.curl_line(at, way, model, key=keyed)}`"]
    if ipaddress.ip_address(spec.host).is_loopback:
        hints.append("it listens on its own node only: `vlaunch tunnel` brings it to this machine")
    text = f"{spec.model} does not chat: it gives {way.what}"
    return RequestError(text, hint="\n".join(hints))
