"""Causes of faults and their evidence: `doctor`, `logs`, `collect`."""

COMMANDS = {
    "logs": (150, "logs of all nodes, each line with its node"),
    "doctor": (160, "what went wrong: known failures in the logs of all nodes, with fixes"),
    "collect": (170, "a bundle for a bug report, without secrets"),
}
