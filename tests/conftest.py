"""Settings for all tests, and the inventory fixture."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from launcher.core import redaction
from launcher.core.domain import Inventory
from launcher.inventory.load import loads

Load = Callable[..., Inventory]
# Simulated nodes under the command line, and under `status`.
pytest_plugins = ["tests.command_line", "tests.cluster_status"]

# The same examples every day, and no deadline: on a busy machine an example may wait for a core.
settings.register_profile("everyday", max_examples=25, derandomize=True, deadline=None)
settings.register_profile(
    "more", max_examples=25 * int(os.environ.get("VLAUNCH_EXAMPLES", "1")), deadline=None
)
settings.load_profile("more" if "VLAUNCH_EXAMPLES" in os.environ else "everyday")
# A developer's imported recipes would replace the packaged ones.
os.environ["XDG_DATA_HOME"] = "/nonexistent"
gc.disable()  # collection creates many objects, and all of them stay


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return two workers per core; three for tests of programs, which mostly wait."""
    waiting = str(config.getoption("markexpr")).startswith("processes")
    return min((3 if waiting else 2) * (os.cpu_count() or 1), 12)


def pytest_collection_finish() -> None:
    """Exempt the collected tests from garbage collection: a tenth of the run."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the tests' programs even where a script started pytest with SIGINT ignored."""
    # Programs inherit an ignored signal, but not a handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _forget_secrets() -> Iterator[None]:
    """Clear the secrets to redact, so that none of one test affects the next."""
    redaction.clear_secrets()
    yield
    redaction.clear_secrets()


@pytest.fixture
def load() -> Load:
    """Load an inventory of two nodes, with further top-level keys, or other nodes."""

    def make(keys: str = "", nodes: str = "") -> Inventory:
        default_nodes = (
            "nodes: [{host: gpu01, ip: 10.0.0.11, gpus: 8}, {host: gpu02, ip: 10.0.0.12, gpus: 8}]"
        )
        return loads(
            f"cluster: c\nimage: vllm/vllm-openai:v0.32.0\n{keys}\n{nodes or default_nodes}\n",
            Path("inventory.yaml"),
        )

    return make
