"""Names in a bundle of `vlaunch collect`."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from launcher.diagnose.collect_command import Bundle


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../b", "nodes/01-x/a b", "a/b/c/d/e", "", ".hidden", "x\ny"]
)
def test_no_name_leads_out_of_the_bundle(name: str, tmp_path: Path) -> None:
    """Nodes do not choose names, but they are checked."""
    with (
        tarfile.open(tmp_path / "x.tar", "w") as archive,
        pytest.raises(ValueError, match="invalid name in the bundle"),
    ):
        Bundle(archive, "root").add_file(name, "x")
