class BlockMetadata:
    def __init__(
        self,
        *,
        num_rows: int | None,
        size_bytes: int | None,
        input_files: list[str] | None,
        exec_stats: None,
    ) -> None: ...
