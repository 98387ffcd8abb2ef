"""Brings a server back when its head's container has restarted (`supervisor.py boot`), or its supervisor was killed (`watch`).

Standard library only. `entry.sh` starts both, one after the other, beside the head's Ray.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from typing import Any, NoReturn

import head
import record
from supervisor_look import SILENT, Look


def boot() -> int:
    """Hand the server to Ray again that ran when this node's head container ended."""
    wanted, before = record.read(record.WANTED), record.read(record.SERVER) or {}
    if not wanted:
        if before.get("state") != "gave-up":  # that it did stays to be seen, until somebody serves anew
            record.remove(record.SERVER)  # of a server that Ray, which starts anew, knows nothing of
        return 0
    if not wanted.get("supervise") or wanted.get("backend") != "ray":
        return 0
    if record.replaced(before) and before.get("id") == wanted.get("id") and before.get("state") != "gave-up":
        say("the head's container was replaced")
        return bring_back(wanted, "")
    return bring_back(wanted, "the head's container was restarted")


def watch() -> NoReturn:
    """Hand a server to Ray again whenever its supervisor has died, as long as the head's container lives.

    It looks at two small files and one process, as often as the supervisor looks at the server.
    """
    pause = 5.0
    while True:
        with contextlib.suppress(*SILENT):  # whatever lies in those files
            wanted = record.read(record.WANTED) or {}
            pause = float((wanted.get("policy") or {}).get("canary", pause))
            if wanted.get("supervise") and wanted.get("backend") == "ray" and orphaned(wanted):
                bring_back(wanted, "the supervisor died")
        time.sleep(pause)


def orphaned(wanted: dict[str, Any]) -> bool:
    """True when a server that had answered, and that nobody stopped, has lost its supervisor, and Ray knows it, too.

    Ray is asked only when the process is gone. A first start that fails is for whoever watches it.
    """
    said = record.read(record.SERVER) or {}
    if any(said.get(name) != wanted.get(name) for name in ("id", "job")) or said.get("state") not in ("ready", "recovering"):
        return False
    if head.belongs(said.get("pid"), wanted["job"]):
        return False
    try:
        return bool(head.job(Look(wanted, wanted["job"]).args)["status"] == "FAILED")
    except SILENT:
        return False


def bring_back(wanted: dict[str, Any], what: str) -> int:
    """Hand the server to Ray again as soon as all is there that it needs.

    `what` is the fault, which takes a restart; empty for what somebody has done on purpose, as with `vlaunch secrets rotate`. A
    launcher that starts something meanwhile, or stops what is wanted, is obeyed: this ends.
    """
    before = record.read(record.SERVER) or {}
    look, kept = Look(wanted), record.Record(wanted, state="recovering")
    kept.said["canary"] = before.get("canary") if before.get("id") == wanted["id"] else None
    answered = any(each["wanted"].get("id") == wanted["id"] for each in record.read(record.ANSWERED) or ())
    flying = (kept.said["canary"] or {}).get("in_flight")
    if what and before.get("state") != "gave-up":
        was = f"the server was {before.get('state', 'starting')} when it was last seen"
        kept.fault(what, evidence=was, in_flight=flying)
    kept.set("recovering", "ending what is left of the engine")
    end_engine(wanted)
    allowed, pause = not (answered and what), min(1.0, float((wanted.get("policy") or {}).get("canary", 1)))
    while True:
        time.sleep(pause)
        if not record.wants(wanted):
            return 0
        try:
            doing = look.lacking()  # not under the lock, which `stop` waits for: a busy dashboard takes its time
            with record.locked():
                if not record.wants(wanted) or serves(look):
                    return 0
                if not allowed and not kept.said["restarts_left"]:
                    return give_up(kept, wanted, what)
                if look.steady >= 2:
                    kept.reached("whole")
                    allowed = allowed or kept.may_restart()
                    if resubmit(look, wanted, kept, answered=answered):
                        return 0
        except SILENT:
            doing = "waiting for Ray to answer"
        kept.set("recovering", doing or "handing the server to Ray")


def end_engine(wanted: dict[str, Any]) -> None:
    """End what a dead supervisor left of its engine, which got a signal to end when it died."""
    job = str(wanted.get("job", ""))
    head.until(lambda: not head.processes(job), float((wanted.get("policy") or {}).get("grace", 5)))
    for pid in head.processes(job):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def give_up(kept: record.Record, wanted: dict[str, Any], what: str) -> int:
    """Say that no restart is left."""
    kept.set("gave-up", f"no restart is left of {kept.most}; the last fault: {what}")
    record.forget(wanted)
    say(f"GIVING UP: {kept.said['doing']}")
    return 1


def resubmit(look: Look, wanted: dict[str, Any], kept: record.Record, *, answered: bool) -> bool:
    """Submit the server under its next number; False when Ray is not ready for it yet."""
    before, stem = str(wanted.get("job", "")), f"serve-{wanted['id']}-"
    listed: Any = head.ray(look.args, "/api/jobs/")
    taken = [before, *(str(each.get("submission_id") or "") for each in listed)]
    used = [int(match[1]) for each in taken if (match := re.fullmatch(rf"{re.escape(stem)}(\d+)", each))]
    job = f"{stem}{max(used, default=0) + 1}"
    # Files are named after the job: the logs of its ranks.
    environment = {name: value.replace(before, job) if before else value for name, value in wanted.get("env", {}).items()}
    record.write(record.WANTED, {**wanted, "job": job, "env": environment})
    # Before it is handed over: the record is its own from then on. One that fails at once is known for what it is.
    kept.said["job"] = job
    kept.save()
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
