"""What holds for every test, and inventories for those that want one."""

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

# Every day the same examples, and no deadline: one that waited for a core, beside other tests, has
# not failed.
settings.register_profile("everyday", max_examples=25, derandomize=True, deadline=None)
settings.register_profile(
    "more", max_examples=25 * int(os.environ.get("VLAUNCH_EXAMPLES", "1")), deadline=None
)
settings.load_profile("more" if "VLAUNCH_EXAMPLES" in os.environ else "everyday")
gc.disable()  # thousands of tests are collected, and all of them stay


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two workers to a core; three where tests start programs, and wait half of their time for them
    and for deadlines.
    """
    waiting = str(config.getoption("markexpr")).startswith("processes")
    return min((3 if waiting else 2) * (os.cpu_count() or 1), 12)


def pytest_collection_finish() -> None:
    """Take what was collected out of the garbage collector's rounds: that is a tenth of the run."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heard() -> Iterator[None]:
    """Let Ctrl-C end what tests and fixtures start, even in a run that a script put in the
    background, with SIGINT ignored.
    """
    # Programs inherit that a signal is ignored, but not a handler: with one here, they begin with
    # the default.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _no_secret_is_known() -> Iterator[None]:
    """A value that one test's program learned must not be hidden from the next one."""
    redaction.clear_secrets()
    yield
    redaction.clear_secrets()


@pytest.fixture
def load() -> Load:
    """Load an inventory of two nodes with more keys at the top, or other nodes."""

    def make(more: str = "", nodes: str = "") -> Inventory:
        two = (
            "nodes: [{host: gpu01, ip: 10.0.0.11, gpus: 8}, {host: gpu02, ip: 10.0.0.12, gpus: 8}]"
        )
        return loads(
            f"cluster: c\nimage: vllm/vllm-openai:v0.32.0\n{more}\n{nodes or two}\n",
            Path("inventory.yaml"),
        )

    return make
