"""Adaptation of a `vllm serve` command to a cluster; drops options that vlaunch sets. Pure."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from launcher.core import redaction, secret_patterns
from launcher.core.domain import Backend, Inventory
from launcher.core.errors import RequestError
from launcher.recipes.library import version_numbers
from launcher.recipes.vllm_command import CommandOption, VllmCommand, parse_options
from launcher.tools import vllm

# Variables that vlaunch sets on each node (`tools/containers.py`, `serving/server_spec.py`,
# `network/engine_log.py`), with their sources. Options: `vllm.RESERVED`.
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
# Read before Python starts, or by Ray, which starts its workers before vLLM passes them variables
# (v1/executor/ray_executor_v2.py, 0.32).
_READ_EARLY = re.compile("(LD_|PYTHON|MALLOC_|OMP_|KMP_|GOMP_|RAY_).*")
_SHELL_VARIABLE = re.compile(r"\$(?:\w+|\{\w+\}|\()|`")
_SECRETS = {"--api-key": "VLLM_API_KEY", "--hf-token": "HF_TOKEN"}
Problem = tuple[str, str]  # the problem, and a hint


@dataclass(slots=True, kw_only=True)
class AdaptedCommand:
    """Arguments and variables for vLLM; `dropped` has the other options, each with its key in
    `vllm.RESERVED`.
    """

    args: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    dropped: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def adapt_command(
    command: VllmCommand,
    inventory: Inventory,
    *,
    args: Sequence[str],
    replicas: int,
    backend: Backend,
) -> AdaptedCommand:
    """Adapt a command to the nodes of `inventory`; its `env:` and `args` override the command.

    Raises RequestError with all problems.
    """
    result = AdaptedCommand(notes=[*command.notes])
    _check_image(result, command, inventory)
    accepted = [o for o in command.options if _accept_option(result, o, inventory, replicas)]
    overrides = {option.name: option for option in parse_options(args)}
    for option in accepted:
        if (other := overrides.get(option.name, option)) != option:
            result.notes.append(f"`{other.text}` replaces `{option.text}`")
    accepted = [option for option in accepted if option.name not in overrides]
    result.args = (*(argument for option in accepted for argument in option.argv), *args)
    for name, value in command.env.items():
        if _accept_variable(result, name, value, inventory):
            result.env[name] = value
    result.problems += value_problems(accepted, result.env)
    result.problems += _late_variables(result.env) if backend == "ray" else ()
    if result.problems:
        raise RequestError(
            f"{command.origin} cannot run on this cluster",
            evidence=[text for text, _ in result.problems],
            hint="\n".join(dict.fromkeys(hint for _, hint in result.problems)),
        )
    return result


def _accept_option(
    result: AdaptedCommand, option: CommandOption, inventory: Inventory, replicas: int
) -> bool:
    """Return False for an option that vlaunch sets, and record it."""
    key = vllm.reserved_key(option.argv[0])
    if key is None or (vllm.balancing_modes(option.argv[:1]) and replicas > 1):
        return True
    name = _SECRETS.get(key)
    text = option.name if name else option.text
    if name:
        result.problems += _hide_secret(option.name, option.values, name, inventory)
    result.dropped.append((text, key))
    return False


def _accept_variable(result: AdaptedCommand, name: str, value: str, inventory: Inventory) -> bool:
    """Return False for a variable that vlaunch or the inventory sets, and record it."""
    if secret_patterns.NAME.search(name):
        result.problems += _hide_secret(name, [value], name, inventory)
        result.notes.append(f"dropped `{name}`; use `secrets:` of the inventory")
        return False
    for pattern, source in _RESERVED_ENV.items():
        if re.fullmatch(pattern, name):
            result.notes.append(f"dropped `{name}={value}`; vlaunch sets it from {source}")
            return False
    configured = {node.env.get(name) for node in inventory.nodes} - {None, value}
    if configured:
        other = configured.pop()
        result.notes.append(f"`{name}={other}` of the inventory replaces `{name}={value}`")
    return not any(name in node.env for node in inventory.nodes)


def _hide_secret(
    where: str, values: Sequence[str], name: str, inventory: Inventory
) -> Iterator[Problem]:
    """Redact the values of a secret; yields a problem unless `secrets:` has it."""
    for value in values:
        if not value.startswith("$"):
            redaction.add_secrets(value)
    if name not in inventory.secrets:
        yield (
            f"{where} is a secret, which command lines and logs on the nodes would show",
            f"add `secrets: {{{name}: {{env: {name}}}}}` to the inventory and remove {where}",
        )


def value_problems(options: Sequence[CommandOption], env: Mapping[str, str]) -> Iterator[Problem]:
    """Yield arguments that look like a secret or that contain shell syntax."""
    arguments = [(f"`{option.argv[0]}`", value) for option in options for value in option.argv]
    for where, argument in [*arguments, *env.items()]:
        if secret_patterns.VALUE.search(argument):
            redaction.add_secrets(argument)
            yield (
                f"a value of {where} looks like a secret",
                "name its source under `secrets:` in the inventory",
            )
        elif variable := _SHELL_VARIABLE.search(argument):
            yield (
                f"{where} contains the shell's `{variable[0]}`, which vlaunch does not expand",
                f"replace `{variable[0]}` with its value",
            )


def _late_variables(env: Mapping[str, str]) -> Iterator[Problem]:
    """Yield variables that would reach Ray's workers too late."""
    late = {name: value for name, value in env.items() if _READ_EARLY.fullmatch(name)}
    if late:
        lines = "\n".join(["env:", *(f'  {name}: "{value}"' for name, value in late.items())])
        yield (
            f"Ray starts its workers before {' and '.join(late)} can be passed to them",
            f"use `--backend mp`, or add to the inventory and run `vlaunch up`:\n{lines}",
        )


def _check_image(result: AdaptedCommand, command: VllmCommand, inventory: Inventory) -> None:
    """Compare a command's image and version with the inventory's image, by its tag."""
    image, version = command.image, command.version
    tag = re.search(r":(v?\d+(?:\.\d+)+)[^/:]*$", inventory.image.partition("@")[0])
    if tag and version_numbers(tag[1]) < version_numbers(version):
        problem = f"it needs vLLM {version}, but the cluster's image is {inventory.image}"
        hint = f"set `image:` to {image or 'a newer one'}, then run `vlaunch up`"
        result.problems.append((problem, hint))
    elif version and not (tag and version_numbers(version)):
        note = f"{command.origin} needs vLLM {version}; check that {inventory.image} has it"
        result.notes.append(note)
    if image and image != inventory.image and not image.endswith(":latest"):
        result.notes.append(
            f"{command.origin} names the image {image}, the cluster has {inventory.image}; to use"
            f" the other, set `image: {image}` in the inventory and run `vlaunch up`"
        )
