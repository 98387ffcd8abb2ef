"""Offline batch inference: jobs, their plans and views. `driver/` runs inside the job."""

COMMANDS = {
    "batch": (90, "answer every row of a file, and lose none"),
    "jobs": (100, "batch jobs: how far they are"),
}

WORKLOADS = {"batch jobs": "workload"}
