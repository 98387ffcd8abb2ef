from collections.abc import Callable, Iterator
from typing import Any

from .datasource import Datasource as Datasource

class TaskPoolStrategy:
    def __init__(self, size: int | None = ...) -> None: ...

class ActorPoolStrategy:
    def __init__(
        self,
        *,
        min_size: int | None = ...,
        max_size: int | None = ...,
        max_tasks_in_flight_per_actor: int | None = ...,
        max_concurrent_calls_per_actor: int = ...,
        enable_true_multi_threading: bool = ...,
    ) -> None: ...

class DataContext:
    enable_progress_bars: bool
    enable_operator_progress_bars: bool
    print_on_execution_start: bool
    execution_no_progress_timeout_s: int
    @classmethod
    def get_current(cls) -> DataContext: ...

class Dataset:
    _logical_plan: Any
    def map_batches(
        self,
        fn: Callable[..., Any] | type,
        *,
        batch_size: int | None,
        batch_format: str,
        compute: TaskPoolStrategy | ActorPoolStrategy,
        zero_copy_batch: bool = ...,
        fn_constructor_kwargs: dict[str, Any] | None = ...,
        **claims: Any,
    ) -> Dataset: ...
    def repartition(self, *, target_num_rows_per_block: int) -> Dataset: ...
    def iter_batches(
        self, *, batch_size: int | None, batch_format: str, prefetch_batches: int
    ) -> Iterator[Any]: ...

def read_datasource(
    datasource: Datasource,
    *,
    num_cpus: float,
    concurrency: int,
    override_num_blocks: int,
    **claims: Any,
) -> Dataset: ...
