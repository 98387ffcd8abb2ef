"""The model: the same files on all nodes, and a Hugging Face token that may have it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from launcher.checks.shape import Check, Evidence, Finding, Hub, failed, passed, skipped
from launcher.model import Inventory, Node, fold

_UNNAMED = "no model is named: set `serve: {model: …}` in the inventory, or name one"
_TRUE = {"1", "true", "yes", "on"}

Files = Mapping[str, int]


def _model(inventory: Inventory, evidence: Evidence) -> Sequence[Finding]:
    if not evidence.model:
        return [skipped(node, _UNNAMED) for node in evidence.reached(inventory)]
    seen, findings = _asked(inventory, evidence)
    there = {name: files for name, files in seen.items() if files}
    if not there:
        return [*findings, *(_nowhere(inventory, name, evidence.model) for name in seen)]
    right = _right(there)
    for name, files in seen.items():
        findings.append(_judge(inventory, evidence, name, files, right, there))
    return findings


def _asked(
    inventory: Inventory, evidence: Evidence
) -> tuple[dict[str, Files | None], list[Finding]]:
    """Return the model's files on each node, and a SKIP for each node that could not be asked."""
    found, gaps = dict[str, Files | None](), list[Finding]()
    for node in evidence.reached(inventory):
        if node.name in evidence.files:
            found[node.name] = evidence.files[node.name]
        else:
            gaps.append(skipped(node, "could not be asked whether it has the model"))
    return found, gaps


def _right(there: Mapping[str, Files]) -> Files:
    """Return the files that most nodes have; of those that tie, the complete ones, then the
    largest.
    """
    known = list(there.values())
    return max(
        known, key=lambda files: (known.count(files), not _partial(files), sum(files.values()))
    )


def _partial(files: Files) -> list[str]:
    return sorted(name for name in files if name.endswith(".incomplete"))


def _judge(
    inventory: Inventory,
    evidence: Evidence,
    name: str,
    files: Files | None,
    right: Files,
    there: Mapping[str, Files],
) -> Finding:
    owners = [each for each, known in there.items() if known == right]
    fix = _copy(inventory, evidence.model, owners[0], name)
    if not files:
        return failed(name, f"has no {evidence.model}, while {fold(list(there))} has it", fix=fix)
    if partial := _partial(files):
        return failed(
            name,
            f"{evidence.model} was not downloaded completely",
            evidence="\n".join(partial[:5]),
            fix=fix,
        )
    if files != right:
        lines = _differences(files, right, fold(owners))
        more = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        text = f"{evidence.model} differs from the one on {fold(owners)}: {lines[0]}{more}"
        return failed(name, text, evidence="\n".join(lines[:5]), fix=fix)
    return passed(name, f"{evidence.model}: {len(files)} files, {_size(sum(files.values()))}")


def _differences(files: Files, right: Files, owners: str) -> list[str]:
    """Say how a node's files differ from those of their owners: what is lacking comes first."""
    lines = [f"lacks {each}" for each in sorted(set(right) - set(files))]
    lines += [f"has {each} besides" for each in sorted(set(files) - set(right))]
    lines += [
        f"{each} has {files[each]} bytes, {right[each]} on {owners}"
        for each in sorted(set(files) & set(right))
        if files[each] != right[each]
    ]
    return lines


def _size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 10**8 else f"{size / 1e6:.2f} MB"


def _nowhere(inventory: Inventory, name: str, model: str) -> Finding:
    node = inventory.node(name)
    if model.startswith("/"):
        return failed(
            name,
            f"has no {model}",
            fix=f"copy the model to {model} on every node, below `hf_home:` or a `mounts:`",
        )
    if node.env.get("HF_HUB_OFFLINE", "").lower() in _TRUE:
        return failed(
            name,
            f"has no {model}, and HF_HUB_OFFLINE forbids to download it",
            fix=(
                f"run `HF_HOME={node.hf_home} hf download {model}` where there is a network, or"
                " take HF_HUB_OFFLINE out"
            ),
        )
    return skipped(name, f"{model} is on no node yet: each downloads it when it is served first")


def _copy(inventory: Inventory, model: str, source: str, target: str) -> str:
    from_, to = inventory.node(source), inventory.node(target)
    download = f"`HF_HOME={to.hf_home} hf download {model}`"
    if source == target:
        return f"run {download} on {target}"
    there, here = _folder(from_, model), _folder(to, model)
    copy = (
        f"copy it from {source}, run there: `rsync -a --delete {there}/"
        f" {_login(to.ssh.user, to.ip)}:{here}/`"
    )
    if model.startswith("/") or from_.hf_home != to.hf_home:
        return copy
    return f"{copy}, or on {target}: {download}"


def _folder(node: Node, model: str) -> str:
    """Return where a node has a model, or would have it."""
    if model.startswith("/"):
        return model
    return f"{node.hf_home}/hub/models--{model.replace('/', '--')}"


def _login(user: str | None, host: str) -> str:
    return f"{user}@{host}" if user else host


def _token(inventory: Inventory, evidence: Evidence) -> Sequence[Finding]:
    hub, model = evidence.hub or Hub(), evidence.model
    if model.startswith("/"):
        return [skipped("", f"{model} is a path; Hugging Face is not asked for it")]
    if not model:
        return [skipped("", _UNNAMED)]
    if reason := _unanswered(hub):
        return [skipped("", reason)]
    if hub.status == "ok":
        return [passed("", hub.text or f"Hugging Face gives {model} with this token")]
    text, fix = {
        "unauthorized": (
            "Hugging Face does not accept the token",
            (
                "make a new one at https://huggingface.co/settings/tokens and set it: `secrets:"
                " {HF_TOKEN: {env: HF_TOKEN}}`"
            ),
        ),
        "gated": (
            f"{model} is gated, and the token's account has not been let in",
            (
                f"accept its licence at https://huggingface.co/{model} with that account, and set"
                " HF_TOKEN under `secrets:`"
            ),
        ),
        "not found": (
            f"Hugging Face knows no {model}, or does not show it to this token",
            (
                "correct the model's name, or set a token that may read it: `secrets: {HF_TOKEN:"
                " {env: HF_TOKEN}}`"
            ),
        ),
    }[hub.status]
    return [failed("", text, evidence=hub.text, fix=fix)]


def _unanswered(hub: Hub) -> str:
    """Say why Hugging Face said nothing of the token, and nothing where it did."""
    if hub.status == "not asked":
        return hub.text or "Hugging Face was not asked"
    if hub.status == "offline":
        return f"this machine cannot reach Hugging Face{': ' * bool(hub.text)}{hub.text}"
    if hub.status == "no token":
        return hub.text or "no HF_TOKEN under `secrets:`; a public model needs none"
    return ""


CHECKS = (
    Check(
        id="model",
        what="the model is the same on all nodes",
        why=(
            "a node without it downloads alone while the others wait, and ranks with other weights"
            " answer nonsense"
        ),
        judge=_model,
        group="model",
    ),
    Check(
        id="hf-token",
        what="Hugging Face gives the model with this token",
        why="each node would fail by itself, after minutes, with a stack trace",
        judge=_token,
        group="model",
    ),
)
