"""The program that checks engine arguments, with a small stand-in of vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.tools.engine_flags import parser

VLLM = {
    "__init__": """
        from dataclasses import dataclass, fields

        @dataclass
        class EngineArgs:
            model: str = ""
            max_model_len: int = 8
            tensor_parallel_size: int = 1
            pipeline_parallel_size: int = 1
            max_lora_rank: int = 16
            enable_expert_parallel: bool = False
            gpu_memory_utilization: float = 0.9
            mode: str = ""
            enable_lora: bool = False

            def __post_init__(self):
                if self.mode == "bad":
                    raise ValueError("mode is bad")

            @classmethod
            def from_cli_args(cls, args):
                return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})

        AsyncEngineArgs = EngineArgs

        class LLM:
            def __init__(self, model, disable_log_stats=False, **kwargs): ...
    """,
    "config": """
        from pydantic import Field
        from pydantic.dataclasses import dataclass

        class Tensor: ...

        @dataclass(config={"arbitrary_types_allowed": True})
        class CacheConfig:
            mode: Tensor | str = ""
            gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
            max_model_len: int = Field(default=8, ge=1)
    """,
    "model_executor/__init__": "",
    "model_executor/models/__init__": """
        class Entry:
            def __init__(self, name):
                self.name = name

            def load_model_cls(self):
                return self.name

        class ModelRegistry:
            models = {name: Entry(name) for name in ("Good", "Bad")}
    """,
    "model_executor/models/interfaces": """
        def supports_lora(model):
            return model == "Good"

        supports_pp = supports_lora
    """,
    "model_executor/layers/__init__": "",
    "model_executor/layers/quantization": """
        class Awq:
            get_min_capability = staticmethod(lambda: 75)

        class Fp8:
            get_min_capability = staticmethod(lambda: 89)

        def get_quantization_config(name):
            if name not in ("awq", "fp8"):
                raise ValueError(f"Invalid quantization method: {name}")
            return {"awq": Awq, "fp8": Fp8}[name]
    """,
    "third_party/__init__": "",
    "third_party/pynvml": """
        def nvmlInit(): ...

        def nvmlDeviceGetCount():
            return 2

        def nvmlDeviceGetHandleByIndex(index):
            return index

        def nvmlDeviceGetCudaComputeCapability(handle):
            return (8, 0) if handle else (9, 0)
    """,
    "transformers_utils/__init__": "",
    "transformers_utils/chat_templates/__init__": "",
    "transformers_utils/chat_templates/registry": """
        def get_chat_template_fallback_path(model_type, tokenizer):
            return "template.jinja" if model_type == "blip" else None
    """,
    "entrypoints/__init__": "",
    "entrypoints/cli/__init__": "",
    "entrypoints/cli/server": """
        def setup_server(args): ...

        def validate_api_server_args(args):
            if args.tool_call_parser not in (None, "hermes"):
                raise KeyError(f"invalid tool call parser: {args.tool_call_parser}")
    """,
    "entrypoints/cli/serve": """
        from argparse import ArgumentParser as FlexibleArgumentParser
        import vllm
        from vllm.entrypoints.cli.server import setup_server

        class Module:
            def __init__(self, text):
                self.name, self.path = text.split("=")

        class Command:
            def subparser_init(self, subparsers):
                parser = subparsers.add_parser("serve")
                parser.add_argument("model_tag", nargs="?")
                group = parser.add_argument_group("CacheConfig")
                group.add_argument("--max-model-len", type=int, default=8)
                group.add_argument("--gpu-memory-utilization", type=float, default=0.9)
                group.add_argument("--mode", choices=["", "bad", "good"], default="")
                parser.add_argument("--model", default="")
                parser.add_argument("--tensor-parallel-size", type=int, default=1)
                parser.add_argument("--pipeline-parallel-size", type=int, default=1)
                parser.add_argument("--enable-expert-parallel", action="store_true")
                parser.add_argument("--max-lora-rank", type=int, default=16)
                parser.add_argument("--chat-template")
                parser.add_argument("--quantization")
                parser.add_argument("--log-outputs", action="store_true")
                parser.add_argument("--tool-call-parser")
                parser.add_argument("--tool-parser-plugin")
                parser.add_argument("--enable-lora", action="store_true")
                parser.add_argument("--lora-modules", nargs="+", type=Module)
                return parser

            def validate(self, args):
                if args.log_outputs:
                    raise TypeError("Error: --log-outputs requires --log-requests")

        def cmd_init():
            return [Command()]
    """,
}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages with the stand-in."""
    folder = tmp_path_factory.mktemp("image")
    for name, text in VLLM.items():
        path = folder / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = text.splitlines()
        indent = "    " * 2
        path.write_text("\n".join(line.removeprefix(indent) for line in lines), encoding="utf-8")
    (folder / "transformers.py").write_text("class OldForCausalLM: ...\n", encoding="utf-8")
    metadata = folder / "vllm-0.32.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    return folder


