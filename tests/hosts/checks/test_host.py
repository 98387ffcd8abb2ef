"""SSH login, clock, disks, shared memory, and effects of a logout or a reboot."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from launcher.app import certificates as issue_certificates
from launcher.hosts.check import Evidence
from launcher.hosts.checks.catalogue import run_checks
from launcher.hosts.checks.host import object_store_size
from launcher.tools.compile_cache import CompileCache
from launcher.tools.host import StateDir
from tests.containers import container
from tests.hosts.checks.conftest import Good, Load, first
from tests.hosts.checks.spoiled import (
    MODEL,
    NODES,
    ROCE,
    Case,
    facts,
    findings,
    named,
    stays_unknown,
    turns_red,
)

HOSTS = ROCE + "\nshm: host"
GB = 10**9
GIB = 1024**3
BIG = {"model.safetensors": 800 * GIB}

CASES = (
    Case(
        id="ssh",
        red={"gpu03": "fail"},
        text="cannot be reached: Connection refused",
        fix="`ssh -p 2222 ops@gpu03 true`",
        own={"gpu03": ", ssh: {user: ops, port: 2222}"},
        evidence={
            "facts": {name: facts(name) for name in NODES[:2]},
            "missing": {"gpu03": "Connection refused"},
        },
    ),
    Case(
        id="sudo",
        red={"gpu02": "fail"},
        text="`ops` needs a password to run `sudo -n docker`",
        fix="NOPASSWD",
        extra="docker: [sudo, -n, docker]\n" + ROCE,
        facts={
            "gpu02": {
                "docker_version": None,
                "part_errors": {"docker": "sudo: a password is required"},
            }
        },
    ),
    Case(
        id="time-skew",
        red={"gpu02": "warn"},
        text="its clock is 5 s ahead of the other nodes'",
        fix="timedatectl set-ntp true",
        survey={"gpu02": {"skew": 5.1}},
    ),
    Case(
        id="time-skew",
        red={"gpu01": "fail"},
        text="its clock is 100 s behind",
        fix="on gpu01",
        survey={"gpu01": {"skew": -99.9}},
    ),
    Case(
        id="time-skew",
        red={"": "warn"},
        text="this machine's clock is 60 s behind the nodes'",
        fix="this machine's clock",
        survey={"*": {"skew": 60.0}},
    ),
    Case(
        id="time-sync",
        red={"gpu03": "warn"},
        text="no time daemon synchronizes its clock",
        fix="set-ntp true` on gpu03",
        survey={"gpu03": {"synced": False}},
    ),
    Case(
        id="remove-ipc",
        red={"gpu02": "warn"},
        text="RemoveIPC=yes: when `ops` logs out",
        fix="sudo loginctl enable-linger ops",
        survey={"gpu02": {"linger": False}},
        extra=HOSTS,
    ),
    Case(
        id="next-boot",
        red={"gpu01": "warn"},
        text="the next kernel, 6.11.0-9, has no nvidia module",
        fix="dkms autoinstall -k 6.11.0-9",
        survey={"gpu01": {"next_kernel_has_driver": False, "next_kernel": "6.11.0-9"}},
    ),
    Case(
        id="shm",
        red={"gpu02": "fail"},
        text="Ray's object store of 9.3 GiB does not fit: the host's /dev/shm has 0.1 GiB",
        fix="object_store: 75MiB",
        survey={"gpu02": {"shm": 64 << 20, "shm_free": 64 << 20}},
        extra=HOSTS,
    ),
    Case(
        id="shm",
        red={"gpu02": "fail"},
        text="1.0 GiB of it free",
        fix="mount -o remount",
        survey={"gpu02": {"shm_free": 1 << 30}},
        extra=HOSTS,
    ),
    Case(
        id="shm",
        red={"gpu02": "fail"},
        text="the container's /dev/shm, half of the memory, has 1.0 GiB",
        fix="object_store: 512MiB}` in the inventory, or enlarge /dev/shm: set a size for `shm:`",
        survey={"gpu02": {"memory": 2 << 30}},
        extra=ROCE + "\nray: {object_store: 2GiB}",
    ),
    Case(
        id="shm",
        red=dict.fromkeys(NODES, "fail"),
        text="`shm:` has 1.0 GiB",
        fix="raise `shm:`",
        extra=ROCE + "\nshm: 1GiB",
    ),
    Case(
        id="disk",
        red={"gpu02": "fail"},
        text="4.0 GiB free under /data, 5 GiB needed",
        fix="set `hf_home:` to a larger disk",
        facts={"gpu02": {"disk_free": 4 * GIB}},
    ),
    Case(
        id="disk",
        red={"gpu02": "fail"},
        text="29.0 GiB free in Docker's data directory, 30 GiB needed to pull the image",
        fix="`docker image prune -a`",
        facts={"gpu02": {"docker_disk_free": 29 * GIB, "images": {}}},
    ),
    Case(
        id="disk",
        red={"gpu03": "fail"},
        text="4.0 GiB free in Docker's data directory, 5 GiB needed",
        fix="`data-root`",
        facts={"gpu03": {"docker_disk_free": 4 * GIB}},
    ),
    Case(
        id="disk",
        red={"gpu03": "fail"},
        text="500.0 GiB free under /data, 805 GiB needed for the model",
        fix="larger disk",
        facts={"gpu03": {"disk_free": 500 * GIB}},
        files={"gpu01": BIG, "gpu02": BIG, "gpu03": None},
        also=("model",),
    ),
    Case(
        id="cache-dir",
        red={"gpu02": "warn"},
        text="would be on nfs4, a network file system",
        fix="set `cache_dir:` of gpu02",
        facts={"gpu02": {"compile_cache": CompileCache(kind="nfs4", size=GIB)}},
    ),
)

UNKNOWN = (
    (
        Case(
            id="sudo",
            red={},
            text="",
            fix="",
            extra="docker: [sudo, -n, docker]\n" + ROCE,
            facts={"gpu02": {"docker_version": None, "timed_out_parts": frozenset({"docker"})}},
        ),
        "sudo timed out",
    ),
    (
        Case(id="time-skew", red={}, text="", fix="", survey={"gpu01": {"skew": None}}),
        "its clock could not be read",
    ),
    (
        Case(id="time-sync", red={}, text="", fix="", survey={"gpu01": {"synced": None}}),
        "no time daemon",
    ),
    (
        Case(
            id="remove-ipc",
            red={},
            text="",
            fix="",
            survey={"gpu01": {"remove_ipc": None}},
            extra=HOSTS,
        ),
        "is unknown",
    ),
    (
        Case(
            id="next-boot",
            red={},
            text="",
            fix="",
            survey={"gpu01": {"next_kernel_has_driver": None}},
        ),
        "is unknown",
    ),
    (
        Case(id="shm", red={}, text="", fix="", survey={"gpu01": {"shm": None}}, extra=HOSTS),
        "size of /dev/shm is unknown",
    ),
    (
        Case(id="shm", red={}, text="", fix="", survey={"gpu01": {"memory": None}}),
        "memory is unknown",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_fault_fails_its_check_only(case: Case) -> None:
    """On the affected node, with text and fix."""
    turns_red(case)


def test_a_node_reports_its_ssh_user() -> None:
    """The text for folding."""
    assert {finding.text for finding in findings(Case(id="ssh", red={}, text="", fix=""))} == {
        "answers, as ops"
    }


@pytest.mark.parametrize(("case", "reason"), UNKNOWN, ids=named)
def test_unknown_values_are_skipped_with_the_reason(case: Case, reason: str) -> None:
    """They never pass."""
    stays_unknown(case, reason)


@pytest.mark.parametrize("spared", [{"uid": 0}, {"remove_ipc": False}, {"linger": True}])
def test_users_that_keep_shared_memory_at_logout(spared: dict[str, object]) -> None:
    """Root and other system users, lingering users, and hosts with RemoveIPC=no."""
    case = Case(
        id="remove-ipc",
        red={},
        text="",
        fix="",
        survey={"*": {"linger": False, **spared}},
        extra=HOSTS,
    )

    assert {finding.status for finding in findings(case)} == {"pass"}


@pytest.mark.parametrize("survey", [{"remove_ipc": None}, {"uid": None}])
def test_private_shared_memory_survives_a_logout(
    survey: dict[str, object],
) -> None:
    """logind's settings do not matter then."""
    judged = findings(Case(id="remove-ipc", red={}, text="", fix="", survey={"*": survey}))

    assert {(finding.status, finding.text) for finding in judged} == {
        ("pass", "the containers have their own shared memory")
    }


