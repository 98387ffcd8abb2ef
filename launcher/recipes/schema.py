"""The shape of the vLLM project's recipes: every key that is read, and what those are that are not.

The format is that of https://github.com/vllm-project/recipes (its CLAUDE.md, and
`src/lib/command-synthesis.js`, which makes command lines of recipes). Its static JSON has the same
keys, and some of its own.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import Field

from launcher.inventory.schema import Section
from launcher.values import Argument, Bounds, EnvName, EnvValue, Model, NonEmpty, Read


def _for_all(value: object) -> object:
    """Let a number stand for a mapping that has it for all hardware."""
    return {"default": value} if isinstance(value, int) and not isinstance(value, bool) else value


def _image(value: object) -> object:
    """Make `{brand: image}` of the forms in which images are written. A bare one is NVIDIA's; of
    two for different CUDA, it is the one for the newer.
    """
    if isinstance(value, str) or (isinstance(value, dict) and _newer_cuda(value)):
        value = {"nvidia": value}
    if not isinstance(value, dict):
        return value
    return {
        brand: _newer_cuda(image) if isinstance(image, dict) and _newer_cuda(image) else image
        for brand, image in value.items()
    }


def _newer_cuda(images: dict[str, Any]) -> Any:
    return images.get("cu130") or images.get("cu129")


def _several(value: object) -> object:
    return value if isinstance(value, list) else [value]


Args = list[Argument]
Env = dict[EnvName, EnvValue]
Count = Annotated[int, Bounds(ge=1, le=1_000_000)]
Tokens = Annotated[int, Bounds(ge=0, le=10**12)]  # 0 of what has no context
Sizes = Annotated[dict[str, Count], Read(_for_all, int | dict[str, int])]
Images = Annotated[dict[str, NonEmpty], Read(_image, str | dict[str, str])]
Gigabytes = Annotated[float, Bounds(ge=0, le=1_000_000)]
Texts = list[NonEmpty]


class Overrides(Section):
    """What one kind of hardware adds, for a model, a variant or a strategy."""

    extra_args: Args = Field(default_factory=list)
    extra_env: Env = Field(default_factory=dict)
    docker_image: NonEmpty | None = None
    install_note: str | None = None


class FeatureArgs(Section):
    """What a feature says instead on one kind of hardware."""

    args: Args | None = None


class Mode(Section):
    """One of several ways in which a feature works."""

    label: str | None = None
    description: str | None = None
    args: Args = Field(default_factory=list)
    variants: Texts = Field(default_factory=list)
    hardware: dict[str, str] = Field(default_factory=dict)
    hardware_overrides: dict[str, FeatureArgs] = Field(default_factory=dict)


class Feature(Section):
    """What a recipe can turn on or leave out."""

    label: str | None = None
    description: str | None = None
    args: Args = Field(default_factory=list)
    modes: dict[str, Mode] = Field(default_factory=dict)
    default_mode: str | None = None
    strategies: Texts = Field(default_factory=list)
    hardware: dict[str, str] = Field(default_factory=dict)
    hardware_overrides: dict[str, FeatureArgs] = Field(default_factory=dict)
    companion: Any = None


class Needed(Section):
    """The hardware without which a precision does not run."""

    brand: str | None = None
    generation: str | None = None


class Variant(Section):
    """One checkpoint of a model."""

    model_id: Model | None = None
    precision: str = ""
    vram_minimum_gb: Gigabytes | None = None
    label: str | None = None
    description: str | None = None
    extra_args: Args = Field(default_factory=list)
    extra_env: Env = Field(default_factory=dict)
    tp: Sizes = Field(default_factory=dict)
    hardware_overrides: dict[str, Overrides] = Field(default_factory=dict)
    supported_hardware: Texts = Field(default_factory=list)
    precision_hardware: Needed | None = None
    default_modes: dict[str, str] = Field(default_factory=dict)
    min_vllm_version: str | None = None
    nightly_required: bool = False
    docker_image: Images = Field(default_factory=dict)
    json_: Any = Field(default=None, alias="json")


class ModelSection(Section):
    """The model, and what every command line for it has."""

    model_id: Model
    min_vllm_version: str | None = None
    docker_image: Images = Field(default_factory=dict)
    nightly_required: bool = False
    architecture: str | None = None
    parameter_count: str | None = None
    active_parameters: str | None = None
    context_length: Tokens | None = None
    supports_dcp: bool = False
    base_args: Args = Field(default_factory=list)
    base_env: Env = Field(default_factory=dict)
    install: Any = None
    docker_source: Any = None
    flashinfer_autotune: Any = None


class StrategyOverrides(Section):
    """What a recipe changes for one strategy."""

    tp: Sizes = Field(default_factory=dict)
    extra_args: Args = Field(default_factory=list)
    vllm_args: Args = Field(default_factory=list)
    extra_env: Env = Field(default_factory=dict)
    env: Env = Field(default_factory=dict)
    hardware_overrides: dict[str, Overrides] = Field(default_factory=dict)
    prefill: Any = None
    decode: Any = None
    router: Any = None
    pool_modes: Any = None


class Dependency(Section):
    """What is to be installed beside vLLM."""

    command: str
    note: str | None = None
    optional: bool = False
    brand: Annotated[list[str], Read(_several, str | list[str])] = Field(default_factory=list)
    install_modes: list[str] = Field(default_factory=list)


class Meta(Section):
    """What a recipe is about; `hardware` says `verified` or `unsupported`."""

    title: str = ""
    provider: str = ""
    description: str = ""
    tasks: Texts = Field(default_factory=list)
    hardware: dict[str, str] = Field(default_factory=dict)
    default_hardware: str | None = None
    slug: Any = None
    date_added: Any = None
    date_updated: Any = None
    difficulty: Any = None
    performance_headline: Any = None
    related_recipes: Any = None
    platforms: Any = None
    derived_from: Any = None
    variant: Any = None


class Recipe(Section):
    """How a model is to be served."""

    entries: ClassVar[dict[str, str]] = {}

    meta: Meta = Field(default_factory=Meta)
    model: ModelSection
    dependencies: list[Dependency] = Field(default_factory=list)
    features: dict[str, Feature] = Field(default_factory=dict)
    opt_in_features: Texts = Field(default_factory=list)
    hardware_opt_in_features: dict[str, Texts] = Field(default_factory=dict)
    variants: dict[str, Variant] = Field(default_factory=dict)
    compatible_strategies: Texts = Field(default_factory=list)
    default_strategy: str | None = None
    strategy_hardware: dict[str, dict[str, str]] = Field(default_factory=dict)
    strategy_min_gpus: Any = None
    hardware_overrides: dict[str, Overrides] = Field(default_factory=dict)
    strategy_overrides: dict[str, StrategyOverrides] = Field(default_factory=dict)
    hardware_notes: Any = None
    kv_offload_support: Any = None
    kv_cache_strategy_hardware: Any = None
    omni: Any = None
    guide: Any = None
    hf_id: str | None = None
    recommended_command: Any = None


class Profile(Section):
    """A kind of node: `vram_gb` is the memory of all its GPUs."""

    brand: str
    generation: Annotated[list[str], Read(_several, str | list[str])] = Field(default_factory=list)
    gpu_count: Count = 1
    vram_gb: Gigabytes = 0.0
    display_name: str = ""
    description: str | None = None
    multi_node: Any = None
    scalable: bool = True
    restricted: bool = False


class Taxonomy(Section):
    """The words that recipes use; of them, hardware is read here."""

    hardware_profiles: dict[str, Profile]
    tasks: Any = None
    strategies: Any = None
    kv_offload: Any = None
    kv_offload_groups: Any = None


class Strategy(Section):
    """How a model is spread over GPUs, and what that adds to a command line."""

    name: str
    deploy_type: str = "single_node"
    display_name: str = ""
    description: str | None = None
    orientation: str | None = None
    hardware_match: Any = None
    vllm_args: Args = Field(default_factory=list)
    parallel_flag: str | None = None
    parallelism: str | None = None
    env: Env = Field(default_factory=dict)
    prefill: Any = None
    decode: Any = None
    router: Any = None
    min_vllm_version: Any = None
