from enum import Enum
from typing import Any

class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2

class StructuredOutputsParams:
    def __init__(self, **structured: Any) -> None: ...

class SamplingParams:
    output_kind: RequestOutputKind
    skip_clone: bool
    def __init__(self, **params: Any) -> None: ...