def run(image: Path, *words: str) -> dict[str, Any]:
    """Run the program; return its report."""
    completed = subprocess.run(
        [sys.executable, parser.__file__, *words],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(image), "HF_HUB_OFFLINE": "1"},
    )
    report: dict[str, Any] = json.loads(completed.stdout.splitlines()[-1])
    assert report["mark"] == parser.MARK
    return report


@pytest.mark.parametrize(
    ("words", "mistakes"),
    [
        (["--max-model-len", "9", "--mode=good", "--tool-call-parser", "hermes"], []),
        (["--max-nodel-len", "16"], ["unrecognized arguments: --max-nodel-len 16"]),
        (["--max-model-len", "1k2"], ["argument --max-model-len: invalid int value: '1k2'"]),
        (["--max-model-len"], ["argument --max-model-len: expected one argument"]),
        (["--log-outputs"], ["--log-outputs requires --log-requests"]),
        (["--mode", "bad"], ["mode is bad"]),
        (["--tool-call-parser", "herms"], ["invalid tool call parser: herms"]),
        (["--tool-call-parser", "mine", "--tool-parser-plugin", "mine.py"], []),
        (
            ["--gpu-memory-utilization", "1.5"],
            ["argument --gpu-memory-utilization: Input should be less than or equal to 1, not 1.5"],
        ),
        (["--help"], ["an argument prints a text and exits"]),
    ],
)
def test_a_command_is_checked_as_vllm_does_it(
    image: Path, words: list[str], mistakes: list[str]
) -> None:
    """In its own words."""
    report = run(image, "serve", "org/m", *words)

    assert (report["mistakes"], report["error"]) == (mistakes, "")


def test_all_mistakes_are_reported_at_once(image: Path) -> None:
    """Wrong values and unknown names, with a similar name."""
    words = ["--max-model-len", "1k2", "--max-modl-len", "3", "--mode", "odd", "--log-output-dir"]
    report = run(image, "serve", "org/m", *words)

    first, second, third = report["mistakes"]
    assert first == "argument --max-model-len: invalid int value: '1k2'"
    assert second.startswith("argument --mode: invalid choice: 'odd'")
    assert third == "unrecognized arguments: --max-modl-len 3 --log-output-dir"
    assert report["similar"]["--max-modl-len"] == "--max-model-len"
    assert report["vllm"] == "0.32.0"


def test_the_arguments_of_an_engine_are_checked(image: Path) -> None:
    """Names and values; an argument of `LLM` alone is known, and None leaves one to vLLM."""
    arguments = {
        "model": "org/m",
        "disable_log_stats": True,
        "max_model_len": "32k",
        "gpu_memory_utilization": None,
        "max_modl_len": 1,
    }
    report = run(image, "engine", json.dumps(arguments))

    unknown, length = report["mistakes"]
    assert unknown == "EngineArgs has no argument `max_modl_len`"
    assert "argument --max-model-len: Input should be a valid integer" in length
    assert report["similar"] == {"max_modl_len": "max_model_len"}


@pytest.mark.parametrize("kind", ["serve", "engine"])
def test_adapters_are_checked_with_the_model(image: Path, tmp_path: Path, kind: str) -> None:
    """Their files, and whether the model's class takes any; all mistakes at once."""

    def check(model: str, *adapters: str) -> list[str]:
        words = [model, "--enable-lora", "--lora-modules", *adapters]
        if kind == "engine":
            arguments = {"model": model, "enable_lora": True, "lora_modules": adapters}
            words = [json.dumps(arguments)]
        report = run(image, kind, *words)
        assert report["error"] == ""
        return list(report["mistakes"])

    for name in ("Good", "Bad", "New"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"architectures": [name]}))
    (tmp_path / "sql").mkdir()
    (tmp_path / "sql" / "adapter_config.json").write_text('{"r": 16}')
    (tmp_path / "big").mkdir()
    (tmp_path / "big" / "adapter_config.json").write_text('{"r": 64}')

    assert check(f"{tmp_path}/Good", f"sql={tmp_path}/sql") == []
    assert check(f"{tmp_path}/New", f"sql={tmp_path}/sql") == [
        "this vLLM has no model class New; a newer image may have it"
    ]
    missing, unsupported = check(f"{tmp_path}/Bad", f"sql={tmp_path}/sql", f"b={tmp_path}/none")
    assert missing.startswith(f"LoRA adapter `b`: {tmp_path}/none has no readable adapter_config")
    assert check(f"{tmp_path}/Good", f"big={tmp_path}/big") == [
        "LoRA adapter `big` has rank 64: set --max-lora-rank 64"
    ]
    assert unsupported == f"Bad, the class of {tmp_path}/Bad, does not support LoRA"


