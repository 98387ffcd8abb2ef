"""The probe's answer, read as `HostFacts`."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from typing import Any

from launcher.core import untrusted
from launcher.core.errors import UnreadableAnswer
from launcher.tools import compile_cache, docker_read, gpu_survey, host, survey_read
from launcher.tools.host import Address, Gpu, HostFacts, StateDir
from launcher.tools.parts import MARK, read_parts

_FOLDER = re.compile(r"/(run|run/user/[0-9]+|dev/shm)/vlaunch-[^/]+/[^/]+")


def parse_probe(text: str) -> HostFacts:
    """Read the probe's answer; raises UnreadableAnswer when it is not one."""
    try:
        return _read(text)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        why = f"{error!r:.200}"
        raise UnreadableAnswer(
            f"the node's answer to the probe cannot be read ({why})", evidence=shown(text)
        ) from None


def _read(text: str) -> HostFacts:
    parts = read_parts(text)
    surveyed = "survey" in parts or "clock" not in parts
    if "home" not in parts or "containers" not in parts or not surveyed:
        raise UnreadableAnswer("the node's answer to the probe is incomplete", evidence=shown(text))
    said, good, read = parts.said, parts.good, parts.read
    info = read("info", _info) or {}
    lost = gpu_survey.lost(said("gpus"))
    return HostFacts(
        home=said("home"),
        user=said("user"),
        hostname=said("hostname"),
        addresses=read("addr", _addresses),
        listening=read("listen", _listening),
        disk_free=read("disk", free),
        docker_disk_free=read("dockerdisk", free),
        infiniband=read("infiniband", _words) or (),
        gpus=_gpus(said("gpus")) if lost else read("gpus", _gpus),
        lost_gpus=lost,
        gpu_processes=read("gpuapps", gpu_survey.read_processes),
        amd_renders=read("gpus", _amd_renders),
        files=_digests(said("files")),
        has_directory=good("files") is not None,
        token=_token(said("token").strip()),
        secret_names=_words(said("secrets")),
        certificates=said("certificates"),
        memory=good("memory") or "",
        in_memory=read("kept", _words),
        folders=tuple(line for line in said("folders").splitlines() if _FOLDER.fullmatch(line)),
        docker_version=read("docker", _version),
        runtimes=tuple(sorted((info.get("Runtimes") or {}).keys())),
        log_driver=str(info.get("LoggingDriver") or ""),
        # Its socket names itself; as a program called `docker` its `info` has a form of its own.
        podman='"Podman Engine"' in (good("docker") or "") or ("host" in info and "store" in info),
        security=_security(info),
        state=read("state", _state),
        selinux=read("selinux", _labels),
        toolkit=bool(said("toolkit").strip()),
        images={
            name.removeprefix("image "): read(name, docker_read.parse_image)
            for name in parts
            if name.startswith("image ")
        },
        containers=docker_read.parse_containers(said("containers")),
        given=docker_read.parse_given(said("given")),
        compiled=compile_cache.read(good("compiled")),
        unfinished=host.read_unfinished(good("unfinished")),
        said={name: _words_of(out) for name, (out, code) in parts.items() if code != 0},
        # timeout(1) ends with 124, and with 137 when it had to kill
        late=frozenset(name for name, (_, code) in parts.items() if code in (124, 137)),
        survey=survey_read.read(parts, info),
    )


def shown(text: str) -> str:
    """Return the end of an answer as evidence, without the part that holds the Ray token."""
    head, _, rest = text.partition(f"{MARK} token\n")
    return untrusted.shown(head + rest[rest.find(MARK) :] if MARK in rest else head, last=True)


def _words_of(out: str) -> str:
    """Return what a part that failed said; for a server that it cannot reach, Docker's command line
    prints `null` besides, and a shell says of a part that was ended what its deadline says already.
    """
    return "\n".join(line for line in out.splitlines() if line not in ("null", "Killed"))


def _info(text: str) -> Any:
    """Read `docker info`; nothing where Docker did not answer."""
    return _json(text, "docker info") if text.startswith("{") else {}


def _json(text: str, what: str) -> Any:
    try:
        return untrusted.loads(text)
    except ValueError:
        evidence = untrusted.shown(text)
        raise UnreadableAnswer(f"`{what}` did not answer in JSON", evidence=evidence) from None


def _token(text: str) -> str:
    """Return a token as a header can carry it: from here it goes to all nodes, and is taken out of
    whatever is shown.
    """
    return text if re.fullmatch(r"[\x21-\x7e]{0,4096}", text) else ""


