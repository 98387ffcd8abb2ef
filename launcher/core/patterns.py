"""How failures read that are known in two places: by the driver of batches, in what ends a pipeline
(`failures`), and by the launcher, in the lines of logs (`launcher/tools/symptoms.py`).

What only one of them meets stands there. Nothing here depends on the case of letters where the
texts do not: the driver reads them without.
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
GPU_MEMORY_HELD = (
    r"Free memory on device .* is less than (?:desired GPU memory utilization|the engine's budget)"
)
CPU_MEMORY_HELD = r"Available memory on node .* is less than desired CPU memory utilization"
# torch 2.13, _inductor/exc.py; triton, runtime/build.py; flashinfer, jit. Only where it was raised:
# some look for a compiler, and do without.
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
