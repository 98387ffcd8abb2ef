"""Rules between a job's keys and for its templates: functions that yield mistakes."""

from collections.abc import Iterator
from pathlib import PurePath

from jinja2 import TemplateSyntaxError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from launcher.batch import inputs
from launcher.batch.checked_job import Source
from launcher.batch.draft import Draft
from launcher.batch.job import RESULT_COLUMNS, Prompt
from launcher.core import secret_patterns
from launcher.inventory.engine_args import OWNED_ARGUMENTS, SHORT_NAMES, python_name
from launcher.inventory.mistakes import Mistake, YamlPath, describe_value, did_you_mean, format_key

ROW = "row"
# Columns of an error row besides the id (launcher/batch/driver/results.py).
ERROR = (ROW, "reason", "stage", "input")
_FORMS = ("column", "template", "chat", "messages", "pair")
_MODEL_KEYS = ("model", "task", "lora", "prompt", "sampling", "engine")
_NOT_FOR_REQUESTS: tuple[YamlPath, ...] = (
    ("prompt",),
    ("sampling",),
    ("keep",),
    ("data_parallel",),
    ("predict",),
    ("preprocess",),
    ("read", "id"),
)
_LORA_ARGUMENTS = ("enable_lora", "lora_modules")
_ENVIRONMENT = ImmutableSandboxedEnvironment()
_OTHER_FILES = {
    nodes.Include: "include",
    nodes.Import: "import",
    nodes.FromImport: "from … import",
    nodes.Extends: "extends",
}
_OWN_NAMES = {"loop", "self", "caller", "varargs", "kwargs", *_ENVIRONMENT.globals}


def check_modes(draft: Draft) -> Iterator[Mistake]:
    """Check that the sections fit the mode."""
    if draft.is_valid("mode"):
        yield from _check_sections(draft)
        yield from _check_ranks(draft)


def _check_sections(draft: Draft) -> Iterator[Mistake]:
    file, mode = draft.file, draft.mode
    if mode == "predict":
        if file.predict is None and draft.is_valid("predict"):
            yield Mistake(
                yaml_path=("mode",), text="should come with `predict`, which names the class"
            )
        for key in _MODEL_KEYS:
            if draft.is_written(key):
                reason = "the class chooses its own model; pass arguments in `predict.args`"
                yield Mistake(yaml_path=(key,), text=f"should be left out with `predict`: {reason}")
    else:
        if file.model_ is None and draft.is_valid("model"):
            yield Mistake(
                yaml_path=(),
                text="`model` is missing: Model to run, such as Qwen/Qwen3-8B; or `predict`",
            )
        if draft.is_written("predict"):
            yield Mistake(
                yaml_path=("predict",),
                text=f"should be left out with `mode: {mode}`; it belongs to `mode: predict`",
            )


def _check_ranks(draft: Draft) -> Iterator[Mistake]:
    file, mode = draft.file, draft.mode
    if mode != "data-parallel" and draft.is_written("data_parallel"):
        yield Mistake(yaml_path=("data_parallel",), text=f"should be left out with `mode: {mode}`")
    if mode == "data-parallel":
        if file.data_parallel is None and draft.is_valid("data_parallel"):
            yield Mistake(
                yaml_path=("mode",),
                text="should come with `data_parallel`, which says how many ranks: {size: 2}",
            )
        if draft.is_written("preprocess"):
            text = (
                "should be left out with `mode: data-parallel`, whose ranks take rows as they are"
            )
            yield Mistake(yaml_path=("preprocess",), text=text)
        for key, instead in (
            ("replicas", "`data_parallel.size` is"),
            ("batch_size", "`data_parallel.round_rows` is"),
        ):
            if draft.is_written("engine", key):
                yield Mistake(
                    yaml_path=("engine", key),
                    text=f"should be left out with `mode: data-parallel`: {instead} its place",
                )


def check_prompts(draft: Draft) -> Iterator[Mistake]:
    """Check that a prompt has one form, with valid templates that use the row."""
    prompt = draft.file.prompt
    if prompt is None or not all(draft.whole("prompt", form) for form in _FORMS):
        return
    forms = [form for form in _FORMS if getattr(prompt, form) is not None]
    if len(forms) != 1:
        yield Mistake(
            yaml_path=("prompt",),
            text=f"should have one of {_quoted(_FORMS)}, not {_joined(forms)}",
        )
    for key in ("chat_args", "tools"):
        if getattr(prompt, key) and prompt.chat is None and prompt.messages is None:
            yield Mistake(
                yaml_path=("prompt", key),
                text="should come with `chat` or `messages`: they go to the chat template",
            )
    yield from _check_templates(prompt, forms)


