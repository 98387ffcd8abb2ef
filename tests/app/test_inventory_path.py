"""Search for a command's inventory."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.app.inventory_path import find_inventory, remember, remembered
from launcher.core.errors import RequestError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with its own state folder."""
    present = tmp_path / "here"
    present.mkdir()
    monkeypatch.chdir(present)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("VLAUNCH_INVENTORY", raising=False)
    return present


def test_order_of_the_search(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Argument, option, environment, ./inventory.yaml, the last one of `vlaunch up`."""
    last = tmp_path / "last.yaml"
    last.touch()
    remember(last)
    assert find_inventory(None, None) == last

    (folder / "inventory.yaml").touch()
    assert find_inventory(None, None) == Path("inventory.yaml")

    monkeypatch.setenv("VLAUNCH_INVENTORY", "env.yaml")
    assert find_inventory(None, None) == Path("env.yaml")
    assert find_inventory(None, "option.yaml") == Path("option.yaml")
    assert find_inventory("argument.yaml", None) == Path("argument.yaml")


def test_a_named_inventory_need_not_exist() -> None:
    """The loader reports the missing path; no other inventory replaces it."""
    remember(Path("other.yaml"))

    assert find_inventory("missing.yaml", None) == Path("missing.yaml")


def test_an_empty_variable_counts_as_unset(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in most programs."""
    monkeypatch.setenv("VLAUNCH_INVENTORY", "")
    (folder / "inventory.yaml").touch()

    assert find_inventory(None, None) == Path("inventory.yaml")


def test_a_variable_may_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell has expanded its `~`."""
    monkeypatch.setenv("VLAUNCH_INVENTORY", "~/a.yaml")

    assert find_inventory(None, None) == tmp_path / "home" / "a.yaml"


def test_naming_two_is_an_error() -> None:
    """Naming one twice is not."""
    with pytest.raises(RequestError, match=r"two inventories given: `a.yaml` and `-i b.yaml`"):
        find_inventory("a.yaml", "b.yaml")

    assert find_inventory("a.yaml", "./a.yaml") == Path("a.yaml")


def test_the_error_lists_the_searched_places(folder: Path) -> None:
    """In search order."""
    with pytest.raises(RequestError) as caught:
        find_inventory(None, None)

    assert caught.value.exit_code == 2
    assert str(caught.value.evidence).splitlines() == [
        "no path was given as an argument or with -i",
        "VLAUNCH_INVENTORY is not set",
        f"{folder / 'inventory.yaml'} does not exist",
        "no earlier `vlaunch up` from this machine",
    ]


def test_a_removed_inventory_is_named(tmp_path: Path) -> None:
    """The one last used by `vlaunch up`."""
    remember(tmp_path / "gone.yaml")

    with pytest.raises(RequestError) as caught:
        find_inventory(None, None)

    assert f"{tmp_path / 'gone.yaml'}, no longer exists" in str(caught.value.evidence)


def test_the_remembered_path_is_absolute(folder: Path) -> None:
    """The next one replaces it."""
    remember(Path("a.yaml"))
    assert remembered() == folder / "a.yaml"

    remember(Path("b.yaml"))
    assert remembered() == folder / "b.yaml"


def test_an_unwritable_state_folder_is_no_failure(tmp_path: Path) -> None:
    """The cluster is up all the same."""
    (tmp_path / "state").write_text("a file where a folder should be")

    remember(Path("a.yaml"))

    assert remembered() is None
