"""Causes of faults and their evidence: `doctor`, `logs`, `collect`."""

COMMANDS = {
    "logs": (24, "Print or follow logs from all nodes"),
    "doctor": (40, "Find the likely cause of a failure in the logs"),
    "collect": (41, "Write a redacted bundle for a bug report"),
}
