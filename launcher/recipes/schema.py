"""The keys of vLLM's recipes that vlaunch reads (https://github.com/vllm-project/recipes)."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from launcher.core.values import Argument, Bounds, Converter, EnvName, EnvValue, Model, NonEmpty
from launcher.inventory.schema import Section


class RecipeSection(Section):
    """A mapping in a recipe; keys that vlaunch does not read are ignored."""

    model_config = ConfigDict(extra="ignore")


def _parse_images(value: object) -> object:
    """Parse an image: one for NVIDIA, or one per brand, optionally by CUDA version."""
    if isinstance(value, str):
        return {"nvidia": value}
    if not isinstance(value, dict):
        return value
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
    """Arguments, variables and an image that a part of a recipe adds."""

    extra_args: list[Argument] = Field(default_factory=list)
    extra_env: dict[EnvName, EnvValue] = Field(default_factory=dict)
    docker_image: Images = Field(default_factory=dict)


class FeatureArgs(RecipeSection):
    """Arguments of a feature."""

    args: list[Argument] = Field(default_factory=list)


class Mode(FeatureArgs):
    """One of several forms of a feature."""

    variants: Names = Field(default_factory=list)
    hardware: dict[str, str] = Field(default_factory=dict)
    hardware_overrides: dict[str, FeatureArgs] = Field(default_factory=dict)


class Feature(Mode):
    """An optional set of arguments, such as a tool-call parser."""

    modes: dict[str, Mode] = Field(default_factory=dict)
    default_mode: str = ""


class Variant(ArgumentLayer):
    """One checkpoint of a model."""

    model_id: Model | None = None
    precision: str = ""
    vram_minimum_gb: Annotated[float, Bounds(ge=0)] = 0.0
    tp: Sizes = Field(default_factory=dict)
    hardware_overrides: dict[str, ArgumentLayer] = Field(default_factory=dict)
    supported_hardware: Names = Field(default_factory=list)
    precision_hardware: dict[str, str] = Field(default_factory=dict)
    default_modes: dict[str, str] = Field(default_factory=dict)
    min_vllm_version: str = ""


class ModelPart(RecipeSection):
    """The model, with the arguments and variables of every variant."""

    model_id: Model
    base_args: list[Argument] = Field(default_factory=list)
    base_env: dict[EnvName, EnvValue] = Field(default_factory=dict)
    docker_image: Images = Field(default_factory=dict)
    min_vllm_version: str = ""


class Dependency(RecipeSection):
    """A command that installs something beside vLLM."""

    command: str
    optional: bool = False


class Meta(RecipeSection):
    """The title and the hardware of a recipe: `verified` or `unsupported`."""

    title: str = ""
    provider: str = ""
    tasks: Names = Field(default_factory=list)
    hardware: dict[str, str] = Field(default_factory=dict)


class Recipe(RecipeSection):
    """A recipe, without its guide, its strategies and the site's own keys."""

    meta: Meta = Field(default_factory=Meta)
    model: ModelPart
    dependencies: list[Dependency] = Field(default_factory=list)
    features: dict[str, Feature] = Field(default_factory=dict)
    opt_in_features: Names = Field(default_factory=list)
    hardware_opt_in_features: dict[str, Names] = Field(default_factory=dict)
    variants: dict[str, Variant] = Field(default_factory=dict)
    hardware_overrides: dict[str, ArgumentLayer] = Field(default_factory=dict)
