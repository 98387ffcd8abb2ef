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
from launcher.batch.places import Bounds
from launcher.batch.schema import JobFile
from launcher.batch.shape import Job
from launcher.core.domain import Inventory
from launcher.core.values import plain
from launcher.inventory.engine_args import python_name
from launcher.inventory.schema import Section

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Shape = TypeVar("_Shape", bound="DataclassInstance")


def job(draft: Draft, *, name: str, within: Bounds) -> Job:
    """Return the job of a draft without mistakes; `name` is used where the file gives none."""
    file, found, mode = draft.file, draft.found, draft.mode
    assert found.to is not None  # noqa: S101 - without mistakes
    format = file.read.format or inputs.common_format(found.names)
    code: dict[str, Path] = {}
    for files in found.code.values():
        code |= files
    return Job(
        name=file.job or name,
        mode=mode,
        model=file.model or "",
        task=file.task,
        read=_filled(Read, file.read, sources=(), format=format),
        prompt=None if mode == "predict" else _prompt(file, format),
        sampling=_sampling(file) if mode != "predict" and file.task == "generate" else {},
        keep=file.keep,
        engine=_engine(file),
        data_parallel=_if_written(DataParallel, file.data_parallel, port=0, nodes=()),
        predict=_if_written(Predict, file.predict, target=found.targets.get("predict")),
        preprocess=_if_written(Preprocess, file.preprocess, target=found.targets.get("preprocess")),
        write=_filled(Write, file.write),
        limits=_filled(Limits, file.limits),
        sources=found.sources,
        to=found.to,
        code=code,
        inside=within.inside,
    )


def with_defaults(made: Job, inventory: Inventory) -> Job:
    """Return the job with the inventory's engine arguments where it gives none; one it gives
    without a value is left to vLLM.
    """
    if made.mode == "predict":
        return made
    defaults = {python_name(key): value for key, value in inventory.engine_args.items()}
    merged = {**defaults, **made.engine.args}
    args = {key: value for key, value in merged.items() if value is not None}
    return replace(made, engine=replace(made.engine, args=args))


def _filled(shape: type[_Shape], section: Section, **other: Any) -> _Shape:
    """Return a `shape` with what the section has under the same names, and `other`."""
    names = {each.name for each in fields(shape)} & type(section).model_fields.keys() - other.keys()
    return shape(**{name: plain(getattr(section, name)) for name in names}, **other)


def _if_written(shape: type[_Shape], section: Section | None, **other: Any) -> _Shape | None:
    return None if section is None else _filled(shape, section, **other)


def _engine(file: JobFile) -> Engine:
    args = {python_name(key): value for key, value in file.engine.args.items()}
    placement = file.engine.placement.upper().replace("-", "_")
    return _filled(Engine, file.engine, args=args, placement=placement)


def _prompt(file: JobFile, format: Format) -> Prompt:
    prompt = file.prompt
    if prompt is None:
        return Prompt(column="text" if format == "text" else "prompt")
    chat = tuple(_filled(Message, one) for one in prompt.chat or ())
    return _filled(Prompt, prompt, chat=chat, pair=tuple(prompt.pair or ()))


def _sampling(file: JobFile) -> dict[str, Any]:
    written: dict[str, Any] = file.sampling.model_dump(
        by_alias=True, exclude_none=True, exclude={"n"}
    )
    return {"max_tokens": rules.DEFAULT_TOKENS} | written
