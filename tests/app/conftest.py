"""An entry of an audit trail."""

from __future__ import annotations

from launcher.app.audit import AuditLine

ENTRY = AuditLine(
    at="2026-11-21T21:00:05Z",
    who="anna",
    host="laptop",
    verb="up",
    command="vlaunch up",
    node="gpu01",
    id="1a2b3c4d",
    inventory="0123456789ab",
    vlaunch="0.1.0",
    changes=("pulling x:1", "starting the Ray head"),
)
