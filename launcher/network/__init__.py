"""The network check: `check-nccl`, its verdicts and page. `probe/` runs in the containers."""

NODE_PROGRAMS = {"network.pyz": "archive:files"}