def _check_templates(prompt: Prompt, forms: list[str]) -> Iterator[Mistake]:
    mistakes = [
        Mistake(yaml_path=where, text=text)
        for where, template in _templates(prompt)
        for text in template_mistakes(template)
    ]
    yield from mistakes
    if not mistakes and forms in (["template"], ["chat"], ["pair"]):
        yield from _check_constant_prompt(prompt, forms[0])


def _check_constant_prompt(prompt: Prompt, form: str) -> Iterator[Mistake]:
    """Reject a prompt without a column: it would be the same for every row."""
    if any(template_columns(template) for _, template in _templates(prompt)):
        return
    bare = (prompt.template or "").strip()
    column = bare if bare.isidentifier() else "text"
    advice = f"{{{{ {column} }}}}"
    if form == "template":
        advice += f", or `prompt: {{column: {column}}}`"
    text = f"names no column, so all rows would have the same prompt; write {advice}"
    yield Mistake(yaml_path=("prompt", form), text=text)


def check_tasks(draft: Draft) -> Iterator[Mistake]:
    """Check that pooling tasks have no sampling, and scores two texts."""
    if not draft.is_valid("task") or not draft.is_valid("mode") or draft.mode == "predict":
        return
    if draft.file.write.format == "openai":
        return
    task, prompt = draft.file.task, draft.file.prompt
    if task != "generate" and draft.mode != "engine":
        yield Mistake(yaml_path=("task",), text=f"should be left out with `mode: {draft.mode}`")
    if task != "generate" and draft.is_written("sampling"):
        text = f"should be left out with `task: {task}`, which generates nothing"
        yield Mistake(yaml_path=("sampling",), text=text)
    pair = prompt is not None and prompt.pair is not None
    if pair and task != "score":
        text = "should come with `task: score`, which compares two texts"
        yield Mistake(yaml_path=("prompt", "pair"), text=text)
    if task == "score" and not pair and draft.whole("prompt"):
        text = "`task: score` compares two texts: write `prompt: {pair: [..., ...]}`"
        yield Mistake(yaml_path=("prompt",) if draft.is_written("prompt") else ("task",), text=text)


def check_requests(draft: Draft) -> Iterator[Mistake]:
    """Check that a job of requests reads JSON lines, and leaves prompts and parameters to them."""
    if draft.file.write.format != "openai" or not draft.is_valid("write", "format"):
        return
    for yaml_path in _NOT_FOR_REQUESTS:
        if draft.is_written(*yaml_path):
            text = (
                "should be left out with `write.format: openai`, whose rows are complete requests"
            )
            yield Mistake(yaml_path=yaml_path, text=text)
    names = [name for names in draft.paths.names for name in names]
    formats = {draft.file.read.format or inputs.format_of(name) for name in names}
    if formats - {"jsonl", None}:
        text = "`write.format: openai` takes requests as JSON lines (format: jsonl)"
        yield Mistake(yaml_path=("read", "format"), text=text)


def check_lora(draft: Draft) -> Iterator[Mistake]:
    """Check that adapters fit the mode and task, and that engine arguments name no others."""
    file, adapters = draft.file, draft.file.lora
    for spelling in file.engine.args:
        if python_name(spelling) in _LORA_ARGUMENTS:
            text = "should be left out: write `lora: {NAME: PATH}` at the top level"
            yield Mistake(yaml_path=("engine", "args", spelling), text=text)
    if adapters is None or not draft.whole("lora") or draft.mode == "predict":
        return
    if draft.mode != "engine":
        yield Mistake(yaml_path=("lora",), text=f"should be left out with `mode: {draft.mode}`")
    elif file.task == "score":
        yield Mistake(yaml_path=("lora",), text="should be left out with `task: score`")
    elif len(adapters) > 1 and file.write.format != "openai":
        text = "should have one adapter; only requests (`write.format: openai`) choose among more"
        yield Mistake(yaml_path=("lora",), text=text)
    elif file.model in adapters:
        text = "should not have the model's own name"
        yield Mistake(yaml_path=("lora", file.model), text=text)


