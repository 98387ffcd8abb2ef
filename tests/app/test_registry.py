"""Registries of options and jobs."""

from __future__ import annotations

import inspect

from launcher.app import registry
from launcher.app.registry import Workload, workloads


def test_options_of_optional_packages() -> None:
    """They are added to the named command only."""

    def command() -> None: ...

    assert registry.extend_options("stop")(command) is command
    names = [option.name for option in registry.extend_options("serve")(command).__click_params__]  # type: ignore[attr-defined]
    assert "recipe" in names


def test_registered_jobs_implement_the_protocol() -> None:
    """With the same parameters."""
    names = [name for name in vars(Workload) if not name.startswith("_")]
    parameters = {name: [*inspect.signature(getattr(Workload, name)).parameters] for name in names}

    assert names == ["running", "lines", "stop", "report_remains"]
    for workload in workloads():
        for name in names:
            own = [*inspect.signature(getattr(workload, name)).parameters]
            assert own == parameters[name][1:], name
