"""How failures read that are known in two places: by the driver of batches, in what ends a pipeline
(`failures`), and by the launcher, in the lines of logs (`launcher/tools/symptom_table.py`).

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
GPU_MEMORY_HELD = r"Free memory on device .* is less than desired GPU memory utilization"
NO_PLACEMENT_GROUP = r"Cannot provide a placement group"
GCS_UNREACHABLE = r"(?:Failed|Unable) to connect to GCS"
ENGINE_KILLED = r"Failed core proc\(s\): \{.*: -9\b"