def check_sampling(draft: Draft) -> Iterator[Mistake]:
    """Check the order of bounds and the single shape of an answer."""
    values = draft.file.sampling
    most = values.max_tokens or DEFAULT_TOKENS
    if values.min_tokens is not None and values.min_tokens > most:
        text = f"should be at most `max_tokens`, which is {most}"
        yield Mistake(yaml_path=("sampling", "min_tokens"), text=text)
    yield from _check_structure(draft)


def _check_structure(draft: Draft) -> Iterator[Mistake]:
    shape, where = draft.file.sampling.structured_outputs, ("sampling", "structured_outputs")
    if shape is None or not draft.whole(*where):
        return
    keys = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    present = [key for key in keys if getattr(shape, "json_" if key == "json" else key) is not None]
    if len(present) != 1:
        yield Mistake(
            yaml_path=where, text=f"should have one of {_quoted(keys)}, not {_joined(present)}"
        )
    if "json" in present and not isinstance(shape.json_, (dict, str)):
        yield Mistake(
            yaml_path=(*where, "json"), text="should be a JSON Schema, as a mapping or as text"
        )


def check_keep(draft: Draft) -> Iterator[Mistake]:
    """Check that no input column or id has the name of an output column."""
    if draft.file.read.id in ERROR:
        text = (
            f"should not be `{draft.file.read.id}`, which error rows have already; call it"
            " something else in the input"
        )
        yield Mistake(yaml_path=("read", "id"), text=text)
    reserved = (ROW,) if draft.mode == "predict" else (ROW, *RESULT_COLUMNS[draft.file.task])
    for column in draft.file.keep or {}:
        if column in reserved:
            yaml_path = ("keep", column) if draft.is_written("keep", column) else ("keep",)
            text = (
                f"should not name `{column}`, which the job writes itself; call it something else"
                " in the input"
            )
            yield Mistake(yaml_path=yaml_path, text=text)


def check_arguments(draft: Draft) -> Iterator[Mistake]:
    """Check that engine arguments are unique and not set by the job."""
    spellings: dict[str, str] = {}
    for spelling in draft.file.engine.args:
        name = python_name(spelling)
        where: YamlPath = ("engine", "args", spelling)
        owned = OWNED_ARGUMENTS.get(SHORT_NAMES.get(name, name))
        if name in spellings:
            yield Mistake(yaml_path=where, text=f"is `{spellings[name]}` in another spelling")
        elif owned is not None:
            yield Mistake(yaml_path=where, text=f"should be left out: {owned}")
        elif name.startswith("data_parallel"):
            yield Mistake(
                yaml_path=where, text="should be left out: write `data_parallel` at the top level"
            )
        elif name == "enable_expert_parallel" and draft.mode == "data-parallel":
            yield Mistake(
                yaml_path=where, text="should be left out: write `data_parallel.expert_parallel`"
            )
        spellings.setdefault(name, spelling)


def check_secrets(draft: Draft) -> Iterator[Mistake]:
    """Check that no value looks like a secret."""
    file = draft.file
    settings: list[tuple[YamlPath, object]] = [
        (("engine", "args", key), value) for key, value in file.engine.args.items()
    ]
    if file.predict is not None:
        settings += [(("predict", "args", key), value) for key, value in file.predict.args.items()]
    if file.prompt is not None:
        settings += [
            (("prompt", "chat_args", key), value) for key, value in file.prompt.chat_args.items()
        ]
    settings.append((("model",), file.model))
    for yaml_path, value in settings:
        if any(secret_patterns.VALUE.search(text) for text in _texts(value)):
            yield Mistake(
                yaml_path=yaml_path,
                text="a secret should not be written here; use `secrets` in the inventory",
            )


def check_stages(draft: Draft) -> Iterator[Mistake]:
    """Check that a replica takes a part of one GPU, or whole GPUs."""
    predict = draft.file.predict
    if predict is not None and predict.num_gpus > 1 and predict.num_gpus != int(predict.num_gpus):
        text = f"should be a whole number above 1, or a fraction of 1, not {predict.num_gpus:g}"
        yield Mistake(yaml_path=("predict", "num_gpus"), text=text)


