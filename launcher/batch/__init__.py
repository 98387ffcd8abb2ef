"""Offline batch inference: jobs, their plans and views. `driver/` runs inside the job."""

COMMANDS = {
    "batch": (30, "Run a model over every row of a dataset"),
    "jobs": (31, "List and remove batch jobs"),
}

NODE_PROGRAMS = {"batch.pyz": "archive:files"}
WORKLOADS = {"batch jobs": "workload"}
