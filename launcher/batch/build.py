"""A checked file → a `Job`, with every default filled in."""

from __future__ import annotations

from typing import Any

from launcher.batch import formats, rules
from launcher.batch.draft import Draft
from launcher.batch.places import Bounds
from launcher.batch.schema import JobFile
from launcher.batch.shape import (
    DataParallel,
    Engine,
    Format,
    Job,
    Limits,
    Message,
    Predict,
    Preprocess,
    Prompt,
    Read,
    Write,
)


def job(draft: Draft, *, name: str, within: Bounds) -> Job:
    """Return the job of a draft without mistakes; `name` is used where the file gives none."""
    file, found, mode = draft.file, draft.found, draft.mode
    assert found.to is not None  # noqa: S101 - without mistakes
    read = file.read
    format = read.format or formats.common(found.names)
    return Job(
        name=file.job or name,
        mode=mode,
        read=Read(
            sources=found.sources,
            format=format,
            id=read.id,
            limit=read.limit,
            row_bytes=read.row_bytes,
        ),
        write=Write(
            to=found.to,
            format=file.write.format,
            rows_per_file=file.write.rows_per_file,
            seconds=float(file.write.seconds),
        ),
        inside=within.inside,
        model=file.model or "",
        prompt=None if mode == "predict" else _prompt(file, format),
        sampling={} if mode == "predict" else _sampling(file),
        keep=file.keep,
        engine=Engine(
            args={rules.argument(key): value for key, value in file.engine.args.items()},
            tp=file.engine.tp,
            pp=file.engine.pp,
            replicas=file.engine.replicas,
            batch_size=file.engine.batch_size,
            placement=file.engine.placement,
        ),
        data_parallel=_data_parallel(file),
        predict=_predict(draft),
        preprocess=_preprocess(draft),
        limits=Limits(
            restarts=file.limits.restarts, stall=float(file.limits.stall), errors=file.limits.errors
        ),
    )


def _prompt(file: JobFile, format: Format) -> Prompt:
    prompt = file.prompt
    if prompt is None:
        return Prompt(column="text" if format == "text" else "prompt")
    chat = tuple(Message(role=one.role, content=one.content) for one in prompt.chat or ())
    return Prompt(
        column=prompt.column, template=prompt.template, chat=chat, chat_args=prompt.chat_args
    )


def _sampling(file: JobFile) -> dict[str, Any]:
    written: dict[str, Any] = file.sampling.model_dump(
        by_alias=True, exclude_none=True, exclude={"n"}
    )
    return {"max_tokens": rules.DEFAULT_TOKENS} | written


def _data_parallel(file: JobFile) -> DataParallel | None:
    ranks = file.data_parallel
    if ranks is None:
        return None
    return DataParallel(
        size=ranks.size,
        expert_parallel=ranks.expert_parallel,
        timeout=float(ranks.timeout),
        round_rows=ranks.round_rows,
    )


def _predict(draft: Draft) -> Predict | None:
    predict = draft.file.predict
    if predict is None:
        return None
    return Predict(
        target=draft.found.targets["predict"],
        code=draft.found.code["predict"],
        args=predict.args,
        num_gpus=float(predict.num_gpus),
        num_cpus=float(predict.num_cpus),
        batch_size=predict.batch_size,
        replicas=predict.replicas,
    )


def _preprocess(draft: Draft) -> Preprocess | None:
    stage = draft.file.preprocess
    if stage is None:
        return None
    return Preprocess(
        target=draft.found.targets["preprocess"],
        code=draft.found.code["preprocess"],
        num_cpus=float(stage.num_cpus),
        batch_size=stage.batch_size,
        replicas=stage.replicas,
    )
