"""What runs in Ray, as the head tells of it."""

from __future__ import annotations

from dataclasses import replace

from launcher.site import Site
from launcher.state import running
from tests.plan.served import INVENTORY, container, seen


def test_a_server_of_an_older_vlaunch_is_named() -> None:
    """No keeper knows of it: a Ray job with our mark, or a rank's own container."""
    job = {
        "submission_id": "serve-1-1",
        "status": "RUNNING",
        "metadata": {"vlaunch.model": "org/m"},
    }
    rank = container("n2", name="vlaunch-c-n2-rank", role="rank", labels={"vlaunch.model": "org/m"})
    facts = {**seen().site.facts, "n2": replace(seen().site.facts["n2"], containers=(rank,))}

    assert running.older(seen().site, {"jobs": [job]}) == "org/m (Ray job serve-1-1)"
    assert running.older(Site(INVENTORY, facts), {}) == "org/m (container vlaunch-c-n2-rank on n2)"
    assert (
        running.older(
            seen().site,
            {"jobs": [{**job, "status": "STOPPED"}, {**job, "metadata": {}}]},
        )
        == ""
    )
