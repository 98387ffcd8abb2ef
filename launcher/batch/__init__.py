"""Offline batch inference: jobs, their plans and views. `driver/` runs inside the job."""
