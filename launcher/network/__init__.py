"""The network check: `check-nccl`, its verdicts and page. `probe/` runs in the containers."""

COMMANDS = {"check-nccl": (13, "Measure the network between all nodes")}
NODE_PROGRAMS = {"network.pyz": "archive:files"}
