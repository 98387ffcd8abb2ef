"""The lines that ask an exported server, for people to copy."""

from __future__ import annotations

from launcher.export import pods
from launcher.export.kubernetes_shape import Group
from launcher.model import Inventory
from launcher.payload.agent.task import CHAT
from launcher.plan.request import Request
from launcher.tools import curl, vllm


def chat(url: str, request: Request, inventory: Inventory) -> str:
    """Return the line that chats with a server, whose API is at `url`, with `/v1`."""
    names = vllm.values(request.args, "--served-model-name")
    called = names[-1] if names else request.model
    return curl.line(url, CHAT, called, key="VLLM_API_KEY" in inventory.secrets)


def awaited(group: Group, kind: str, condition: str) -> str:
    """Return the line that waits for a condition of a group's object, as long as it may take: till
    images are there and the network is proven, and for a start.
    """
    start = group.desired.policy.start_timeout
    seconds = start + (pods.gate_deadline(group) if group.gated else start)
    words = f"wait --for={condition} --timeout={seconds:.0f}s {kind.lower()}/{group.target.name}"
    return f"{group.target.kubectl} {words}"


def ready(group: Group, kind: str, condition: str) -> list[str]:
    """Return the lines that wait until all pods are ready, where the one with the API has answered
    by then.
    """
    return [
        "Prove it: the first command ends when all pods are ready, the one with the API",
        "after a completion; the last one is a chat.",
        f"  {awaited(group, kind, condition)}",
    ]