@pytest.mark.parametrize(
    ("expected", "memory", "shm", "store"),
    [
        (4 * GB, 100 * GB, 50 * GB, 4 * GB),
        (None, 100 * GB, 50 * GB, 30 * GB),
        (None, 1000 * GB, 1000 * GB, 200 * GB),
        (None, 1000 * GB, 100 * GB, 95 * GB),
        (None, 1000 * GB, 1 * GB, 10 * GB),
        (None, 10 * GB, 1 * GB, 3 * GB),
    ],
)
def test_the_object_store_has_rays_size(
    expected: int | None, memory: int, shm: int, store: int
) -> None:
    """Three tenths of memory, limited by 200 GB and by shared memory, but not below 10 GB."""
    assert object_store_size(expected, memory, shm) == store


def test_an_object_store_that_fits_is_reported_with_its_sizes() -> None:
    """The text for folding."""
    case = Case(
        id="shm", red={}, text="", fix="", extra=ROCE + "\nshm: 8GiB\nray: {object_store: 4GiB}"
    )

    assert findings(case)[0].text == "/dev/shm of 8.0 GiB fits Ray's object store of 4.0 GiB"


@pytest.mark.parametrize(
    ("changed", "files", "text"),
    [
        (
            {},
            BIG,
            (
                "the image is on this node, more than 1 TiB free under /data; the model is on this"
                " node"
            ),
        ),
        (
            {"images": {}},
            None,
            (
                "room for the image (30 GiB), more than 1 TiB free under /data; the model's size is"
                " unknown"
            ),
        ),
        (
            {"disk_free": 6 * GIB},
            None,
            (
                "the image is on this node, more than 5 GiB free under /data; the model's size is"
                " unknown"
            ),
        ),
    ],
)
def test_a_pass_claims_only_verified_facts(
    changed: dict[str, object], files: dict[str, int] | None, text: str
) -> None:
    """A model on no node may have any size."""
    judged = findings(
        Case(
            id="disk",
            red={},
            text="",
            fix="",
            facts={"*": changed},
            files=dict.fromkeys(NODES, files),
        )
    )

    assert {(finding.status, finding.text) for finding in judged} == {("pass", text)}


