"""Cases of the campaign: fault, command, host and moment. Pure, and reproducible from the seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# A server on the backend `ray`, on `mp`, and two replicas behind one endpoint (`mp`).
SERVES = ("serve", "serve-mp", "serve-dp")
VERBS = ("up", *SERVES, "batch")
SEEDS = {"up": 3, **dict.fromkeys(SERVES, 1), "batch": 2}
STAND_IN, REAL = "stand-in", "real"
CONTROL, HEAD, WORKER = "control", "node1", "node2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind of fault.

    It `lasts` until it is healed; an `early` one hits a server's start, not its service.

    After a `silent` one no process dies: packets vanish, and only a deadline detects it. After one
    `by_hand` a server stays down until an operator runs `up` and `serve`. `harmless` lists the
    commands whose servers must survive it; requests may wait.
    """

    id: str
    what: str
    verbs: tuple[str, ...] = VERBS
    hosts: tuple[str, ...] = (HEAD, WORKER)
    lasts: bool = False
    early: bool = False
    silent: bool = False
    by_hand: bool = False
    harmless: tuple[str, ...] = ()


FAULTS = (
    Fault(id="launcher", what="SIGKILL of the launcher", hosts=(CONTROL,), early=True),
    Fault(id="driver", what="SIGKILL of the batch job's driver", verbs=("batch",), hosts=(HEAD,)),
    Fault(id="agent", what="SIGKILL of the head's agent", verbs=SERVES, hosts=(HEAD,)),
    Fault(id="agent-frozen", what="an agent is frozen for 30 s", verbs=SERVES, harmless=SERVES),
    Fault(
        id="agents-cut",
        what="the agents' connection is cut for 30 s",
        verbs=SERVES,
        hosts=(WORKER,),
        harmless=SERVES,
    ),
    Fault(id="engine", what="SIGKILL of vLLM's engine", verbs=(*SERVES, "batch"), hosts=(HEAD,)),
    Fault(
        id="engine-frozen",
        what="all of vLLM is frozen for 20 s",
        verbs=SERVES,
        hosts=(HEAD,),
        silent=True,
        harmless=SERVES,
    ),
    Fault(id="api", what="SIGKILL of vLLM's API server", verbs=SERVES, hosts=(HEAD,)),
    Fault(id="rank", what="SIGKILL of a worker rank", verbs=(*SERVES, "batch")),
    # Servers of `mp` are beside Ray, not in it.
    Fault(id="raylet", what="SIGKILL of a raylet", harmless=("serve-mp", "serve-dp")),
    Fault(id="gcs", what="SIGKILL of Ray's GCS", hosts=(HEAD,), harmless=("serve-mp", "serve-dp")),
    Fault(id="container", what="SIGKILL of a container's main process"),
    Fault(id="docker-kill", what="`docker kill` of a container", by_hand=True),
    Fault(id="dockerd", what="SIGKILL of dockerd; back after 2 s"),
    Fault(id="sshd", what="SIGKILL of sshd and its sessions; back after 2 s", early=True),
    Fault(id="cut-5s", what="a host's network is cut for 5 s", silent=True),
    Fault(id="cut", what="a host's network is cut for good", lasts=True, silent=True),
    Fault(
        id="one-way",
        what="the worker hears nothing from the head",
        hosts=(WORKER,),
        lasts=True,
        silent=True,
    ),
    Fault(id="disk", what="a disk of the head is full", hosts=(HEAD,), lasts=True, harmless=SERVES),
    Fault(id="memory", what="a host's containers run out of memory"),
    Fault(id="reboot", what="a host reboots (off for 3 s)"),
    Fault(id="ssh-reset", what="SSH connections are reset", early=True),
)
BY_ID = {fault.id: fault for fault in FAULTS}

# The small file system that fills up: the command writes to it at that time.
DISKS = {
    "up": "/var/lib/docker/containers",
    **dict.fromkeys(SERVES, "/root/.vlaunch"),
    "batch": "/data/huggingface/vlaunch",
}
# Faults of servers with vLLM itself: those whose effect the stand-in cannot show.
WITH_VLLM = ("agent", "engine", "engine-frozen", "rank", "container", "cut", "memory", "reboot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of the campaign. Its random choices follow from its fields."""

    fault: str
    verb: str
    seed: int
    engine: str = STAND_IN

    @property
    def key(self) -> tuple[str, str, int, str]:
        """The key of the results."""
        return (self.fault, self.verb, self.seed, self.engine)

    @property
    def host(self) -> str:
        """The faulty host. Seeds alternate, so that two seeds hit both hosts; so do the kinds of
        servers, and their faults.
        """
        hosts = BY_ID[self.fault].hosts
        turn = SERVES.index(self.verb) + list(BY_ID).index(self.fault) if self.verb in SERVES else 0
        return hosts[(self.seed + turn) % len(hosts)]

    @property
    def fraction(self) -> float:
        """The moment of the fault, as a fraction of the command's duration or of the time under
        load.
        """
        return random.Random("/".join(map(str, self.key))).uniform(0.03, 0.97)

    def moment(self, seconds: float) -> float:
        """Return the seconds until the fault, of `seconds` in all."""
        return round(self.fraction * seconds, 3)


def applies(fault: Fault, verb: str, engine: str) -> bool:
    """Return whether the fault has a target: a batch without a model has no engine, and `up` starts
    none.
    """
    if engine == REAL and (verb == "up" or (verb in SERVES and fault.id not in WITH_VLLM)):
        return False
    return verb in fault.verbs and not (
        fault.id == "engine" and verb == "batch" and engine == STAND_IN
    )


def list_cases(
    *,
    verbs: Sequence[str] = VERBS,
    only: Sequence[str] = (),
    seeds: int | None = None,
    engine: str = STAND_IN,
) -> Iterator[Case]:
    """Yield the cases: command by command, every fault once before any is repeated."""
    for verb in verbs:
        for seed in range(1, (SEEDS[verb] if seeds is None else seeds) + 1):
            for fault in FAULTS:
                if applies(fault, verb, engine) and (not only or fault.id in only):
                    yield Case(fault=fault.id, verb=verb, seed=seed, engine=engine)
