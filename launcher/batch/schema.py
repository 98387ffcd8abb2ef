"""The shape of a job file: every key, its type and its explanation.

Rules between keys are in `rules`.
"""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from launcher.batch import values
from launcher.batch.driver.job import (
    ColumnType,
    DataParallel,
    Engine,
    Format,
    Limits,
    Mode,
    Order,
    OutputFormat,
    Predict,
    Preprocess,
    Read,
    Task,
    Write,
)
from launcher.core.values import ClusterName, EngineArg, Model, Size, expand_shorthand
from launcher.inventory.schema import Section

# Defaults come from the driver's own classes.
_READ, _WRITE = Read(sources=(), format="text"), Write()
_ENGINE, _LIMITS, _DP = Engine(), Limits(), DataParallel(size=1, port=0, nodes=())
_PREDICT, _PREPROCESS = Predict(target=""), Preprocess(target="")
Values = Annotated[dict[str, Any], values.Plain]
Rows = Annotated[int, Field(ge=1, le=1_000_000)]
Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]
ReplicasOf = values.Replicas


class ReadSection(Section):
    """Input rows. `read: PATH` and `read: [PATH, …]` are short for `paths`."""

    paths: values.JobPaths = Field(
        min_length=1,
        description=(
            "Files, folders or patterns such as data/*.jsonl; on this machine (relative to the"
            " job's folder), on the nodes as nodes:/path, or at s3://, gs:// or hdfs://."
        ),
    )
    format: Format | None = Field(
        default=None,
        description=(
            "text (a row per line), jsonl, csv or parquet; detected from the file extension by"
            " default."
        ),
    )
    id: values.Column | None = Field(
        default=None, description="Column with the id of a row, written with error rows."
    )
    limit: int | None = Field(
        default=None, ge=1, le=10**12, description="Read only the first rows, up to this number."
    )
    row_bytes: Size = Field(
        default=_READ.row_bytes,
        description="Size limit of a row, such as 16MiB (default); larger rows become error rows.",
    )


class MessageSection(Section):
    """One message of a chat."""

    role: Literal["system", "user", "assistant", "developer", "tool"] = Field(
        description="Author of the message."
    )
    content: values.Template = Field(description="Template with the row's columns.")


class PromptSection(Section):
    """Prompt of each row: one of `column`, `template`, `chat`, `messages` and `pair`.

    `prompt: TEXT` is short for `template`.
    """

    column: values.Column | None = Field(
        default=None, description="Column with the complete prompt."
    )
    template: values.Template | None = Field(
        default=None,
        description="Jinja template with the row's columns, such as 'Translate: {{ text }}'.",
    )
    chat: list[MessageSection] | None = Field(
        default=None,
        min_length=1,
        max_length=64,
        description="Messages for the model's own chat template.",
    )
    messages: values.Column | None = Field(
        default=None,
        description="Column with a chat's messages, as a list or as JSON text.",
    )
    pair: list[values.Template] | None = Field(
        default=None,
        min_length=2,
        max_length=2,
        description="Templates of the two texts to compare (`task: score`): question, passage.",
    )
    tools: values.Column | None = Field(
        default=None,
        description="Column with the tools of a chat, as a list or as JSON text.",
    )
    chat_args: Values = Field(
        default_factory=dict,
        description="Arguments of the model's chat template, such as {enable_thinking: false}.",
    )


class StructuredSection(Section):
    """Required form of an answer: one of the first six keys."""

    json_: Annotated[Any, values.Plain] = Field(
        default=None, alias="json", description="A JSON Schema, as a mapping or as text."
    )
    regex: str | None = Field(default=None, min_length=1, description="A regular expression.")
    choice: list[str] | None = Field(default=None, min_length=1, description="Allowed answers.")
    grammar: str | None = Field(default=None, min_length=1, description="A context-free grammar.")
    json_object: bool | None = Field(default=None, description="Any JSON object.")
    structural_tag: str | None = Field(
        default=None, min_length=1, description="A structural tag, as JSON text."
    )
    disable_any_whitespace: bool | None = Field(
        default=None, description="Allow no whitespace between JSON tokens."
    )
    disable_additional_properties: bool | None = Field(
        default=None, description="Allow only properties that the schema names."
    )
    whitespace_pattern: str | None = Field(
        default=None, description="Whitespace allowed between JSON tokens, as a regex."
    )


