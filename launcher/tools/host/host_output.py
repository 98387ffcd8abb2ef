"""Parser for the output of the probe."""

import ipaddress
import re
from collections.abc import Mapping
from typing import Any

from launcher.core import untrusted
from launcher.core.errors import UnreadableAnswer
from launcher.tools import compile_cache, host
from launcher.tools.docker import Image, docker_output
from launcher.tools.host import Address, Gpu, HostFacts, StateDir, gpu_survey, survey_output
from launcher.tools.host.parts import MARK, Parts, parse_parts

_FOLDER = re.compile(r"/(run|run/user/[0-9]+|dev/shm)/vlaunch-[^/]+/[^/]+")


def parse_probe(text: str) -> HostFacts:
    """Parse the output of the probe; raises UnreadableAnswer."""
    try:
        return _parse_facts(text)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        reason = f"{error!r:.200}"
        raise UnreadableAnswer(
            f"the node's answer to the probe cannot be read ({reason})",
            evidence=evidence_without_token(text),
        ) from None


def _parse_facts(text: str) -> HostFacts:
    parts = parse_parts(text)
    surveyed = "survey" in parts or "clock" not in parts
    if "home" not in parts or "containers" not in parts or not surveyed:
        raise UnreadableAnswer(
            "the node's answer to the probe is incomplete", evidence=evidence_without_token(text)
        )
    output, output_if_ok, parse = parts.output, parts.output_if_ok, parts.parse
    info = parse("info", _parse_info) or {}
    lost = gpu_survey.parse_lost_gpus(output("gpus"))
    return HostFacts(
        home=output("home"),
        state_base=output("base"),
        user=output("user"),
        hostname=output("hostname"),
        addresses=parse("addr", _parse_addresses),
        listening=parse("listen", _parse_listening),
        disk_free=parse("disk", parse_free_bytes),
        docker_disk_free=parse("dockerdisk", parse_free_bytes),
        infiniband=parse("infiniband", _parse_names) or (),
        gpus=_parse_gpus(output("gpus")) if lost else parse("gpus", _parse_gpus),
        lost_gpus=lost,
        gpu_processes=parse("gpuapps", gpu_survey.parse_processes),
        amd_renders=parse("gpus", _parse_amd_renders),
        files=_parse_digests(output("files")),
        has_directory=output_if_ok("files") is not None,
        token=_parse_token(output("token").strip()),
        secret_names=_parse_names(output("secrets")),
        certificates=output("certificates"),
        front_certificate=output("front"),
        memory_dir=output_if_ok("memory") or "",
        secrets_in_memory=parse("kept", _parse_names),
        folders=tuple(line for line in output("folders").splitlines() if _FOLDER.fullmatch(line)),
        docker_version=parse("docker", _parse_version),
        runtimes=tuple(sorted((info.get("Runtimes") or {}).keys())),
        log_driver=str(info.get("LoggingDriver") or ""),
        podman=_is_podman(info, output_if_ok("docker") or ""),
        security=_security_options(info),
        state=parse("state", _parse_state_dir),
        selinux=parse("selinux", _parse_labels),
        toolkit=bool(output("toolkit").strip()),
        images=_parse_images(parts),
        containers=docker_output.parse_containers(output("containers")),
        gpu_allocations=docker_output.parse_gpu_allocations(output("given")),
        compile_cache=compile_cache.parse_cache(output_if_ok("compiled")),
        unfinished=host.parse_unfinished(output_if_ok("unfinished")),
        part_errors={name: _error_text(out) for name, (out, code) in parts.items() if code != 0},
        # timeout(1) exits with 124, or with 137 after SIGKILL
        timed_out_parts=frozenset(name for name, (_, code) in parts.items() if code in (124, 137)),
        survey=survey_output.parse_survey(parts, info),
    )


def _is_podman(info: dict[str, Any], version: str) -> bool:
    # Podman's socket reports its name; its `docker` command has another format of `info`.
    return '"Podman Engine"' in version or ("host" in info and "store" in info)


def _parse_images(parts: Parts) -> dict[str, Image | None]:
    """Return the queried images by name; None for one that the node lacks."""
    names = [name for name in parts if name.startswith("image ")]
    return {
        name.removeprefix("image "): parts.parse(name, docker_output.parse_image) for name in names
    }


def evidence_without_token(text: str) -> str:
    """Return the end of an output as evidence, without the part that contains the Ray token."""
    head, _, rest = text.partition(f"{MARK} token\n")
    return untrusted.excerpt(head + rest[rest.find(MARK) :] if MARK in rest else head, last=True)


def _error_text(out: str) -> str:
    """Return the message of a failed part, without Docker's `null` for an unreachable daemon and
    the shell's `Killed` after a timeout.
    """
    return "\n".join(line for line in out.splitlines() if line not in ("null", "Killed"))


def _parse_info(text: str) -> Any:
    """Parse `docker info`; empty if Docker did not answer."""
    return _parse_json(text, "docker info") if text.startswith("{") else {}


