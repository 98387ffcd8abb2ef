"""Rules between the keys of a job, and of its templates: functions that yield what is wrong."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from jinja2 import TemplateSyntaxError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from launcher.batch import inputs
from launcher.batch.draft import Draft
from launcher.batch.driver.job import RESULTS
from launcher.batch.schema import PromptSection
from launcher.batch.shape import Source
from launcher.core import secret_patterns
from launcher.inventory.engine_args import OWNED, SHORT, python_name
from launcher.inventory.mistakes import Mistake, Where, did_you_mean, name, shown

ROW = "row"
# What an error row has besides the row's id (launcher/batch/driver/encode.py).
ERROR = (ROW, "reason", "stage", "input")
_FORMS = ("column", "template", "chat", "pair")
_MODEL_KEYS = ("model", "task", "prompt", "sampling", "engine")
_ENVIRONMENT = ImmutableSandboxedEnvironment()
_OTHER_FILES = {
    nodes.Include: "include",
    nodes.Import: "import",
    nodes.FromImport: "from … import",
    nodes.Extends: "extends",
}
_OWN_NAMES = {"loop", "self", "caller", "varargs", "kwargs", *_ENVIRONMENT.globals}


def modes(draft: Draft) -> Iterator[Mistake]:
    """Each mode has sections of its own."""
    if draft.sound("mode"):
        yield from _who_answers(draft)
        yield from _ranks(draft)


def _who_answers(draft: Draft) -> Iterator[Mistake]:
    file, mode = draft.file, draft.mode
    if mode == "predict":
        if file.predict is None and draft.sound("predict"):
            yield Mistake(where=("mode",), text="should come with `predict`, which names the class")
        for key in _MODEL_KEYS:
            if draft.written(key):
                why = "the class knows its model; give it what it needs in `predict.args`"
                yield Mistake(where=(key,), text=f"should be left out with `predict`: {why}")
    else:
        if file.model is None and draft.sound("model"):
            yield Mistake(
                where=(),
                text="`model` is missing: Model that answers, such as Qwen/Qwen3-8B; or `predict`",
            )
        if draft.written("predict"):
            yield Mistake(
                where=("predict",),
                text=f"should be left out with `mode: {mode}`; it belongs to `mode: predict`",
            )


def _ranks(draft: Draft) -> Iterator[Mistake]:
    file, mode = draft.file, draft.mode
    if mode != "data-parallel" and draft.written("data_parallel"):
        yield Mistake(where=("data_parallel",), text=f"should be left out with `mode: {mode}`")
    if mode == "data-parallel":
        if file.data_parallel is None and draft.sound("data_parallel"):
            yield Mistake(
                where=("mode",),
                text="should come with `data_parallel`, which says how many ranks: {size: 2}",
            )
        if draft.written("preprocess"):
            text = (
                "should be left out with `mode: data-parallel`, whose ranks take rows as they are"
            )
            yield Mistake(where=("preprocess",), text=text)
        for key, instead in (
            ("replicas", "`data_parallel.size` is"),
            ("batch_size", "`data_parallel.round_rows` is"),
        ):
            if draft.written("engine", key):
                yield Mistake(
                    where=("engine", key),
                    text=f"should be left out with `mode: data-parallel`: {instead} its place",
                )


def prompts(draft: Draft) -> Iterator[Mistake]:
    """A prompt has one form, and its templates can be read and depend on the row."""
    prompt = draft.file.prompt
    if prompt is None or not all(draft.whole("prompt", form) for form in _FORMS):
        return
    forms = [form for form in _FORMS if getattr(prompt, form) is not None]
    if len(forms) != 1:
        yield Mistake(
            where=("prompt",),
            text=f"should have one of {_quoted(_FORMS)}, not {_joined(forms)}",
        )
    if prompt.chat_args and prompt.chat is None:
        yield Mistake(
            where=("prompt", "chat_args"),
            text="should come with `chat`: they go to the chat template",
        )
    yield from _unfit_templates(prompt, forms)


def _unfit_templates(prompt: PromptSection, forms: list[str]) -> Iterator[Mistake]:
    wrong = [
        Mistake(where=where, text=text)
        for where, template in _templates(prompt)
        for text in template_mistakes(template)
    ]
    yield from wrong
    if not wrong and forms in (["template"], ["chat"], ["pair"]):
        yield from _same_for_all(prompt, forms[0])


def _same_for_all(prompt: PromptSection, form: str) -> Iterator[Mistake]:
    """A prompt without a column of the row would be the same for each."""
    if any(template_columns(template) for _, template in _templates(prompt)):
        return
    meant = (prompt.template or "").strip()
    word = meant if meant.isidentifier() else "text"
    advice = f"{{{{ {word} }}}}"
    if form == "template":
        advice += f", or `prompt: {{column: {word}}}`"
    text = f"names no column, so that all rows would ask the same; write {advice}"
    yield Mistake(where=("prompt", form), text=text)


def tasks(draft: Draft) -> Iterator[Mistake]:
    """A model that makes vectors or scores generates nothing, and compares two texts."""
    if not draft.sound("task") or not draft.sound("mode") or draft.mode == "predict":
        return
    task, prompt = draft.file.task, draft.file.prompt
    if task != "generate" and draft.mode != "engine":
        yield Mistake(where=("task",), text=f"should be left out with `mode: {draft.mode}`")
    if task != "generate" and draft.written("sampling"):
        text = f"should be left out with `task: {task}`, which generates nothing"
        yield Mistake(where=("sampling",), text=text)
    pair = prompt is not None and prompt.pair is not None
    if pair and task != "score":
        text = "should come with `task: score`, which compares two texts"
        yield Mistake(where=("prompt", "pair"), text=text)
    if task == "score" and not pair and draft.whole("prompt"):
        text = "`task: score` compares two texts: write `prompt: {pair: [..., ...]}`"
        yield Mistake(where=("prompt",) if draft.written("prompt") else ("task",), text=text)


def sampling(draft: Draft) -> Iterator[Mistake]:
    """Bounds have an order, and an answer has one shape."""
    values = draft.file.sampling
    most = values.max_tokens or DEFAULT_TOKENS
    if values.min_tokens is not None and values.min_tokens > most:
        text = f"should be at most `max_tokens`, which is {most}"
        yield Mistake(where=("sampling", "min_tokens"), text=text)
    yield from _structure(draft)


def _structure(draft: Draft) -> Iterator[Mistake]:
    shape, where = draft.file.sampling.structured_outputs, ("sampling", "structured_outputs")
    if shape is None or not draft.whole(*where):
        return
    keys = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
    given = [key for key in keys if getattr(shape, "json_" if key == "json" else key) is not None]
    if len(given) != 1:
        yield Mistake(where=where, text=f"should have one of {_quoted(keys)}, not {_joined(given)}")
    if "json" in given and not isinstance(shape.json_, (dict, str)):
        yield Mistake(
            where=(*where, "json"), text="should be a JSON Schema, as a mapping or as text"
        )


def kept(draft: Draft) -> Iterator[Mistake]:
    """No kept column, and no id, has the name of one that the job writes."""
    if draft.file.read.id in ERROR:
        text = (
            f"should not be `{draft.file.read.id}`, which error rows have already; call it"
            " something else in the input"
        )
        yield Mistake(where=("read", "id"), text=text)
    own = (ROW,) if draft.mode == "predict" else (ROW, *RESULTS[draft.file.task])
    for column in draft.file.keep or {}:
        if column in own:
            at = ("keep", column) if draft.written("keep", column) else ("keep",)
            text = (
                f"should not name `{column}`, which the job writes itself; call it something else"
                " in the input"
            )
            yield Mistake(where=at, text=text)


def arguments(draft: Draft) -> Iterator[Mistake]:
    """vLLM's arguments are written once, and none is one that the job sets."""
    seen: dict[str, str] = {}
    for written in draft.file.engine.args:
        name = python_name(written)
        where: Where = ("engine", "args", written)
        owned = OWNED.get(SHORT.get(name, name))
        if name in seen:
            yield Mistake(where=where, text=f"is `{seen[name]}` in another spelling")
        elif owned is not None:
            yield Mistake(where=where, text=f"should be left out: {owned}")
        elif name.startswith("data_parallel"):
            yield Mistake(
                where=where, text="should be left out: write `data_parallel` at the top level"
            )
        elif name == "enable_expert_parallel" and draft.mode == "data-parallel":
            yield Mistake(
                where=where, text="should be left out: write `data_parallel.expert_parallel`"
            )
        seen.setdefault(name, written)


