"""Messages for pydantic errors below user-defined keys."""

from __future__ import annotations

import pytest

from tests.inventory.conftest import Mistakes


@pytest.mark.parametrize("name", ["A", "env", "file"])
def test_a_key_below_a_name_of_the_users_is_looked_up_where_it_belongs(
    mistakes: Mistakes, name: str
) -> None:
    """Also when the name is a key's somewhere else."""
    assert mistakes(f"secrets: {{{name}: {{fiel: x, env: X}}}}") == [
        f"3: secrets.{name}: unknown key `fiel`; did you mean `file`?"
    ]


def test_a_key_of_the_top_level_is_recognised(mistakes: Mistakes) -> None:
    """And those of a node, too, where a node may have them."""
    assert mistakes("ray: {cluster: x, docker: [docker]}") == [
        "3: ray: unknown key `cluster` here; it belongs at the top level",
        "3: ray: unknown key `docker` here; it belongs at the top level or in a node",
    ]
