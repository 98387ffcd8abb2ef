"""The line that asks an exported server, for people to copy."""

from __future__ import annotations

from launcher.model import Inventory
from launcher.payload.agent.task import CHAT
from launcher.plan.request import Request
from launcher.tools import curl, vllm


def chat(url: str, request: Request, inventory: Inventory) -> str:
    """Return the line that chats with a server, whose API is at `url`, with `/v1`."""
    names = vllm.values(request.args, "--served-model-name")
    called = names[-1] if names else request.model
    return curl.line(url, CHAT, called, key="VLLM_API_KEY" in inventory.secrets)