class SamplingSection(Section):
    """Sampling parameters; omitted ones have vLLM's defaults, except `max_tokens`."""

    temperature: float | None = Field(
        default=None, ge=0, le=100, description="Randomness; 0 always picks the likeliest token."
    )
    top_p: float | None = Field(
        default=None, gt=0, le=1, description="Total probability of the tokens to sample from."
    )
    top_k: int | None = Field(
        default=None, ge=-1, description="Sample from this many of the likeliest tokens; 0: all."
    )
    min_p: float | None = Field(
        default=None, ge=0, le=1, description="Minimum probability relative to the top token."
    )
    max_tokens: int | None = Field(
        default=None,
        ge=1,
        le=10_000_000,
        description="Maximum answer length (default: 512 tokens).",
    )
    min_tokens: int | None = Field(
        default=None, ge=0, le=10_000_000, description="Minimum answer length, in tokens."
    )
    stop: values.Texts | None = Field(
        default=None, min_length=1, description="Text or texts that end an answer."
    )
    stop_token_ids: list[int] | None = Field(
        default=None, description="Token ids that end an answer."
    )
    seed: int | None = Field(default=None, description="Random seed of each row.")
    presence_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="Penalty on tokens that the answer already has."
    )
    frequency_penalty: float | None = Field(
        default=None, ge=-2, le=2, description="Penalty on tokens by their frequency in the answer."
    )
    repetition_penalty: float | None = Field(
        default=None,
        gt=0,
        le=100,
        description="Penalty on tokens in the prompt or the answer, if above 1.",
    )
    ignore_eos: bool | None = Field(
        default=None, description="Continue after the end-of-sequence token, up to `max_tokens`."
    )
    skip_special_tokens: bool | None = Field(
        default=None, description="Omit special tokens from the answer."
    )
    spaces_between_special_tokens: bool | None = Field(
        default=None, description="Put spaces between special tokens."
    )
    include_stop_str_in_output: bool | None = Field(
        default=None, description="Include the stop text in the answer."
    )
    bad_words: values.Texts | None = Field(
        default=None, min_length=1, description="Words that must not be generated."
    )
    allowed_token_ids: list[int] | None = Field(
        default=None, min_length=1, description="Token ids to choose from; no others are generated."
    )
    thinking_token_budget: int | None = Field(
        default=None, ge=-1, description="Maximum number of tokens for the model's thinking."
    )
    structured_outputs: StructuredSection | None = Field(
        default=None, description="Required form of an answer."
    )
    n: values.SingleAnswer | None = Field(
        default=None, description="Always 1: each row has exactly one answer."
    )


class EngineSection(Section):
    """vLLM: arguments and replicas."""

    args: Annotated[dict[EngineArg, Any], values.Plain] = Field(
        default_factory=dict,
        description=(
            "vLLM's engine arguments by name, such as {max_model_len: 8192, dtype: bfloat16}."
        ),
    )
    tp: int = Field(
        default=_ENGINE.tp, ge=1, le=1024, description="Tensor parallel size of a replica."
    )
    pp: int = Field(
        default=_ENGINE.pp, ge=1, le=1024, description="Pipeline parallel size of a replica."
    )
    replicas: ReplicasOf = Field(
        default=_ENGINE.replicas,
        description="Copies of the model: a number, or minimum and maximum such as [1, 4].",
    )
    batch_size: int = Field(
        default=_ENGINE.batch_size,
        ge=1,
        le=65_536,
        description="Rows that a replica receives at a time.",
    )
    placement: Annotated[values.Placement, values.PlacementValue] = Field(
        default=values.placement(_ENGINE.placement),
        description=(
            "pack: a replica's GPUs on as few nodes as possible; strict-pack: on"
            " one node; spread, strict-spread: on many."
        ),
    )
    order: Order = Field(
        default=_ENGINE.order,
        description=(
            "prefix (default): group rows with a common prompt prefix, and start long"
            " ones early; given: keep the order of the input."
        ),
    )