def secrets(draft: Draft) -> Iterator[Mistake]:
    """Nothing that looks like a secret is written in the file."""
    file = draft.file
    places: list[tuple[Where, object]] = [
        (("engine", "args", key), value) for key, value in file.engine.args.items()
    ]
    if file.predict is not None:
        places += [(("predict", "args", key), value) for key, value in file.predict.args.items()]
    if file.prompt is not None:
        places += [
            (("prompt", "chat_args", key), value) for key, value in file.prompt.chat_args.items()
        ]
    places.append((("model",), file.model))
    for where, value in places:
        if any(secret_patterns.VALUE.search(text) for text in _texts(value)):
            yield Mistake(
                where=where,
                text="a secret should not be written here; use `secrets` in the inventory",
            )


def stages(draft: Draft) -> Iterator[Mistake]:
    """Ray gives a replica a part of one GPU, or whole ones."""
    predict = draft.file.predict
    if predict is not None and predict.num_gpus > 1 and predict.num_gpus != int(predict.num_gpus):
        text = f"should be a whole number above 1, or a part of one GPU, not {predict.num_gpus:g}"
        yield Mistake(where=("predict", "num_gpus"), text=text)


def places(draft: Draft) -> Iterator[Mistake]:
    """All input has one format, and the output is not among it."""
    resolved = draft.found
    if draft.file.read.format is None and draft.sound("read", "format") and resolved.sources:
        for where, text in inputs.format_mistakes(resolved.sources, resolved.names):
            yield Mistake(where=("read", *where), text=text)
    for source in resolved.sources:
        if resolved.to is not None and _reads(source, resolved.to):
            text = (
                f"should not lie in the input {shown(source.shown)}, which would read the answers"
                " again"
            )
            yield Mistake(where=("write", "path"), text=text)


