"""The network check: `check-nccl`, its verdicts and page. `probe/` runs in the containers."""

COMMANDS = {"check-nccl": (40, "prove the network between the containers that will serve")}