class DataParallelSection(Section):
    """One engine per rank over the nodes. `data_parallel: 4` is short for `size`."""

    size: int = Field(ge=1, le=values.MAX_REPLICAS, description="Number of ranks.")
    expert_parallel: bool | None = Field(
        default=None,
        description=(
            "Share a mixture of experts among the ranks; by default, depends on the model."
        ),
    )
    timeout: Seconds = Field(
        default=_DP.timeout, description="Time limit of a rank for a round, in seconds."
    )
    round_rows: Rows = Field(
        default=_DP.round_rows, description="Rows that a rank receives at a time."
    )


class PredictSection(Section):
    """Your Python class, called on batches. `predict: FILE.py:CLASS` is short for `class`."""

    class_: values.Target = Field(
        alias="class",
        description=(
            "FILE.py:CLASS with a file on this machine, or MODULE:CLASS from the image or from"
            " `files`."
        ),
    )
    files: list[values.LocalPath] = Field(
        default_factory=list,
        description="Additional files and folders for the class, stored next to it on the nodes.",
    )
    args: Values = Field(default_factory=dict, description="Keyword arguments of the class.")
    num_gpus: float = Field(
        default=_PREDICT.num_gpus,
        ge=0,
        le=1024,
        description="GPUs per replica; fractions are allowed.",
    )
    num_cpus: float = Field(
        default=_PREDICT.num_cpus,
        ge=0,
        le=1024,
        description="CPUs per replica; a higher value means fewer replicas per node.",
    )
    batch_size: Rows = Field(default=_PREDICT.batch_size, description="Rows of a batch.")
    replicas: ReplicasOf = Field(
        default=_PREDICT.replicas,
        description="Copies of the class: a number, or minimum and maximum such as [1, 4].",
    )


class PreprocessSection(Section):
    """Your Python function, called on batches on CPUs, in parallel with inference.

    `preprocess: FILE.py:NAME` is its short form.
    """

    function: values.Target = Field(
        description=(
            "FILE.py:FUNCTION with a file on this machine, or MODULE:FUNCTION from the image"
            " or from `files`."
        )
    )
    files: list[values.LocalPath] = Field(
        default_factory=list, description="Additional files and folders for the function."
    )
    num_cpus: float = Field(
        default=_PREPROCESS.num_cpus, ge=0, le=1024, description="CPUs per replica."
    )
    batch_size: Rows = Field(default=_PREPROCESS.batch_size, description="Rows of a batch.")
    replicas: ReplicasOf = Field(
        default=_PREPROCESS.replicas,
        description="Copies of the function: a number, or minimum and maximum such as [1, 4].",
    )


class WriteSection(Section):
    """Output of the job. `write: PATH` is short for `path`."""

    path: values.JobPath = Field(
        description=(
            "Folder for answers (rows/) and error rows (errors/): on this machine (copied from the"
            " head), nodes:/path on storage that the head can access, or s3://, gs:// or hdfs://."
        )
    )
    format: OutputFormat = Field(
        default=_WRITE.format,
        description=(
            "parquet (default), jsonl, or openai: the input has requests in the format of OpenAI's"
            " Batch API, and the output their responses."
        ),
    )
    rows_per_file: int = Field(
        default=_WRITE.rows_per_file,
        ge=1,
        le=10_000_000,
        description="Maximum number of rows per file.",
    )
    seconds: Seconds = Field(
        default=_WRITE.seconds,
        description="Seconds until a file with fewer rows is written.",
    )


