from collections.abc import Sequence

class PlacementGroup:
    def wait(self, timeout_seconds: float = ...) -> bool: ...

def placement_group(
    bundles: Sequence[dict[str, float]],
    strategy: str = ...,
    name: str = ...,
    lifetime: str | None = ...,
) -> PlacementGroup: ...
def remove_placement_group(placement_group: PlacementGroup) -> None: ...
