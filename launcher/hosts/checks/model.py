"""Checks of the model: equal files on all nodes, and a Hugging Face token with access to it."""

from collections.abc import Mapping, Sequence

from launcher.core.check import Finding, failed, passed, skipped
from launcher.core.domain import Node, fold
from launcher.core.sizes import format_count
from launcher.hosts.check import Check, Evidence, Host, HubAccess

_NO_MODEL_NAMED = "no model is named: set `serve: {model: …}` in the inventory, or name one"
_TRUE_VALUES = {"1", "true", "yes", "on"}

Files = Mapping[str, int]


def _judge_model(evidence: Evidence) -> Sequence[Finding]:
    if not evidence.model:
        return [skipped(host, _NO_MODEL_NAMED) for host in evidence.reached]
    queried = [host for host in evidence.reached if host.name in evidence.files]
    findings = [
        skipped(host, "could not be checked for the model")
        for host in evidence.reached
        if host.name not in evidence.files
    ]
    present = {host.name: files for host in queried if (files := evidence.files[host.name])}
    if not present:
        return [*findings, *(_judge_absent(host.node, evidence.model) for host in queried)]
    reference = _reference_files(present)
    return [*findings, *(_judge_files(host, reference, present) for host in queried)]


def _reference_files(present: Mapping[str, Files]) -> Files:
    """Return the files that most nodes have; complete and larger ones win ties."""
    file_sets = list(present.values())
    return max(
        file_sets,
        key=lambda files: (
            file_sets.count(files),
            not _incomplete_files(files),
            sum(files.values()),
        ),
    )


def _incomplete_files(files: Files) -> list[str]:
    return sorted(name for name in files if name.endswith(".incomplete"))


def _judge_files(host: Host, reference: Files, present: Mapping[str, Files]) -> Finding:
    """Judge a node's files against the reference; `present` has those of all nodes with any."""
    model, files = host.evidence.model, present.get(host.name)
    owners = [owner for owner, owner_files in present.items() if owner_files == reference]
    fix = _copy_fix(model, host.inventory.node(owners[0]), host.node)
    if not files:
        return failed(host, f"has no {model}, while {fold(list(present))} has it", fix=fix)
    if partial := _incomplete_files(files):
        return failed(
            host,
            f"{model} was not downloaded completely",
            evidence="\n".join(partial[:5]),
            fix=fix,
        )
    if files != reference:
        lines = _describe_differences(files, reference, fold(owners))
        suffix = f" and {len(lines) - 1} more" if len(lines) > 1 else ""
        text = f"{model} differs from the one on {fold(owners)}: {lines[0]}{suffix}"
        return failed(host, text, evidence="\n".join(lines[:5]), fix=fix)
    return passed(
        host, f"{model}: {format_count(len(files), 'file')}, {_format_size(sum(files.values()))}"
    )


def _describe_differences(files: Files, reference: Files, owners: str) -> list[str]:
    lines = [f"lacks {name}" for name in sorted(set(reference) - set(files))]
    lines += [f"has {name} besides" for name in sorted(set(files) - set(reference))]
    lines += [
        f"{name} has {files[name]} bytes, {reference[name]} on {owners}"
        for name in sorted(set(files) & set(reference))
        if files[name] != reference[name]
    ]
    return lines


def _format_size(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 10**8 else f"{size / 1e6:.2f} MB"


def _judge_absent(node: Node, model: str) -> Finding:
    if model.startswith("/"):
        return failed(
            node,
            f"has no {model}",
            fix=(
                f"copy it from this machine: `vlaunch model copy ./FOLDER --as {model}`; its path"
                " must be below `hf_home:` or one of `mounts:`"
            ),
        )
    if node.env.get("HF_HUB_OFFLINE", "").lower() in _TRUE_VALUES:
        return failed(
            node,
            f"has no {model}, and HF_HUB_OFFLINE prevents the download",
            fix=(
                f"run `vlaunch model pull {model}`, or copy it from this machine with `vlaunch"
                f" model copy {model} --local`, or remove HF_HUB_OFFLINE"
            ),
        )
    return skipped(node, f"{model} is on no node yet: `vlaunch serve` downloads it to each node")


def _copy_fix(model: str, source: Node, target: Node) -> str:
    if source.name == target.name:
        return f"resume the download: `vlaunch model pull {model}`"
    command = f"vlaunch model copy {model} --from {source.name} --to {target.name}"
    return f"copy it from {source.name}: `{command}`"


def _judge_token(evidence: Evidence) -> Sequence[Finding]:
    hub, model = evidence.hub or HubAccess(), evidence.model
    if model.startswith("/"):
        return [skipped("", f"{model} is a path; it does not come from Hugging Face")]
    if not model:
        return [skipped("", _NO_MODEL_NAMED)]
    if reason := _unanswered_reason(hub):
        return [skipped("", reason)]
    if hub.status == "ok":
        return [passed("", hub.text or f"the token can read {model}")]
    text, fix = {
        "unauthorized": (
            "Hugging Face rejects the token",
            (
                "create a new token at https://huggingface.co/settings/tokens and set `secrets:"
                " {HF_TOKEN: {env: HF_TOKEN}}`"
            ),
        ),
        "gated": (
            f"{model} is gated, and the token's account has no access",
            (
                f"accept its licence at https://huggingface.co/{model} with that account, and set"
                " HF_TOKEN under `secrets:`"
            ),
        ),
        "not found": (
            f"{model} does not exist on Hugging Face, or the token cannot read it",
            (
                "correct the model's name, or set a token that may read it: `secrets: {HF_TOKEN:"
                " {env: HF_TOKEN}}`"
            ),
        ),
    }[hub.status]
    return [failed("", text, evidence=hub.text, fix=fix)]


def _unanswered_reason(hub: HubAccess) -> str:
    """Return the reason if Hugging Face did not judge the token, else an empty string."""
    if hub.status == "not asked":
        return hub.text or "Hugging Face was not queried"
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
            "a node without it downloads while the others wait, and ranks with different weights"
            " produce nonsense"
        ),
        judge=_judge_model,
        group="model",
    ),
    Check(
        id="hf-token",
        what="the Hugging Face token can read the model",
        why="otherwise every node fails minutes later with a stack trace",
        judge=_judge_token,
        group="model",
    ),
)