class LimitsSection(Section):
    """Limits at which a job fails."""

    restarts: int = Field(
        default=_LIMITS.restarts,
        ge=0,
        le=10_000,
        description="Replica restarts without a finished row in between.",
    )
    stall: Seconds = Field(default=_LIMITS.stall, description="Seconds without a finished row.")
    errors: int | None = Field(
        default=_LIMITS.errors, ge=0, description="Error rows allowed (default: unlimited)."
    )


class JobFile(Section):
    """A vlaunch batch job: input, model and output."""

    job: ClusterName | None = Field(
        default=None, description="Name of the job (default: the name of the file)."
    )
    model: Model | None = Field(default=None, description="Model to run, such as Qwen/Qwen3-8B.")
    task: Task = Field(
        default="generate",
        description=(
            "generate (default): text; embed: a vector for each row; score: similarity of"
            " two texts of a row."
        ),
    )
    lora: Annotated[dict[values.AdapterName, Model], Field(min_length=1)] | None = Field(
        default=None,
        description=(
            "LoRA adapter: a name and a path inside the containers, or a model on the Hub; with"
            " `write.format: openai` several, which requests name as `model`."
        ),
    )
    mode: Mode | None = Field(
        default=None,
        description=(
            "engine (default): replicas of vLLM; predict (default with `predict`):"
            " your class; data-parallel (default with `data_parallel`): vLLM's ranks over the"
            " nodes."
        ),
    )
    read: Annotated[
        ReadSection,
        BeforeValidator(
            expand_shorthand("paths", str, list),
            json_schema_input_type=str | list[str] | ReadSection,
        ),
    ] = Field(description="Input rows: a path, a list of paths, or a mapping.")
    prompt: (
        Annotated[
            PromptSection,
            BeforeValidator(
                expand_shorthand("template", str), json_schema_input_type=str | PromptSection
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="Prompt of each row (default: the column `prompt`; for text files, `text`).",
    )
    sampling: SamplingSection = Field(
        default_factory=SamplingSection, description="Sampling parameters."
    )
    keep: Annotated[dict[values.Column, ColumnType | None], values.KeepColumns] | None = Field(
        default=None,
        description=(
            "Input columns to write with the answers, as a list or with types (default: all)."
        ),
    )
    engine: EngineSection = Field(
        default_factory=EngineSection, description="vLLM: parallelism, replicas and arguments."
    )
    data_parallel: (
        Annotated[
            DataParallelSection,
            BeforeValidator(
                expand_shorthand("size", int), json_schema_input_type=int | DataParallelSection
            ),
        ]
        | None
    ) = Field(default=None, description="vLLM's ranks over the nodes, instead of replicas.")
    predict: (
        Annotated[
            PredictSection,
            BeforeValidator(
                expand_shorthand("class", str), json_schema_input_type=str | PredictSection
            ),
        ]
        | None
    ) = Field(default=None, description="Your Python class, instead of vLLM.")
    preprocess: (
        Annotated[
            PreprocessSection,
            BeforeValidator(
                expand_shorthand("function", str), json_schema_input_type=str | PreprocessSection
            ),
        ]
        | None
    ) = Field(
        default=None,
        description="A Python function that prepares batches on CPUs, in parallel with inference.",
    )
    write: Annotated[
        WriteSection,
        BeforeValidator(expand_shorthand("path", str), json_schema_input_type=str | WriteSection),
    ] = Field(description="Output: a path or a mapping.")
    limits: LimitsSection = Field(
        default_factory=LimitsSection, description="Limits at which the job fails."
    )


def job_mode(file: JobFile) -> Mode:
    """Return the explicit mode, or the one that the sections imply."""
    if file.mode is not None:
        return file.mode
    if file.predict is not None:
        return "predict"
    return "engine" if file.data_parallel is None else "data-parallel"
