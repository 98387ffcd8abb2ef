from . import placement_group as _placement_group
from . import scheduling_strategies as scheduling_strategies
from . import state as state

placement_group = _placement_group.placement_group

def get_placement_group(name: str) -> _placement_group.PlacementGroup: ...
def get_node_ip_address() -> str: ...
