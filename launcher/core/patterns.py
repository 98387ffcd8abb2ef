"""Log patterns of failures shared by the batch driver (`failures`) and
`launcher/tools/symptoms.py`, with the causes and fixes that are the same in both.

Patterns must not depend on letter case unless the texts do: the driver ignores case.
"""

from __future__ import annotations

from typing import NamedTuple

from .. import upstream


class SharedFailure(NamedTuple):
    """A failure with one cause and one fix for batch jobs (`batch`)."""

    pattern: str
    cause: str
    batch: str


DISK_FULL = r"[Nn]o space left on device"
GATED = r"gated repo|GatedRepoError|Access to model .* is restricted"
NO_REPOSITORY = r"RepositoryNotFoundError|Repository Not Found"
NO_MODEL = (
    r"Invalid repository ID or local directory|is not a local folder and is not a valid model|"
    r"HFValidationError|Repo id must be in the form|Can't load the configuration of|"
    r"does not appear to have a file named config\.json"
)
NOT_CACHED = (
    r"LocalEntryNotFoundError|OfflineModeIsEnabled|outgoing traffic has been disabled|"
    r"Cannot find (?:an appropriate|any) cached snapshot"
)
KV_CACHE_SHORT = upstream.any_of(
    "vllm.kv-cache-none", "vllm.kv-cache-too-small", "vllm.cpu-memory-reserved"
)
GPU_MEMORY_SHORT = r"(?:CUDA|HIP) out of memory|torch(?:\.cuda)?\.OutOfMemoryError"
GPU_MEMORY_IN_USE = SharedFailure(
    pattern=upstream.any_of("vllm.gpu-memory-in-use", "vllm.gpu-memory-below-budget"),
    cause="the free GPU memory is less than the engine's share",
    batch="lower `gpu_memory_utilization` under `engine: {args: …}`, or find what uses the memory:"
    " `vlaunch exec --host -- nvidia-smi`",
)
CPU_MEMORY_IN_USE = SharedFailure(
    pattern=upstream.any_of("vllm.cpu-memory-in-use", "vllm.cpu-memory-below-request"),
    cause="the free host memory is less than the engine's share",
    batch="lower `gpu_memory_utilization` under `engine: {args: …}`, or set"
    " `kv_cache_memory_bytes` there",
)
# torch 2.13, _inductor/exc.py; triton, runtime/build.py; flashinfer, jit. Only where it is raised:
# some components run without a compiler.
NO_COMPILER = SharedFailure(
    pattern=r"(?:^|[\])] )(?:[\w.]*InductorError: InvalidCxxCompiler|RuntimeError: (?:Failed to"
    r" find C compiler|Could not find nvcc|Ninja is required|Worker failed with error"
    r" 'InvalidCxxCompiler)|FileNotFoundError:"
    r" .*'(?:[^'\n]*/)?(?:nvcc|ninja|gcc|g\+\+|clang|cc)'$)",
    cause="the image has no compiler, which vLLM needs during startup",
    batch="use an image with g++ (and nvcc, on GPUs), or turn compilation off: `enforce_eager:"
    " true` under `engine: {args: …}`",
)
CONTEXT_TOO_LONG = SharedFailure(
    pattern=upstream.text("vllm.context-too-long"),
    cause="the context is longer than the model supports",
    batch="lower `max_model_len` under `engine: {args: …}`",
)
UNKNOWN_ARGUMENT = SharedFailure(
    pattern=upstream.text("vllm.unknown-argument"),
    cause="vLLM rejected an engine argument",
    batch="correct it under `engine: {args: …}`; list vLLM's arguments (write `_` for `-`):"
    " `vlaunch exec --head -- vllm serve --help=all`",
)
NO_PLACEMENT_GROUP = upstream.text("vllm.placement-group-refused")
GCS_UNREACHABLE = upstream.any_of("ray.gcs-not-connected", "ray.gcs-unreachable")
ENGINE_KILLED = SharedFailure(
    pattern=upstream.text("vllm.engine-killed"),
    cause="the engine was killed, most likely for lack of host memory",
    batch="check the kernel log: `vlaunch exec --host -- dmesg | tail`",
)