def check_places(draft: Draft) -> Iterator[Mistake]:
    """Check that all input has one format and excludes the output."""
    resolved = draft.paths
    if draft.file.read.format is None and draft.is_valid("read", "format") and resolved.sources:
        for where, text in inputs.format_mistakes(resolved.sources, resolved.names):
            yield Mistake(yaml_path=("read", *where), text=text)
    for source in resolved.sources:
        if resolved.to is not None and _reads_output(source, resolved.to):
            text = (
                f"should not be inside the input {describe_value(source.shown)}, or the answers"
                " would be read again"
            )
            yield Mistake(yaml_path=("write", "path"), text=text)


def _reads_output(source: Source, target: Source) -> bool:
    """Return True if `source` would read the files written to `to`."""
    if source.where != target.where:
        return False
    # `**` crosses all folders below the part before it.
    root, _, _ = source.text.partition("/**")
    if f"{target.text.rstrip('/')}/".startswith(f"{root.rstrip('/')}/"):
        return True
    # Folders matched by a local pattern are read, too.
    path = PurePath(target.text)
    return source.where == "control" and any(
        folder.match(source.text) for folder in (path, *path.parents)
    )


DEFAULT_TOKENS = 512
ALL = (
    check_modes,
    check_prompts,
    check_tasks,
    check_requests,
    check_lora,
    check_sampling,
    check_keep,
    check_arguments,
    check_secrets,
    check_stages,
    check_places,
)


def template_mistakes(template: str) -> list[str]:
    """Return the mistakes of a template, with line numbers."""
    try:
        mistakes = sorted(set(_find_mistakes(_ENVIRONMENT.parse(template))))
    except TemplateSyntaxError as error:
        return [
            _with_line(
                template,
                error.lineno,
                f"is not a valid template: {_clean(error.message or 'it cannot be read')}",
            )
        ]
    except (RecursionError, ValueError, OverflowError, MemoryError):
        return ["is nested too deep, or has a number that is too long"]
    return [_with_line(template, line, text) for line, text in mistakes]


def template_columns(template: str) -> set[str]:
    """Return the columns that a template needs; none for an invalid template."""
    try:
        tree = _ENVIRONMENT.parse(template)
        names = list(tree.find_all(nodes.Name))
    except (TemplateSyntaxError, RecursionError, ValueError, OverflowError, MemoryError):
        return set()
    assigned = {name_node.name for name_node in names if name_node.ctx != "load"}
    return (
        {name_node.name for name_node in names if name_node.ctx == "load"} - assigned - _OWN_NAMES
    )


def _templates(prompt: Prompt) -> Iterator[tuple[YamlPath, str]]:
    if prompt.template is not None:
        yield ("prompt", "template"), prompt.template
    for index, text in enumerate(prompt.pair or []):
        yield ("prompt", "pair", index), text
    for index, message in enumerate(prompt.chat or []):
        yield ("prompt", "chat", index, "content"), message.content


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (str(key), *_texts(item))
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _quoted(keys: tuple[str, ...]) -> str:
    return f"{', '.join(f'`{key}`' for key in keys[:-1])} and `{keys[-1]}`"


def _joined(keys: list[str]) -> str:
    return " and ".join(f"`{key}`" for key in keys) or "none of them"


def _find_mistakes(tree: nodes.Template) -> Iterator[tuple[int, str]]:
    for node in tree.find_all(tuple(_OTHER_FILES)):
        yield node.lineno, f"cannot read other files: `{_OTHER_FILES[type(node)]}` is not available"
    for attribute in tree.find_all(nodes.Getattr):
        if attribute.attr.startswith("_"):
            yield (
                attribute.lineno,
                f"cannot reach `{format_key(attribute.attr)}`: a template can read values, not"
                " Python attributes",
            )
    for used in tree.find_all(nodes.Filter):
        if used.name not in _ENVIRONMENT.filters:
            yield (
                used.lineno,
                (
                    "names no filter"
                    f" `{format_key(used.name)}`{did_you_mean(used.name, _ENVIRONMENT.filters)}"
                ),
            )
    for test in tree.find_all(nodes.Test):
        if test.name not in _ENVIRONMENT.tests:
            yield (
                test.lineno,
                f"names no test"
                f" `{format_key(test.name)}`{did_you_mean(test.name, _ENVIRONMENT.tests)}",
            )


def _with_line(template: str, line: int, text: str) -> str:
    return f"{text} (line {line} of the template)" if "\n" in template.strip() else text


def _clean(text: str) -> str:
    printable = " ".join(
        "".join(letter if letter.isprintable() else " " for letter in text).split()
    )
    return printable[:200].rstrip(".")