def _version(text: str) -> str | None:
    version = _json(text, "docker version").get("Version") if text.startswith("{") else None
    return None if version is None else str(_of(str, version))


def _security(info: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names in `SecurityOptions`, which are written `name=selinux`, with more behind
    commas.
    """
    options = info.get("SecurityOptions")
    words = [str(each) for each in options] if isinstance(options, list) else []
    return tuple(each.partition(",")[0].removeprefix("name=")[:40] for each in words)


def _state(text: str) -> StateDir:
    word = text.partition("\n")[0]
    return StateDir(writable=word == "writable", read_only=word == "read-only", free=free(text))


def _labels(text: str) -> dict[str, str] | None:
    """Return the SELinux types by path: `system_u:object_r:container_file_t:s0 /data/hf`."""
    enforce, _, rest = text.partition("\n")
    if enforce != "1":
        return None
    rows = (line.partition(" ") for line in rest.splitlines())
    return {path: label.split(":")[2] for label, _, path in rows if label.count(":") >= 2}


def _of(kind: type, value: Any, pattern: str = "(?s:.*)") -> Any:
    """Return a value of the right kind and form; raises TypeError."""
    if type(value) is not kind or not re.fullmatch(pattern, str(value)):
        raise TypeError(f"{value!r:.80} is not what was asked for")
    return value


def _addresses(text: str) -> tuple[Address, ...]:
    return tuple(
        Address(
            interface=_of(str, link["ifname"], r"[^\s/]{1,64}"),  # the kernel's dev_valid_name()
            ip=_ip(info["local"], info["prefixlen"]),
            prefix=_of(int, info["prefixlen"]),
            up="UP" in link.get("flags", ()),
        )
        for link in _json(text, "ip -j addr")
        for info in link.get("addr_info", ())
        if "local" in info
    )


def _listening(text: str) -> frozenset[tuple[str, int]]:
    found = set[tuple[str, int]]()
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 4 and (
            match := re.fullmatch(r"\[?([^\]]*?)\]?(?:%\w+)?:([0-9]{1,5})", words[3][:200])
        ):
            found.add((match[1], int(match[2])))
    return frozenset(found)


def _ip(text: Any, prefix: Any) -> str:
    """Return an address of a network; raises ValueError: checks compare it with others."""
    ipaddress.ip_interface(f"{_of(str, text).split('%')[0]}/{_of(int, prefix)}")
    return str(text)


def free(text: str) -> int:
    """Return the free bytes that `df -Pk` tells; raises UnreadableAnswer."""
    words = text.splitlines()[-1].split()
    if len(words) < 4 or not re.fullmatch("[0-9]{1,18}", words[3]):
        raise UnreadableAnswer("`df` did not answer with a table", evidence=untrusted.shown(text))
    return int(words[3]) * 1024


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _digests(text: str) -> dict[str, str]:
    """Return the digests of files by their names, as sha256sum(1) prints them."""
    rows = (line.partition("  ") for line in text.splitlines())
    return {
        name.removeprefix("./"): digest
        for digest, _, name in rows
        if re.fullmatch(r"[0-9a-f]{64}", digest)
    }


def _amd_renders(text: str) -> tuple[int | None, ...]:
    """Read the files of KFD's topology that are GPUs, each with what it says of its render node."""
    minors = (
        re.search(r"drm_render_minor ([0-9]{1,5})", line)
        for line in text.splitlines()
        if "/kfd/" in line
    )
    return tuple(int(found[1]) if found else None for found in minors)


def _gpus(text: str) -> tuple[Gpu, ...] | None:
    """Read nvidia-smi's table, without what it says of GPUs that are lost; None where there is
    none, as with AMD's GPUs.
    """
    lines = [line for line in text.splitlines() if not gpu_survey.lost(line)]
    if not any("," in line for line in lines):
        return None
    found = []
    for line in lines:
        fields = [each.strip() for each in line.split(",")]
        if len(fields) != 6 or not re.fullmatch("[0-9]{1,4}", fields[0]):
            raise UnreadableAnswer(
                "`nvidia-smi` answered with a line that is not a GPU",
                evidence=untrusted.shown(line),
            )
        # GB10 shares the host's memory and reports `[N/A]` for its own.
        memory = [int(each) if re.fullmatch("[0-9]{1,12}", each) else 0 for each in fields[2:4]]
        found.append(
            Gpu(
                index=int(fields[0]),
                name=fields[1],
                memory_total=memory[0],
                memory_used=memory[1],
                driver=fields[4],
                uuid=fields[5],
            )
        )
    return tuple(found)
