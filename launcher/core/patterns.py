"""Log patterns of failures shared by the batch driver (`failures`) and
`launcher/tools/symptoms.py`.

Patterns must not depend on letter case unless the texts do: the driver ignores case.
"""

from __future__ import annotations

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
KV_CACHE_SHORT = (
    r"No available memory for the cache blocks|"
    r"larger than the (?:maximum number of tokens|available KV cache)"
)
GPU_MEMORY_SHORT = r"(?:CUDA|HIP) out of memory|torch(?:\.cuda)?\.OutOfMemoryError"
# vLLM 0.32, v1/worker/utils.py and cpu_worker.py
GPU_MEMORY_IN_USE = (
    r"Free memory on device .* is less than (?:desired GPU memory utilization|the engine's budget)"
)
CPU_MEMORY_IN_USE = r"Available memory on node .* is less than desired CPU memory utilization"
# torch 2.13, _inductor/exc.py; triton, runtime/build.py; flashinfer, jit. Only where it is raised:
# some components run without a compiler.
NO_COMPILER = (
    r"(?:^|[\])] )(?:[\w.]*InductorError: InvalidCxxCompiler|RuntimeError: (?:Failed to find C"
    r" compiler|Could not find nvcc|Ninja is required|Worker failed with error"
    r" 'InvalidCxxCompiler)|FileNotFoundError: .*'(?:[^'\n]*/)?(?:nvcc|ninja|gcc|g\+\+|clang|cc)'$)"
)
CONTEXT_TOO_LONG = r"max_model_len \(\d+\) is greater than the derived max_model_len"
UNKNOWN_ARGUMENT = r"EngineArgs\.__init__\(\) got an unexpected keyword argument '(\w+)'"
NO_PLACEMENT_GROUP = r"Cannot provide a placement group"
GCS_UNREACHABLE = r"(?:Failed|Unable) to connect to GCS"
ENGINE_KILLED = r"Failed core proc\(s\): \{.*: -9\b"
