"""A checked file → a `Job`, with every default filled in."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from launcher.batch import inputs, rules
from launcher.batch.draft import Draft
from launcher.batch.driver.job import (
    DataParallel,
    Engine,
    Format,
    Limits,
    Message,
    Predict,
    Preprocess,
    Prompt,
    Read,
    Write,
)
from launcher.batch.job_paths import PathBounds
from launcher.batch.schema import JobFile
from launcher.batch.shape import Job
from launcher.core.domain import Inventory
from launcher.core.values import to_json_value
from launcher.inventory.engine_args import python_name
from launcher.inventory.schema import Section

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Shape = TypeVar("_Shape", bound="DataclassInstance")


def build_job(draft: Draft, *, name: str, within: PathBounds) -> Job:
    """Return the job of a draft without mistakes; `name` is its default name."""
    file, paths, mode = draft.file, draft.paths, draft.mode
    assert paths.to is not None  # noqa: S101 - without mistakes
    format = file.read.format or inputs.common_format(paths.names)
    requests = file.write.format == "openai"
    request_id = {"id": "custom_id"} if requests else {}
    generates = mode != "predict" and file.task == "generate" and not requests
    code: dict[str, Path] = {}
    for files in paths.code.values():
        code |= files
    return Job(
        name=file.job or name,
        mode=mode,
        model=file.model or "",
        task=file.task,
        lora=file.lora,
        read=_fill(Read, file.read, sources=(), format=format, **request_id),
        prompt=None if mode == "predict" or requests else _build_prompt(file, format),
        sampling=_build_sampling(file) if generates else {},
        keep={} if requests else file.keep,
        engine=_build_engine(file),
        data_parallel=_fill_optional(DataParallel, file.data_parallel, port=0, nodes=()),
        predict=_fill_optional(Predict, file.predict, target=paths.targets.get("predict")),
        preprocess=_fill_optional(
            Preprocess, file.preprocess, target=paths.targets.get("preprocess")
        ),
        write=_fill(Write, file.write),
        limits=_fill(Limits, file.limits),
        sources=paths.sources,
        to=paths.to,
        code=code,
        inside=within.inside,
    )


def with_defaults(job: Job, inventory: Inventory) -> Job:
    """Return the job with the inventory's engine arguments as defaults; null leaves one to vLLM."""
    if job.mode == "predict":
        return job
    defaults = {python_name(key): value for key, value in inventory.engine_args.items()}
    merged = {**defaults, **job.engine.args}
    args = {key: value for key, value in merged.items() if value is not None}
    return replace(job, engine=replace(job.engine, args=args))


def _fill(shape: type[_Shape], section: Section, **other: Any) -> _Shape:
    """Return a `shape` from the section's fields of the same names and `other`."""
    names = {field.name for field in fields(shape)} & type(
        section
    ).model_fields.keys() - other.keys()
    return shape(**{name: to_json_value(getattr(section, name)) for name in names}, **other)


def _fill_optional(shape: type[_Shape], section: Section | None, **other: Any) -> _Shape | None:
    return None if section is None else _fill(shape, section, **other)


def _build_engine(file: JobFile) -> Engine:
    args = {python_name(key): value for key, value in file.engine.args.items()}
    placement = file.engine.placement.upper().replace("-", "_")
    return _fill(Engine, file.engine, args=args, placement=placement)


def _build_prompt(file: JobFile, format: Format) -> Prompt:
    prompt = file.prompt
    if prompt is None:
        return Prompt(column="text" if format == "text" else "prompt")
    chat = tuple(_fill(Message, message) for message in prompt.chat or ())
    return _fill(Prompt, prompt, chat=chat, pair=tuple(prompt.pair or ()))


def _build_sampling(file: JobFile) -> dict[str, Any]:
    written: dict[str, Any] = file.sampling.model_dump(
        by_alias=True, exclude_none=True, exclude={"n"}
    )
    return {"max_tokens": rules.DEFAULT_TOKENS} | written
