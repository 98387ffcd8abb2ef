"""Offline batch inference: jobs, their plans and views. `driver/` runs inside the job."""

NODE_PROGRAMS = {"batch.pyz": "archive:files"}
WORKLOADS = {"batch jobs": "workload"}
