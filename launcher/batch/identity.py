"""The identity of a batch job: the keys that determine its answers, and their changes.

Two runs of one identity continue the same output.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from .job import Job, to_json

# Keys that affect speed, or when a job fails, but no answer: they may change between two runs.
TUNING = (
    *("engine.tp", "engine.pp", "engine.replicas", "engine.batch_size", "engine.placement"),
    *("engine.order", "data_parallel", "predict.num_gpus", "predict.num_cpus"),
    *("predict.batch_size", "predict.replicas", "preprocess.num_cpus", "preprocess.batch_size"),
    *("preprocess.replicas", "write.rows_per_file", "write.seconds", "limits"),
)
# Engine arguments that change answers: weights, precision, tokenization, decoding. The others
# affect speed and memory; another `max_model_len` only affects rows that are too long.
IDENTITY_ARGS = (
    *("revision", "code_revision", "hf_config_path", "config_format", "hf_overrides"),
    *("rope_scaling", "rope_theta", "dtype", "quantization", "quantization_config"),
    *("kv_cache_dtype", "kv_cache_dtype_skip_layers", "calculate_kv_scales", "mamba_cache_dtype"),
    *("mamba_ssm_cache_dtype", "tokenizer", "tokenizer_revision", "tokenizer_mode", "seed"),
    *("pooler_config", "generation_config", "override_generation_config", "logits_processors"),
    *("reasoning_parser", "reasoning_config", "structured_outputs_config"),
    # of requests in OpenAI's format
    *("chat_template", "chat_template_content_format", "default_chat_template_kwargs"),
    *("enable_auto_tool_choice", "tool_call_parser", "lora_modules", "served_model_name"),
)
_MAX_VALUE_CHARS = 60
_FILE = re.compile(r"[0-9a-f]{64}, ([0-9]{1,18}) bytes")
_FILES = ("input ", "code ")
_ORDER = "input order"


def flatten(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON of a job by dotted key, such as `engine.args.dtype`."""
    flat: dict[str, Any] = {}
    for section, value in spec.items():
        if section == "keep" and isinstance(value, dict):
            flat[section] = [f"{name}: {kind}" if kind else name for name, kind in value.items()]
        elif not isinstance(value, dict):
            flat[section] = value
        else:
            for name, item in value.items():
                flat |= _flatten_item(f"{section}.{name}", item)
    return flat


def _flatten_item(key: str, value: Any) -> dict[str, Any]:
    if key.endswith("args") and isinstance(value, dict):
        return {f"{key}.{name}": item for name, item in value.items()}
    if key == "prompt.chat":
        value = [f"{message['role']}: {message['content']}" for message in value]
    if key in ("prompt.chat", "prompt.pair"):
        return {f"{key}[{index}]": item for index, item in enumerate(value)}
    return {key: value}


def is_tuning(key: str) -> bool:
    """Return True if a dotted key affects no answer, and may change between two runs."""
    if key.startswith("engine.args."):
        return key.removeprefix("engine.args.") not in IDENTITY_ARGS
    return key in TUNING or key.partition(".")[0] in TUNING


def job_identity(job: Job, files: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that determine a job's answers, and the files: paths may change.

    Args:
        job: the job.
        files: input, code and output, by dotted key.
    """
    paths = dict.fromkeys(("job", "read.paths", "write.path", "predict.files", "preprocess.files"))
    task = {"task": None if job.task == "generate" else job.task}
    flat = {**flatten(to_json(job, Job)), **paths, **task, **files}
    return {
        key: value
        for key, value in flat.items()
        if not is_tuning(key) and value is not None and value != ""
    }


def tuning_values(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that may change between runs, by dotted key.

    Args:
        spec: `job.json`, perhaps from a node: other sections may have any form.
    """
    sections = {key.partition(".")[0] for key in TUNING} & spec.keys()
    flat = flatten({section: spec[section] for section in sections})
    return {key: value for key, value in flat.items() if is_tuning(key)}


def identity_digest(identity: dict[str, Any]) -> str:
    """Return the SHA-256 of an identity."""
    return hashlib.sha256(
        json.dumps(identity, sort_keys=True, ensure_ascii=True).encode()
    ).hexdigest()


def diff_identity(old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    """Return a line per change: `prompt.template: "a" → "b"`, `input x.jsonl: changed (1 → 2
    bytes)`.
    """
    keys = [*new, *(key for key in old if key not in new)]
    files = any(_is_file(key) and (key in old) != (key in new) for key in keys)
    # A new or missing file also changes the order: report it once.
    changed = [
        key for key in keys if old.get(key) != new.get(key) and not (key == _ORDER and files)
    ]
    return [f"{_clean(key)}: {_format_change(key, old.get(key), new.get(key))}" for key in changed]


def _format_change(key: str, old: object, new: object) -> str:
    if not _is_file(key):
        return f"{_format_value(old, new)} → {_format_value(new, old)}"
    if old is None:
        return "new"
    if new is None:
        return "gone"
    before, after = _file_bytes(old), _file_bytes(new)
    if before is None or after is None:
        return "changed"
    if before == after:
        return f"changed (still {after:,} bytes)"
    return f"changed ({before:,} → {after:,} bytes)"


def _is_file(key: str) -> bool:
    return key.startswith(_FILES) and key != _ORDER


def _file_bytes(value: object) -> int | None:
    match = _FILE.fullmatch(value) if isinstance(value, str) else None
    return int(match[1]) if match else None


def _format_value(value: object, other: object) -> str:
    """Format one side of a change; a long one around the first difference."""
    if value is None:
        return "nothing"
    text, other_text = _to_text(value), _to_text(other)
    if len(text) <= _MAX_VALUE_CHARS:
        return text
    common_length = next(
        (
            index
            for index, (char, other_char) in enumerate(zip(text, other_text, strict=False))
            if char != other_char
        ),
        min(len(text), len(other_text)),
    )
    start = max(0, min(common_length - _MAX_VALUE_CHARS // 3, len(text) - _MAX_VALUE_CHARS))
    return (
        ("…" if start else "")
        + text[start : start + _MAX_VALUE_CHARS]
        + ("…" if start + _MAX_VALUE_CHARS < len(text) else "")
    )


def _to_text(value: object) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return _clean(", ".join(value))
    return _clean(json.dumps(value, ensure_ascii=False, sort_keys=True))


def _clean(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
