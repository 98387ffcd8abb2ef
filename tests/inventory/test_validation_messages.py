"""Messages for pydantic errors below user-defined keys."""

from __future__ import annotations

import pytest

from tests.inventory.conftest import Mistakes


@pytest.mark.parametrize("name", ["A", "env", "file"])
def test_keys_below_user_defined_names(mistakes: Mistakes, name: str) -> None:
    """Even if the name is another key's."""
    assert mistakes(f"secrets: {{{name}: {{fiel: x, env: X}}}}") == [
        f"3: secrets.{name}: unknown key `fiel`; did you mean `file`?"
    ]


def test_misplaced_top_level_keys(mistakes: Mistakes) -> None:
    """And misplaced keys of a node, if allowed for nodes."""
    assert mistakes("ray: {cluster: x, docker: [docker]}") == [
        "3: ray: unknown key `cluster` here; it belongs at the top level",
        "3: ray: unknown key `docker` here; it belongs at the top level or in a node",
    ]
