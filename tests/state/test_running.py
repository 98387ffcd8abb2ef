"""What runs in Ray, as the head tells of it."""

from __future__ import annotations

from launcher.state import running
from launcher.state.running import Batch


def test_batch_jobs_that_are_not_over() -> None:
    """Ray jobs of others have no name of ours, and those that ended hold nothing."""
    jobs = [
        {"submission_id": f"{status}-{name or 'other'}", "status": status, "metadata": metadata}
        for status in ("RUNNING", "PENDING", "SUCCEEDED")
        for name, metadata in (("a", {"vlaunch.batch": "a"}), ("", {}), ("", None))
    ]

    assert running.batches({"jobs": jobs}) == [
        Batch(name="a", id="RUNNING-a"),
        Batch(name="a", id="PENDING-a"),
    ]
    assert running.batches({}) == []
