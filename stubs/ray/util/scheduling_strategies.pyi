from .placement_group import PlacementGroup

class PlacementGroupSchedulingStrategy:
    def __init__(
        self,
        placement_group: PlacementGroup,
        placement_group_bundle_index: int = ...,
        placement_group_capture_child_tasks: bool | None = ...,
    ) -> None: ...

class NodeAffinitySchedulingStrategy:
    def __init__(self, node_id: str, soft: bool) -> None: ...