def _reads(source: Source, to: Source) -> bool:
    """Tell whether `source` would read what is written to `to`."""
    if source.where != to.where:
        return False
    # `**` goes through all folders below the part before it.
    root, _, _ = source.text.partition("/**")
    if f"{to.text.rstrip('/')}/".startswith(f"{root.rstrip('/')}/"):
        return True
    # Of what a pattern names on this machine, folders are read, too.
    path = PurePath(to.text)
    return source.where == "control" and any(
        folder.match(source.text) for folder in (path, *path.parents)
    )


DEFAULT_TOKENS = 512
ALL = (modes, prompts, tasks, sampling, kept, arguments, secrets, stages, places)


def template_mistakes(template: str) -> list[str]:
    """Return what is wrong, each with its line in the template."""
    try:
        found = sorted(set(_wrong(_ENVIRONMENT.parse(template))))
    except TemplateSyntaxError as error:
        return [
            _at(
                template,
                error.lineno,
                f"is no template: {_clean(error.message or 'it cannot be read')}",
            )
        ]
    except (RecursionError, ValueError, OverflowError, MemoryError):
        return ["is nested too deep, or has a number that is too long"]
    return [_at(template, line, text) for line, text in found]


def template_columns(template: str) -> set[str]:
    """Return the names that a row must have a column for; of a template with mistakes, none."""
    try:
        tree = _ENVIRONMENT.parse(template)
        names = list(tree.find_all(nodes.Name))
    except (TemplateSyntaxError, RecursionError, ValueError, OverflowError, MemoryError):
        return set()
    made = {one.name for one in names if one.ctx != "load"}
    return {one.name for one in names if one.ctx == "load"} - made - _OWN_NAMES


def _templates(prompt: PromptSection) -> Iterator[tuple[Where, str]]:
    if prompt.template is not None:
        yield ("prompt", "template"), prompt.template
    for at, text in enumerate(prompt.pair or []):
        yield ("prompt", "pair", at), text
    for at, message in enumerate(prompt.chat or []):
        yield ("prompt", "chat", at, "content"), message.content


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


def _wrong(tree: nodes.Template) -> Iterator[tuple[int, str]]:
    for node in tree.find_all(tuple(_OTHER_FILES)):
        yield node.lineno, f"cannot read other files: `{_OTHER_FILES[type(node)]}` is not available"
    for attribute in tree.find_all(nodes.Getattr):
        if attribute.attr.startswith("_"):
            yield (
                attribute.lineno,
                f"cannot reach `{name(attribute.attr)}`: a template sees values, not Python",
            )
    for used in tree.find_all(nodes.Filter):
        if used.name not in _ENVIRONMENT.filters:
            yield (
                used.lineno,
                (
                    "names no filter"
                    f" `{name(used.name)}`{did_you_mean(used.name, _ENVIRONMENT.filters)}"
                ),
            )
    for test in tree.find_all(nodes.Test):
        if test.name not in _ENVIRONMENT.tests:
            yield (
                test.lineno,
                f"names no test `{name(test.name)}`{did_you_mean(test.name, _ENVIRONMENT.tests)}",
            )


def _at(template: str, line: int, text: str) -> str:
    return f"{text} (line {line} of the template)" if "\n" in template.strip() else text


def _clean(text: str) -> str:
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return words[:200].rstrip(".")