GROUPS = {"quant_method": "awq", "group_size": 128}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
WIDE = {"num_attention_heads": 64, "hidden_size": 8192}


@pytest.mark.parametrize(
    ("config", "options", "mistakes"),
    [
        ({}, {}, []),
        ({"architectures": ["Good"]}, {"pipeline_parallel_size": 2}, []),
        (
            {"architectures": ["Bad"]},
            {"pipeline_parallel_size": 2},
            ["Bad does not support pipeline parallelism: use --pp 1"],
        ),
        ({"architectures": ["Bad"]}, {}, []),
        (
            {"architectures": ["New"]},
            {},
            ["this vLLM has no model class New; a newer image may have it"],
        ),
        ({"architectures": ["New"], "auto_map": {"AutoConfig": "x.Y"}}, {}, []),
        ({"architectures": ["OldForCausalLM"]}, {"pipeline_parallel_size": 2}, []),
        (
            {"quantization_config": BLOCKS},
            {},
            ["quantization fp8 needs GPUs of compute capability 8.9, these have 8.0"],
        ),
        ({"quantization_config": {"quant_method": "odd"}}, {}, []),
        (
            {"quantization_config": GROUPS, "intermediate_size": 29568, **WIDE},
            {"tensor_parallel_size": 8},
            [
                "TP 8 does not divide intermediate_size 29568 into whole groups of 128, the unit of"
                " this quantization: use a smaller --tp, and --pp for the rest"
            ],
        ),
        (
            {"quantization_config": GROUPS, "intermediate_size": 28672, **WIDE},
            {"tensor_parallel_size": 8},
            [],
        ),
        (
            {
                "quantization_config": {**GROUPS, "modules_to_not_convert": ["mlp"]},
                "intermediate_size": 29568,
            },
            {"tensor_parallel_size": 8},
            [],
        ),
        (
            {
                "quantization_config": {**BLOCKS, "quant_method": "awq"},
                "num_experts": 128,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
            },
            {"tensor_parallel_size": 4},
            [
                "TP 4 does not divide moe_intermediate_size 768 into whole blocks of 128, the unit"
                " of this quantization: use a smaller --tp, and --pp for the rest"
            ],
        ),
        (
            {
                "quantization_config": {**BLOCKS, "quant_method": "awq"},
                "num_experts": 128,
                "moe_intermediate_size": 768,
            },
            {"tensor_parallel_size": 4, "enable_expert_parallel": True},
            [],
        ),
    ],
)
def test_a_model_is_checked_with_the_layout(
    image: Path,
    tmp_path: Path,
    config: dict[str, Any],
    options: dict[str, Any],
    mistakes: list[str],
) -> None:
    """Its class, and its quantization with the GPUs and TP; unknown facts refuse nothing."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = run(image, "engine", json.dumps({"model": str(tmp_path), **options}))

    assert (report["mistakes"], report["error"]) == (mistakes, "")


@pytest.mark.parametrize(
    ("files", "words", "warns"),
    [
        ({"tokenizer_config.json": "{}"}, [], True),
        ({"tokenizer_config.json": '{"chat_template": "{{ x }}"}'}, [], False),
        ({"tokenizer_config.json": "{}", "chat_template.jinja": "{{ x }}"}, [], False),
        ({"tokenizer_config.json": "{}"}, ["--chat-template", "x.jinja"], False),
        ({"tokenizer_config.json": "{}", "config.json": '{"model_type": "blip"}'}, [], False),
        ({}, [], False),
    ],
)
def test_a_missing_chat_template_is_a_warning(
    image: Path, tmp_path: Path, files: dict[str, str], words: list[str], warns: bool
) -> None:
    """A base model works without one, for completions."""
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    report = run(image, "serve", str(tmp_path), *words)

    assert (report["mistakes"], report["error"]) == ([], "")
    assert bool(report["warnings"]) == warns


def test_a_vllm_with_other_internals_is_no_mistake_of_the_user(image: Path, tmp_path: Path) -> None:
    """The arguments count as unchecked."""
    serve = (image / "vllm/entrypoints/cli/serve.py").read_text()
    folder = tmp_path / "vllm" / "entrypoints" / "cli"
    folder.mkdir(parents=True)
    for name in ("__init__", "config", "entrypoints/__init__", "entrypoints/cli/__init__"):
        (tmp_path / "vllm" / f"{name}.py").write_text((image / "vllm" / f"{name}.py").read_text())
    (folder / "server.py").write_text((image / "vllm/entrypoints/cli/server.py").read_text())
    (folder / "serve.py").write_text(serve.replace("validate(self, args)", "validate(self)"))

    report = run(tmp_path, "serve", "org/m")

    assert report["mistakes"] == []
    assert report["error"].startswith("TypeError: ")
    assert "takes 1 positional argument" in report["error"]
