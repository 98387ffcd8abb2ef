"""The keys of vLLM's recipes that vlaunch reads, and those that it ignores
(https://github.com/vllm-project/recipes, SCHEMA.md).
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, get_args

from pydantic import ConfigDict, Field

from launcher.core.values import Argument, Bounds, Converter, EnvName, EnvValue, Model, NonEmpty
from launcher.inventory.schema import Section


class RecipeSection(Section):
    """A mapping in a recipe; keys that vlaunch does not read are ignored.

    `ignored` has those of them that were examined: descriptions, and settings of the site.
    """

    model_config = ConfigDict(extra="ignore")
    ignored: ClassVar[frozenset[str]] = frozenset()


def unknown_keys(value: object, annotation: Any, path: str = "") -> Iterator[str]:
    """Yield the keys, such as `model.smg_grpc`, that vlaunch neither reads nor ignores on purpose;
    names that authors choose are replaced by `*`.
    """
    if isinstance(annotation, type) and issubclass(annotation, RecipeSection):
        for key, inner in value.items() if isinstance(value, dict) else ():
            if field := annotation.model_fields.get(key):
                yield from unknown_keys(inner, field.annotation, f"{path}{key}.")
            elif key not in annotation.ignored:
                yield f"{path}{key}"
        return
    items = list(value.values()) if isinstance(value, dict) else value
    for inner_annotation in get_args(annotation)[-1:]:
        for inner in items if isinstance(items, list) else ():
            yield from unknown_keys(inner, inner_annotation, f"{path}*.")


def _parse_images(value: object) -> object:
    """Parse an image: one for NVIDIA, or one per brand, optionally by CUDA version."""
    if isinstance(value, str):
        return {"nvidia": value}
    if not isinstance(value, dict):
        return value
    if value and all(re.fullmatch(r"cu\d+", key) for key in value):
        value = {"nvidia": value}
    return {
        brand: next(iter(image.values()), "") if isinstance(image, dict) else image
        for brand, image in value.items()
    }


def _parse_sizes(value: object) -> object:
    return {"default": value} if isinstance(value, int) else value


Names = list[NonEmpty]
Images = Annotated[dict[str, NonEmpty], Converter(_parse_images, str | dict[str, Any])]
Sizes = Annotated[
    dict[str, Annotated[int, Bounds(ge=1)]], Converter(_parse_sizes, int | dict[str, int])
]


class ArgumentLayer(RecipeSection):
    """Arguments, variables, an image and the memory that a part of a recipe adds."""

    ignored = frozenset({"install", "install_note", "docker_serve_command"})

    extra_args: list[Argument] = Field(default_factory=list)
    extra_env: dict[EnvName, EnvValue] = Field(default_factory=dict)
    docker_image: Images = Field(default_factory=dict)
    vram_minimum_gb: Annotated[float, Bounds(ge=0)] = 0.0


class FeatureArgs(RecipeSection):
    """Arguments and variables of a feature."""

    ignored = frozenset({"label", "description"})

    args: list[Argument] = Field(default_factory=list)
    env: dict[EnvName, EnvValue] = Field(default_factory=dict)


class Mode(FeatureArgs):
    """One of several forms of a feature."""

    variants: Names = Field(default_factory=list)
    hardware: dict[str, str] = Field(default_factory=dict)
    hardware_overrides: dict[str, FeatureArgs] = Field(default_factory=dict)


class Feature(Mode):
    """An optional set of arguments, such as a tool-call parser."""

    ignored = frozenset({*Mode.ignored, "strategies"})

    modes: dict[str, Mode] = Field(default_factory=dict)
    default_mode: str = ""


class Variant(ArgumentLayer):
    """One checkpoint of a model."""

    ignored = frozenset({"label", "description", "nightly_required"})

    model_id: Model | None = None
    precision: str = ""
    tp: Sizes = Field(default_factory=dict)
    hardware_overrides: dict[str, ArgumentLayer] = Field(default_factory=dict)
    supported_hardware: Names = Field(default_factory=list)
    precision_hardware: dict[str, str] = Field(default_factory=dict)
    default_modes: dict[str, str] = Field(default_factory=dict)
    min_vllm_version: str = ""


class ModelPart(RecipeSection):
    """The model, with the arguments and variables of every variant.

    `default_frontend` is `rust` if the site's commands use vLLM's Rust front end.
    """

    ignored = frozenset(
        {
            *("architecture", "parameter_count", "active_parameters", "context_length"),
            *("install", "nightly_required"),  # as is `min_vllm_version: nightly`
            *("rust_frontend", "smg_grpc", "supports_dcp", "flashinfer_autotune"),
        }
    )

    model_id: Model
    base_args: list[Argument] = Field(default_factory=list)
    base_env: dict[EnvName, EnvValue] = Field(default_factory=dict)
    docker_image: Images = Field(default_factory=dict)
    min_vllm_version: str = ""
    default_frontend: str = ""


class Dependency(RecipeSection):
    """A command that installs something beside vLLM, on GPUs of one brand or on all."""

    ignored = frozenset({"note"})

    command: str
    optional: bool = False
    brand: str = ""


class Meta(RecipeSection):
    """The title and the hardware of a recipe: `verified` or `unsupported`."""

    ignored = frozenset(
        {
            *("slug", "description", "date_added", "date_updated", "related_recipes"),
            *("performance_headline", "default_hardware", "default_variant", "platforms"),
        }
    )

    title: str = ""
    provider: str = ""
    tasks: Names = Field(default_factory=list)
    hardware: dict[str, str] = Field(default_factory=dict)


class Recipe(RecipeSection):
    """A recipe, without its guide and the site's own keys.

    Of its strategies only the names are read, for the decision if it can run; the planner chooses
    the parallelism.
    """

    ignored = frozenset(
        {
            *("guide", "presets", "hardware_notes", "kv_offload_support"),
            *("default_strategy", "strategy_overrides", "strategy_hardware", "strategy_min_gpus"),
            "kv_cache_strategy_hardware",
        }
    )

    meta: Meta = Field(default_factory=Meta)
    model: ModelPart
    dependencies: list[Dependency] = Field(default_factory=list)
    features: dict[str, Feature] = Field(default_factory=dict)
    opt_in_features: Names = Field(default_factory=list)
    hardware_opt_in_features: dict[str, Names] = Field(default_factory=dict)
    compatible_strategies: Names = Field(default_factory=list, exclude=True)
    variants: dict[str, Variant] = Field(default_factory=dict)
    hardware_overrides: dict[str, ArgumentLayer] = Field(default_factory=dict)
