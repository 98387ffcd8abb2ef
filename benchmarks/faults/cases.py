"""Which fault is tried on which command, where and when: pure, and the same for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# A server by the backend `ray`, by `mp`, and two replicas of one behind one endpoint (`mp`).
SERVES = ("serve", "serve-mp", "serve-dp")
VERBS = ("up", *SERVES, "batch")
SEEDS = {"up": 3, **dict.fromkeys(SERVES, 1), "batch": 2}
STAND_IN, REAL = "stand-in", "real"
CONTROL, HEAD, WORKER = "control", "node1", "node2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind of fault.

    It may last until somebody heals it; an `early` one meets a server's start, not its service.

    With `silent` ones nothing dies: packets vanish, which only a deadline can tell from work that
    takes its time. After one `by_hand` a server stays down until somebody says `up` and `serve`.
    What is `harmless` to the servers of a command may keep requests waiting, and must not end them.
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

# Which small file system fills up: where the command writes at that time.
DISKS = {
    "up": "/var/lib/docker/containers",
    **dict.fromkeys(SERVES, "/root/.vlaunch"),
    "batch": "/data/huggingface/vlaunch",
}
# The faults that servers with vLLM itself meet: those that reach what the stand-in only stands for.
WITH_VLLM = ("agent", "engine", "engine-frozen", "rank", "container", "cut", "memory", "reboot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of the campaign. All that is random in it follows from its own words."""

    fault: str
    verb: str
    seed: int
    engine: str = STAND_IN

    @property
    def key(self) -> tuple[str, str, int, str]:
        """What tells it from every other one."""
        return (self.fault, self.verb, self.seed, self.engine)

    @property
    def host(self) -> str:
        """Which host it meets: seeds take turns, so that two meet both; so do the kinds of servers,
        and their faults.
        """
        hosts = BY_ID[self.fault].hosts
        turn = SERVES.index(self.verb) + list(BY_ID).index(self.fault) if self.verb in SERVES else 0
        return hosts[(self.seed + turn) % len(hosts)]

    @property
    def fraction(self) -> float:
        """At which part of the command's known duration, or of the time under load, it happens."""
        return random.Random("/".join(map(str, self.key))).uniform(0.03, 0.97)

    def moment(self, seconds: float) -> float:
        """After how many of so many seconds it happens."""
        return round(self.fraction * seconds, 3)


def applies(fault: Fault, verb: str, engine: str) -> bool:
    """Tell whether there is anything to break: a batch without a model has no engine, and `up`
    starts none.
    """
    if engine == REAL and (verb == "up" or (verb in SERVES and fault.id not in WITH_VLLM)):
        return False
    return verb in fault.verbs and not (
        fault.id == "engine" and verb == "batch" and engine == STAND_IN
    )


def campaign(
    *,
    verbs: Sequence[str] = VERBS,
    only: Sequence[str] = (),
    seeds: int | None = None,
    engine: str = STAND_IN,
) -> Iterator[Case]:
    """Yield the runs: command by command, and every fault once before any is tried again."""
    for verb in verbs:
        for seed in range(1, (SEEDS[verb] if seeds is None else seeds) + 1):
            for fault in FAULTS:
                if applies(fault, verb, engine) and (not only or fault.id in only):
                    yield Case(fault=fault.id, verb=verb, seed=seed, engine=engine)
