"""Brings a server back when its head's container has restarted: `supervisor.py boot`. Standard library only."""

from __future__ import annotations

import re
import time
from typing import Any

import head
import record
from supervisor_look import SILENT, Look


def boot() -> int:
    """Hand the server to Ray again that ran when this node's head container ended, as soon as the cluster is whole.

    A launcher that starts something meanwhile, or stops what is wanted, is obeyed: this ends.
    """
    wanted = record.read(record.WANTED)
    if not wanted:
        record.remove(record.SERVER)  # of a server that Ray, which starts anew, knows nothing of
        return 0
    if not wanted.get("supervise") or wanted.get("backend") != "ray":
        return 0
    before = record.read(record.SERVER) or {}
    look, kept = Look(wanted), record.Record(wanted)
    kept.said["canary"] = before.get("canary") if before.get("id") == wanted["id"] else None
    answered = any(each["wanted"].get("id") == wanted["id"] for each in record.read(record.ANSWERED) or ())
    flying = (kept.said["canary"] or {}).get("in_flight")
    if before.get("state") != "gave-up":
        was = f"the server was {before.get('state', 'starting')} when it was last seen"
        kept.fault("the head's container was restarted", evidence=was, in_flight=flying)
    whole, allowed, pause = 0, not answered, min(1.0, float((wanted.get("policy") or {}).get("canary", 1)))
    while True:
        time.sleep(pause)
        try:
            with record.locked():
                if not record.wants(wanted) or serves(look):
                    return 0
                doing = look.lacking()
                whole = 0 if doing else whole + 1
                allowed = allowed or (whole >= 2 and kept.may_restart())
                if whole >= 2 and not allowed:
                    return give_up(kept, wanted)
                if whole >= 2 and resubmit(look, wanted, answered=answered):
                    return 0
        except SILENT:
            whole, doing = 0, "waiting for Ray to answer"
        kept.set("recovering", doing or "handing the server to Ray")


def give_up(kept: record.Record, wanted: dict[str, Any]) -> int:
    """Say that no restart is left."""
    kept.set("gave-up", f"no restart is left of {kept.most}; the last fault: the head's container was restarted")
    record.forget(wanted)
    say(f"GIVING UP: {kept.said['doing']}")
    return 1


def resubmit(look: Look, wanted: dict[str, Any], *, answered: bool) -> bool:
    """Submit the server under its next number; False when Ray is not ready for it yet."""
    before, stem = str(wanted.get("job", "")), f"serve-{wanted['id']}-"
    listed: Any = head.ray(look.args, "/api/jobs/")
    taken = [before, *(str(each.get("submission_id") or "") for each in listed)]
    used = [int(match[1]) for each in taken if (match := re.fullmatch(rf"{re.escape(stem)}(\d+)", each))]
    job = f"{stem}{max(used, default=0) + 1}"
    # Files are named after the job: the logs of its ranks.
    environment = {name: value.replace(before, job) if before else value for name, value in wanted.get("env", {}).items()}
    record.write(record.WANTED, {**wanted, "job": job, "env": environment})
    answer = head.post(look.args, job, head.supervisor(job, *(("--again",) if answered else ())), wanted["metadata"])
    if "error" in answer:
        say(f"Ray refuses: {answer['error']}")
        return False
    say(f"submitted {wanted.get('model')} again as Ray job {job}")
    return True


def serves(look: Look) -> bool:
    """True when Ray has a server already."""
    listed: Any = head.ray(look.args, "/api/jobs/")
    return any(each["status"] not in head.OVER and "vlaunch.model" in (each.get("metadata") or {}) for each in listed)


def say(text: str) -> None:
    """Write a line to the job's log."""
    print(f"vlaunch supervisor: {text}", flush=True)
