"""Recipes from a URL, of a server on this machine."""

from __future__ import annotations

import functools
import http.server
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.errors import RequestError, VlaunchError
from launcher.recipes import source
from launcher.remote import recipe_site
from tests.recipes import acme
from tests.recipes.test_source import site


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """The address of a server that has an archive, a site's JSON, and what is neither."""
    site(tmp_path / "public")
    with tarfile.open(tmp_path / "main.tar.gz", "w:gz") as tar:
        tar.add(acme.FOLDER, "recipes-main")
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "models.json").write_text("{}")
    handler = functools.partial(_Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_an_archive(url: str) -> None:
    """Is unpacked as one on the disk is."""
    found = source.library(recipe_site.take(f"{url}/main.tar.gz"), url)

    assert found.origin.digest == acme.library().origin.digest


def test_a_sites_pages(url: str, tmp_path: Path) -> None:
    """Are those that its list names."""
    assert recipe_site.take(f"{url}/public/") == source.local(tmp_path / "public")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/nowhere", "HTTP 404"),
        ("/nowhere.zip", "HTTP 404"),
    ],
)
def test_what_cannot_be_had(url: str, path: str, said: str) -> None:
    """Says why, and what to do without internet."""
    with pytest.raises(VlaunchError, match="cannot be had") as error:
        recipe_site.take(url + path)

    assert error.value.evidence == said
    assert "--from FILE" in error.value.hint


def test_no_recipes(url: str) -> None:
    """A list without any."""
    with pytest.raises(RequestError, match="has no recipes"):
        recipe_site.take(f"{url}/none")


def test_no_server() -> None:
    """A closed port is no traceback."""
    with pytest.raises(VlaunchError, match="cannot be had") as error:
        recipe_site.take("http://127.0.0.1:9/a.zip")
    assert "ConnectionError" in error.value.evidence


def test_answers_are_bounded(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In size and in time."""
    monkeypatch.setattr(source, "MOST_OF_A_FILE", 10)
    with pytest.raises(VlaunchError) as error:
        recipe_site.take(f"{url}/public")
    assert error.value.evidence == "it is too large, or takes too long"


@pytest.mark.parametrize("name", [recipe_site.OFFICIAL, f"{recipe_site.OFFICIAL}/"])
def test_a_repository_of_github_is_its_archive(name: str) -> None:
    """Of its main branch; other addresses stay as they are."""
    archive = f"{recipe_site.OFFICIAL}/archive/refs/heads/main.tar.gz"

    assert recipe_site.address(name) == archive
    assert recipe_site.address(archive) == archive
    assert recipe_site.address("http://mirror/recipes/") == "http://mirror/recipes"
