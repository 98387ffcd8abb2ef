"""A `vllm serve` command → the part that vlaunch does not set itself, and why. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.core import redaction, secret_patterns
from launcher.core.domain import Backend, Inventory
from launcher.core.errors import RequestError
from launcher.recipes.merge import numbers
from launcher.recipes.vllm_command import Option, VllmCommand, options
from launcher.tools import vllm

# Variables that vlaunch sets on each node (`launcher/tools/containers.py`, `serving/wanted.py`,
# `network/engine_log.py`), with what they follow from. Options: `vllm.RESERVED`.
_RESERVED_ENV = {
    r"\w+_SOCK(ET)?_IFNAME|MN_IF_NAME|OMPI_MCA_btl_tcp_if_include": (
        "`network: {interface: …}` of the inventory"
    ),
    r"NCCL_IB_HCA|NVSHMEM_HCA_LIST|UCX_NET_DEVICES": "`network: {hca: […]}` of the inventory",
    r"NCCL_DEBUG(_SUBSYS|_FILE)?": "its check of NCCL's transport",
    r"VLLM_HOST_IP": "`ip:` of each node",
    r"VLLM_ENGINE_READY_TIMEOUT_S": "`--timeout`",
    r"HF_HOME": "`hf_home:` of the inventory",
    r"(CUDA|HIP|ROCR)_VISIBLE_DEVICES|CUDA_DEVICE_ORDER": "`gpus:` of each node, or `--gpus`",
    r"VLLM_CACHE_ROOT|(TORCHINDUCTOR|TRITON|TILELANG)_CACHE_DIR|DG_JIT_CACHE_DIR"
    r"|FLASHINFER_WORKSPACE_BASE|CUDA_CACHE_PATH": "`cache_dir:` of the inventory",
    r"VLLM_RAY_DP_.*|AUTOSCALER_UPDATE_INTERVAL_S|RAY_(ADDRESS|AUTH_.*|ROTATION_.*"
    r"|USAGE_STATS_ENABLED|gcs_rpc_server_reconnect_timeout_s|health_check_.*|memory_.*"
    r"|process_group_.*|worker_niceness)": "its own settings of Ray",
}
# Read before Python begins, or by Ray, which starts its workers before vLLM hands variables on
# (v1/executor/ray_executor_v2.py, 0.32).
_READ_EARLY = re.compile("(LD_|PYTHON|MALLOC_|OMP_|KMP_|GOMP_|RAY_).*")
_SHELL_VARIABLE = re.compile(r"\$(?:\w+|\{\w+\}|\()|`")
_SECRETS = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}
Problem = tuple[str, str]  # the problem, and a hint


@dataclass(slots=True, kw_only=True)
class Adapted:
    """The arguments and variables that vLLM is given; `dropped` has the other options, each with
    its key in `vllm.RESERVED`.
    """

    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def adapt(
    command: VllmCommand,
    inventory: Inventory,
    *,
    args: Sequence[str],
    replicas: int,
    backend: Backend,
) -> Adapted:
    """Return what of a command is served on the nodes of `inventory`, whose `env:` wins, as do the
    other arguments `args`.

    Raises RequestError with every problem.
    """
    result = Adapted(notes=[*command.notes])
    _check_image(result, command, inventory)
    kept = [option for option in command.options if _keep(result, option, inventory, replicas)]
    given = {option.name: option for option in options(args)}
    for option in kept:
        if (other := given.get(option.name, option)) != option:
            result.notes.append(f"`{other.text}` replaces `{option.text}`")
    kept = [option for option in kept if option.name not in given]
    result.args = (*(word for option in kept for word in option.words), *args)
    for name, value in command.env.items():
        if _keep_variable(result, name, value, inventory):
            result.env[name] = value
    result.problems += _unusable(kept, result.env)
    result.problems += _late(result.env) if backend == "ray" else ()
    if result.problems:
        raise RequestError(
            f"{command.origin} cannot be served here",
            evidence=[text for text, _ in result.problems],
            hint="\n".join(dict.fromkeys(hint for _, hint in result.problems)),
        )
    return result


def _keep(result: Adapted, option: Option, inventory: Inventory, replicas: int) -> bool:
    """Return False for an option that vlaunch sets, and record it."""
    key = vllm.reserved(option.words[0])
    if key is None or (vllm.balancing(option.words[:1]) and replicas > 1):
        return True
    name = _SECRETS.get(key)
    text = option.name if name else option.text
    if name:
        result.problems += _secret(option.name, option.values, name, inventory)
    result.dropped.append((text, key))
    return False


def _keep_variable(result: Adapted, name: str, value: str, inventory: Inventory) -> bool:
    """Return False for a variable that vlaunch or the inventory sets, and record it."""
    if secret_patterns.NAME.search(name):
        result.problems += _secret(name, [value], name, inventory)
        result.notes.append(f"dropped `{name}`; use `secrets:` of the inventory")
        return False
    for pattern, source in _RESERVED_ENV.items():
        if re.fullmatch(pattern, name):
            result.notes.append(f"dropped `{name}={value}`; vlaunch sets it from {source}")
            return False
    there = {node.env.get(name) for node in inventory.nodes} - {None, value}
    if there:
        result.notes.append(f"`{name}={there.pop()}` of the inventory replaces `{name}={value}`")
    return not any(name in node.env for node in inventory.nodes)


def _secret(
    where: str, values: Sequence[str], name: str, inventory: Inventory
) -> Iterator[Problem]:
    """Hide the values of a secret; it is a problem unless the inventory has it under `secrets:`."""
    for value in values:
        if not value.startswith("$"):
            redaction.learn(value)
    if name not in inventory.secrets:
        yield (
            f"{where} is a secret, which command lines and logs on the nodes would show",
            f"add `secrets: {{{name}: {{env: {name}}}}}` to the inventory and remove {where}",
        )


def _unusable(kept: Sequence[Option], env: Mapping[str, str]) -> Iterator[Problem]:
    """Yield words that look like a secret, or that a shell was to replace."""
    words = [(f"`{option.words[0]}`", word) for option in kept for word in option.words]
    for where, word in [*words, *env.items()]:
        if secret_patterns.VALUE.search(word):
            redaction.learn(word)
            yield (
                f"a value of {where} looks like a secret",
                "name its source under `secrets:` in the inventory",
            )
        elif variable := _SHELL_VARIABLE.search(word):
            yield (
                f"{where} contains the shell's `{variable[0]}`, which vlaunch does not expand",
                f"replace `{variable[0]}` with its value",
            )


def _late(env: Mapping[str, str]) -> Iterator[Problem]:
    """Yield variables that Ray's workers would get too late."""
    late = {name: value for name, value in env.items() if _READ_EARLY.fullmatch(name)}
    if late:
        lines = "\n".join(["env:", *(f'  {name}: "{value}"' for name, value in late.items())])
        yield (
            f"Ray starts its workers before {' and '.join(late)} can be passed to them",
            f"use `--backend mp`, or add to the inventory and run `vlaunch up`:\n{lines}",
        )


def _check_image(result: Adapted, command: VllmCommand, inventory: Inventory) -> None:
    """Compare a command's image and version with the inventory's image, by its tag."""
    image, version = command.image, command.version
    tag = re.search(r":(v?\d+(?:\.\d+)+)[^/:]*$", inventory.image.partition("@")[0])
    if tag and numbers(tag[1]) < numbers(version):
        problem = f"it needs vLLM {version}, and the cluster's image is {inventory.image}"
        hint = f"set `image:` to {image or 'a newer one'}, then run `vlaunch up`"
        result.problems.append((problem, hint))
    elif version and not (tag and numbers(version)):
        note = f"{command.origin} needs vLLM {version}; check that {inventory.image} has it"
        result.notes.append(note)
    if image and image != inventory.image and not image.endswith(":latest"):
        result.notes.append(
            f"{command.origin} names the image {image}, the cluster has {inventory.image}; to use"
            f" the other, set `image: {image}` in the inventory and run `vlaunch up`"
        )