@pytest.mark.parametrize(
    ("compiled", "status", "text"),
    [
        (CompileCache(kind="xfs"), "pass", "xfs, nothing compiled yet"),
        (CompileCache(kind="xfs", size=5 * GIB // 2), "pass", "xfs, 2.5 GiB compiled"),
        (None, "skip", "the file system of `cache_dir` is unknown"),
    ],
)
def test_the_compile_cache_is_reported_with_its_size(
    compiled: CompileCache | None, status: str, text: str
) -> None:
    """And skipped if unknown."""
    case = Case(id="cache-dir", red={}, text="", fix="", facts={"*": {"compile_cache": compiled}})

    assert {(finding.status, finding.text) for finding in findings(case)} == {(status, text)}


def test_a_cluster_of_cpus_needs_less() -> None:
    """Its image has no CUDA libraries."""
    facts = {"disk_free": 2 * GIB, "docker_disk_free": 4 * GIB, "images": {}}
    judged = findings(
        Case(id="disk", red={}, text="", fix="", extra="accelerator: cpu", facts={"*": facts})
    )

    assert {finding.status for finding in judged} == {"pass"}


def test_a_node_that_runs_the_cluster_pulls_nothing() -> None:
    """Its containers use a derived image, which may have another name."""
    facts = {"docker_disk_free": 6 * GIB, "images": {}, "containers": (container(),)}

    assert (
        findings(Case(id="disk", red={}, text="", fix="", facts={"gpu01": facts}))[0].status
        == "pass"
    )


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"disk_free": None}, "`df` did not answer"),
        ({"docker_disk_free": None, "images": {}}, "Docker's data directory is"),
    ],
)
def test_unknown_free_space_is_skipped(changed: dict[str, object], reason: str) -> None:
    """It never passes."""
    finding = findings(Case(id="disk", red={}, text="", fix="", facts={"gpu01": changed}))[0]

    assert finding.status == "skip"
    assert reason in finding.text


