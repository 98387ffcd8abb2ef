"""Choice of the server to roll back to, from the head's history files."""

from __future__ import annotations

import pytest

from launcher.core.errors import RequestError
from launcher.tools.host import HostFacts
from launcher.tools.site import Site, history
from tests.tools.answered import INVENTORY, answer, history_entry


def test_the_newest_other_server_is_chosen() -> None:
    """Without the present one, answered or not."""
    revisions, current_id = history.parse_history(
        answer([history_entry("a"), history_entry("b")], {"id": "a"})
    )

    assert current_id == "a"
    assert [revision.id for revision in revisions] == ["a", "b"]
    assert history.choose_previous(revisions, current_id, "sha256:1").id == "b"
    assert history.choose_previous(revisions, "never-answered", "sha256:1").id == "a"
    assert history.choose_previous(revisions, "", "").label == "org/a (TP=8 PP=2, ray) --x 1"


def test_no_previous_server() -> None:
    """With the known history."""
    with pytest.raises(RequestError, match="no other server has answered") as none:
        history.choose_previous((), "a", "")
    with pytest.raises(RequestError) as caught:
        history.choose_previous(history.parse_history(answer([history_entry("a")]))[0], "a", "")

    assert "has no record" in none.value.evidence
    assert "org/a" in caught.value.evidence


def test_another_image_is_rejected() -> None:
    """The same arguments would start another server."""
    revisions, _ = history.parse_history(answer([history_entry("b")]))

    with pytest.raises(RequestError, match="another image"):
        history.choose_previous(revisions, "a", "sha256:2")


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ((), "default"),
        (("chat/history",), "chat"),
        (("chat/history", "embed/history", "embed/desired"), "embed"),
        (("chat/history", "embed/history"), None),
        (("chat/desired", "embed/desired"), None),
    ],
)
def test_a_single_server_need_not_be_named(files: tuple[str, ...], name: str | None) -> None:
    """The one with a spec, else with a history; several are listed."""
    paths = [*(f"server/{file}.json" for file in files), "network.json", "server/x/y/desired.json"]
    facts = HostFacts(files=dict.fromkeys(paths, "0"))
    if name is not None:
        assert history.choose_name(Site(INVENTORY, {"n1": facts}), None) == name
    else:
        with pytest.raises(RequestError, match="2 servers have answered before: `chat`, `embed`"):
            history.choose_name(Site(INVENTORY, {"n1": facts}), None)
    assert history.choose_name(Site(INVENTORY, {"n1": facts}), "other") == "other"
