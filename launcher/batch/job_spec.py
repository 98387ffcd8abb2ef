"""`job.json` for the driver in the cluster, with the job's identity (key `meaning`) and its digest.

Settings outside the identity may change between runs: they affect speed, not answers.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from launcher.batch.driver import job as driver
from launcher.batch.driver.job import DataParallel, RankHost
from launcher.batch.inputs import ShippedFile
from launcher.batch.shape import Job, Source
from launcher.core.domain import Inventory
from launcher.core.errors import RequestError

# bytes of `job.json`; one answer returns it with the names of the received files, cut at 8 MiB
MAX_BYTES = 5 * 2**20
# Engine arguments that change answers: weights, precision, tokenization, decoding. The others
# affect speed and memory; another `max_model_len` only affects rows that are too long.
_IDENTITY_ARGS = (
    "revision",
    "code_revision",
    "hf_config_path",
    "config_format",
    "hf_overrides",
    "rope_scaling",
    "rope_theta",
    "dtype",
    "quantization",
    "quantization_config",
    "kv_cache_dtype",
    "kv_cache_dtype_skip_layers",
    "calculate_kv_scales",
    "mamba_cache_dtype",
    "mamba_ssm_cache_dtype",
    "tokenizer",
    "tokenizer_revision",
    "tokenizer_mode",
    "seed",
    "pooler_config",
    "generation_config",
    "override_generation_config",
    "logits_processors",
    "reasoning_parser",
    "reasoning_config",
    "structured_outputs_config",
    # of requests in OpenAI's format
    "chat_template",
    "chat_template_content_format",
    "default_chat_template_kwargs",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "lora_modules",
    "served_model_name",
)


def work_folder(inventory: Inventory, name: str) -> str:
    """Return the folder of the job `name` on the head, at the same path in its container."""
    return f"{jobs_folder(inventory)}/{name}"


def jobs_folder(inventory: Inventory) -> str:
    """Return the folder of the cluster's batch jobs on the head."""
    return f"{inventory.head.hf_home.rstrip('/')}/vlaunch/{inventory.cluster}/batch"


def job_spec(job: Job, shipped: Sequence[ShippedFile], inventory: Inventory) -> dict[str, Any]:
    """Return `job.json` of `job` on the cluster of `inventory`.

    Args:
        job: the checked job.
        shipped: from `inputs.read_shipped`.
        inventory: the cluster.

    Raises:
        RequestError: too many shipped files for its size limit.
    """
    work = work_folder(inventory, job.name)
    identity = job_identity(job, shipped)
    payload = driver.to_json(
        replace(
            job,
            cluster=inventory.cluster,
            work=work,
            out=f"{work}/output" if job.to.where == "control" else job.to.text,
            identity=identity,
            digest=identity_digest(identity),
            read=replace(job.read, sources=_source_paths(job, shipped, work)),
            data_parallel=job.data_parallel and place_ranks(job.data_parallel, inventory),
        )
    )
    if (length := len(json.dumps(payload))) > MAX_BYTES:
        raise RequestError(
            f"the description of `{job.name}` is too long: it lists {len(shipped):,}"
            " files on this machine",
            evidence=f"{length:,} bytes, at most {MAX_BYTES:,}",
            hint=(
                "put the rows into fewer files, or read them from storage that the head can"
                " access: `nodes:/…`, s3://, gs:// or hdfs://"
            ),
        )
    return payload


def job_identity(job: Job, shipped: Sequence[ShippedFile]) -> dict[str, Any]:
    """Return everything that determines the answers, flat, by job file keys; files by name and
    content.
    """
    read = job.read
    flat = {
        "mode": job.mode,
        "model": job.model,
        "task": None if job.task == "generate" else job.task,
        **_prefix_keys("lora", job.lora or {}),
        **_identity_of_files(shipped),
        "read.paths": [source.text for source in job.sources if source.where != "control"] or None,
        "read.format": read.format,
        "read.id": read.id,
        "read.limit": read.limit,
        "read.row_bytes": read.row_bytes,
        **_identity_of_prompt(job),
        **{f"engine.args.{key}": job.engine.args.get(key) for key in _IDENTITY_ARGS},
        **_prefix_keys("sampling", job.sampling),
        "keep": _keep_list(job),
        **_identity_of_stages(job),
        "write.path": _output_identity(job.to),
        "write.format": job.write.format,
    }
    return {key: value for key, value in flat.items() if value not in (None, "")}


def _identity_of_files(shipped: Sequence[ShippedFile]) -> dict[str, Any]:
    rows = [file for file in shipped if file.source is not None]
    code = [file for file in shipped if file.source is None]
    return {
        **{_input_key(file.label): _file_identity(file) for file in rows},
        **{f"code {file.label}": _file_identity(file) for file in code},
        "input order": [file.label for file in rows] or None,
    }


def _input_key(label: str) -> str:
    """Return an input file's key; a file called `order` must not clash with `input order`."""
    return f"input {'./' if label == 'order' else ''}{label}"


def _identity_of_prompt(job: Job) -> dict[str, Any]:
    prompt = job.prompt
    if prompt is None:
        return {}
    messages = [f"{message.role}: {message.content}" for message in prompt.chat]
    return {
        "prompt.column": prompt.column,
        "prompt.template": prompt.template,
        "prompt.messages": prompt.messages,
        "prompt.tools": prompt.tools,
        **{f"prompt.pair[{index}]": text for index, text in enumerate(prompt.pair)},
        **{f"prompt.chat[{index}]": message for index, message in enumerate(messages)},
        **_prefix_keys("prompt.chat_args", prompt.chat_args),
    }


def _identity_of_stages(job: Job) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    if job.predict is not None:
        flat["predict.class"] = job.predict.target
        flat |= _prefix_keys("predict.args", job.predict.args)
    if job.preprocess is not None:
        flat["preprocess.function"] = job.preprocess.target
    return flat


def _prefix_keys(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{section}.{key}": value for key, value in values.items()}


def _keep_list(job: Job) -> list[str] | None:
    if job.keep is None:
        return None
    return [name if kind is None else f"{name}: {kind}" for name, kind in job.keep.items()]


def identity_digest(identity: dict[str, Any]) -> str:
    """Return the SHA-256 of an identity."""
    return hashlib.sha256(
        json.dumps(identity, sort_keys=True, ensure_ascii=True).encode()
    ).hexdigest()


def _file_identity(file: ShippedFile) -> str:
    return f"{file.sha256}, {file.bytes} bytes"


def _output_identity(source: Source) -> str:
    # The local output folder may change: the answers are the same.
    return "gathered" if source.where == "control" else source.shown


def _source_paths(job: Job, shipped: Sequence[ShippedFile], work: str) -> tuple[str, ...]:
    paths: list[str] = []
    for index, source in enumerate(job.sources):
        paths += (
            [f"{work}/{file.to}" for file in shipped if file.source == index]
            if source.where == "control"
            else [source.text]
        )
    return tuple(paths)


def place_ranks(ranks: DataParallel, inventory: Inventory) -> DataParallel:
    """Return the ranks with a cluster's nodes, the head first, and their rendezvous port."""
    nodes = (inventory.head, *inventory.workers)
    return replace(
        ranks,
        port=inventory.ports.mp_master,
        nodes=tuple(RankHost(ip=node.ip, gpus=node.gpus) for node in nodes),
    )