def test_a_model_that_is_a_path_is_not_counted() -> None:
    """It may be on another disk."""
    case = Case(
        id="disk",
        red={},
        text="",
        fix="",
        facts={"gpu03": {"disk_free": 500 * GIB}},
        files={"gpu01": BIG, "gpu02": BIG, "gpu03": None},
        evidence={"model": f"/models/{MODEL}"},
    )

    assert [finding.status for finding in findings(case)] == ["pass"] * 3


def test_certificates_get_a_warning_a_month_before_they_expire(load: Load, good: Good) -> None:
    """There is one finding for the cluster, because `up` renews all of them."""
    inventory = load()
    at = datetime(2027, 3, 1, tzinfo=timezone.utc)
    authority, nodes = issue_certificates.issue_certificates(inventory, at)
    (own, *_) = (pair.reveal().partition("-----BEGIN PRIVATE")[0] for pair in nodes.values())
    end = at + timedelta(days=5 * 365)

    def check(text: str, days: int) -> tuple[str, str, str]:
        facts = {inventory.head.name: good(certificates=text)}
        now = end - timedelta(days=days)
        (judged,) = run_checks(
            Evidence(inventory=inventory, facts=facts, now=now), ["certificates"]
        )
        (finding,) = (finding for finding in judged.findings if not finding.node)
        return finding.status, finding.text, finding.fix

    fix = "run `vlaunch up`, which renews them and restarts nothing"
    assert check(authority + own, 31) == ("pass", "valid until 2032-02-28", "")
    for days in (30, 0, -9):
        assert check(authority + own, days) == ("warn", "the first one expires on 2032-02-28", fix)
    assert check("", 31)[:2] == ("skip", "no certificates: the cluster is not up")


@pytest.mark.parametrize(
    ("days", "status", "text"),
    [
        (31, "skip", ""),
        (30, "warn", "the front's certificate expires on 2032-02-28"),
        (0, "fail", "the front's certificate expired on 2032-02-28"),
    ],
)
def test_the_fronts_certificate_is_judged_too(
    days: int, status: str, text: str, load: Load, good: Good
) -> None:
    """Its clients reject an expired one."""
    inventory = load("front: {}")
    end = datetime(2032, 2, 28, tzinfo=timezone.utc)
    pem = issue_certificates.Authority("c", end).certificate
    facts = {inventory.head.name: good(front_certificate=pem)}
    now = end - timedelta(days=days)
    (judged,) = run_checks(Evidence(inventory=inventory, facts=facts, now=now), ["certificates"])

    assert judged.status == status
    assert text in "".join(finding.text for finding in judged.findings)


@pytest.mark.parametrize(
    ("state", "status", "text"),
    [
        (StateDir(writable=True, read_only=False, free=64 << 20), "pass", "is writable"),
        (
            StateDir(writable=True, read_only=False, free=1 << 20),
            "fail",
            "1 MiB free for /srv/v/c, 64 MiB needed",
        ),
        (
            StateDir(writable=False, read_only=True, free=1 << 40),
            "fail",
            "/srv/v/c is on a read-only file system",
        ),
        (
            StateDir(writable=False, read_only=False, free=1 << 40),
            "fail",
            "`ops` cannot write to /srv/v/c",
        ),
        (None, "skip", "could not be checked"),
    ],
)
def test_the_state_directory_must_be_usable(
    state: StateDir | None, status: str, text: str, load: Load, good: Good
) -> None:
    """Space, permission and file system; the fix is another directory."""
    finding = first("state-dir", load, good(state=state), "state_dir: /srv/v")

    assert (finding.status, text in finding.text) == (status, True), finding
    assert ("`state_dir:`" in finding.fix) is (status == "fail")