def _parse_json(text: str, command: str) -> Any:
    try:
        return untrusted.loads(text)
    except ValueError:
        evidence = untrusted.excerpt(text)
        raise UnreadableAnswer(f"`{command}` did not print JSON", evidence=evidence) from None


def _parse_token(text: str) -> str:
    """Return the token if it is valid in an HTTP header, else an empty string."""
    return text if re.fullmatch(r"[\x21-\x7e]{0,4096}", text) else ""


def _parse_version(text: str) -> str | None:
    version = _parse_json(text, "docker version").get("Version") if text.startswith("{") else None
    return None if version is None else str(_checked_value(str, version))


def _security_options(info: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names in `SecurityOptions`, such as `selinux` from `name=selinux,…`."""
    options = info.get("SecurityOptions")
    entries = [str(entry) for entry in options] if isinstance(options, list) else []
    return tuple(entry.partition(",")[0].removeprefix("name=")[:40] for entry in entries)


def _parse_state_dir(text: str) -> StateDir:
    access = text.partition("\n")[0]
    return StateDir(
        writable=access == "writable", read_only=access == "read-only", free=parse_free_bytes(text)
    )


def _parse_labels(text: str) -> dict[str, str] | None:
    """Parse the SELinux types by path: `system_u:object_r:container_file_t:s0 /data/hf`."""
    enforce, _, rest = text.partition("\n")
    if enforce != "1":
        return None
    rows = (line.partition(" ") for line in rest.splitlines())
    return {path: label.split(":")[2] for label, _, path in rows if label.count(":") >= 2}


def _checked_value(kind: type, value: Any, pattern: str = "(?s:.*)") -> Any:
    """Return a value of the right type that matches the pattern; else raise TypeError."""
    if type(value) is not kind or not re.fullmatch(pattern, str(value)):
        raise TypeError(f"{value!r:.80} is not a valid value")
    return value


def _parse_addresses(text: str) -> tuple[Address, ...]:
    return tuple(
        Address(
            interface=_checked_value(
                str, link["ifname"], r"[^\s/]{1,64}"
            ),  # the kernel's dev_valid_name()
            ip=_parse_ip(info["local"], info["prefixlen"]),
            prefix=_checked_value(int, info["prefixlen"]),
            up="UP" in link.get("flags", ()),
        )
        for link in _parse_json(text, "ip -j addr")
        for info in link.get("addr_info", ())
        if "local" in info
    )


def _parse_listening(text: str) -> frozenset[tuple[str, int]]:
    sockets = set[tuple[str, int]]()
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 4 and (
            match := re.fullmatch(r"\[?([^\]]*?)\]?(?:%\w+)?:([0-9]{1,5})", fields[3][:200])
        ):
            sockets.add((match[1], int(match[2])))
    return frozenset(sockets)


def _parse_ip(text: Any, prefix: Any) -> str:
    """Return a valid address; else raise ValueError, because checks compare addresses."""
    ipaddress.ip_interface(
        f"{_checked_value(str, text).split('%')[0]}/{_checked_value(int, prefix)}"
    )
    return str(text)


def parse_free_bytes(text: str) -> int:
    """Parse the free bytes in the output of `df -Pk`; raises UnreadableAnswer."""
    fields = text.splitlines()[-1].split()
    if len(fields) < 4 or not re.fullmatch("[0-9]{1,18}", fields[3]):
        raise UnreadableAnswer("`df` did not print a table", evidence=untrusted.excerpt(text))
    return int(fields[3]) * 1024


def _parse_names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _parse_digests(text: str) -> dict[str, str]:
    """Parse the output of sha256sum(1) into digests by file name."""
    rows = (line.partition("  ") for line in text.splitlines())
    return {
        name.removeprefix("./"): digest
        for digest, _, name in rows
        if re.fullmatch(r"[0-9a-f]{64}", digest)
    }


def _parse_amd_renders(text: str) -> tuple[int | None, ...]:
    """Parse the minor numbers of render nodes from KFD's topology, one per GPU."""
    minors = (
        re.search(r"drm_render_minor ([0-9]{1,5})", line)
        for line in text.splitlines()
        if "/kfd/" in line
    )
    return tuple(int(match[1]) if match else None for match in minors)


def _parse_gpus(text: str) -> tuple[Gpu, ...] | None:
    """Parse nvidia-smi's table, without lost GPUs; None without a table, as for AMD GPUs."""
    lines = [line for line in text.splitlines() if not gpu_survey.parse_lost_gpus(line)]
    if not any("," in line for line in lines):
        return None
    gpus = []
    for line in lines:
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != 6 or not re.fullmatch("[0-9]{1,4}", fields[0]):
            raise UnreadableAnswer(
                "`nvidia-smi` printed a line that is not a GPU",
                evidence=untrusted.excerpt(line),
            )
        # GB10 shares the host's memory and reports `[N/A]` for its own.
        memory = [int(size) if re.fullmatch("[0-9]{1,12}", size) else 0 for size in fields[2:4]]
        gpus.append(
            Gpu(
                index=int(fields[0]),
                name=fields[1],
                memory_total=memory[0],
                memory_used=memory[1],
                driver=fields[4],
                uuid=fields[5],
            )
        )
    return tuple(gpus)
