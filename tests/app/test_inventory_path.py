"""Search for the inventory of a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.app.inventory_path import find_inventory, remember, remembered
from launcher.core.errors import RequestError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to stand in, with a state folder of its own."""
    present = tmp_path / "here"
    present.mkdir()
    monkeypatch.chdir(present)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("VLAUNCH_INVENTORY", raising=False)
    return present


def test_the_first_that_is_named_wins(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Argument, option, environment, ./inventory.yaml, the one last brought up: each stands behind
    the one before.
    """
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


def test_what_is_named_need_not_exist() -> None:
    """The loader says so, with the path; nothing else is taken in its place."""
    remember(Path("other.yaml"))

    assert find_inventory("missing.yaml", None) == Path("missing.yaml")


def test_an_empty_variable_names_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not set."""
    monkeypatch.setenv("VLAUNCH_INVENTORY", "")
    (folder / "inventory.yaml").touch()

    assert find_inventory(None, None) == Path("inventory.yaml")


def test_a_variable_may_start_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No shell has replaced `~` in it."""
    monkeypatch.setenv("VLAUNCH_INVENTORY", "~/a.yaml")

    assert find_inventory(None, None) == tmp_path / "home" / "a.yaml"


def test_naming_two_is_an_error() -> None:
    """Naming the same one twice is not."""
    with pytest.raises(RequestError, match=r"two inventories given: `a.yaml` and `-i b.yaml`"):
        find_inventory("a.yaml", "b.yaml")

    assert find_inventory("a.yaml", "./a.yaml") == Path("a.yaml")


def test_none_at_all_tells_where_it_looked(folder: Path) -> None:
    """Each place in its order."""
    with pytest.raises(RequestError) as caught:
        find_inventory(None, None)

    assert caught.value.exit_code == 2
    assert str(caught.value.evidence).splitlines() == [
        "no path was given as an argument or with -i",
        "VLAUNCH_INVENTORY is not set",
        f"{folder / 'inventory.yaml'} does not exist",
        "no earlier `vlaunch up` from this machine",
    ]


def test_one_that_was_brought_up_and_is_gone_is_named(tmp_path: Path) -> None:
    """So that the reader knows what is missing."""
    remember(tmp_path / "gone.yaml")

    with pytest.raises(RequestError) as caught:
        find_inventory(None, None)

    assert f"{tmp_path / 'gone.yaml'}, no longer exists" in str(caught.value.evidence)


def test_what_is_remembered_does_not_depend_on_where_one_stands(folder: Path) -> None:
    """The path is made absolute, and the next one replaces it."""
    remember(Path("a.yaml"))
    assert remembered() == folder / "a.yaml"

    remember(Path("b.yaml"))
    assert remembered() == folder / "b.yaml"


def test_a_state_folder_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    """The cluster is up all the same."""
    (tmp_path / "state").write_text("a file where a folder should be")

    remember(Path("a.yaml"))

    assert remembered() is None
