"""Parsers for the output of the docker command line."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from launcher.core import untrusted
from launcher.core.errors import UnreadableAnswer
from launcher.tools.docker import NODE, ROLE, SPEC, Container, GpuAllocation, Image


def parse_containers(text: str) -> tuple[Container, ...]:
    """Parse `docker inspect` of containers; raises UnreadableAnswer."""
    with _parsing("docker inspect", text):
        return tuple(_container(item) for item in _json_objects(text))


def parse_gpu_allocations(text: str) -> tuple[GpuAllocation, ...]:
    """Parse one line `["/NAME", "CLUSTER", DEVICE REQUESTS]` per container; raises
    UnreadableAnswer.
    """
    with _parsing("docker inspect", text):
        return tuple(
            _gpu_allocation(*untrusted.loads(line))
            for line in text.splitlines()
            if line.startswith("[")
        )


def parse_image(text: str) -> Image | None:
    """Parse `docker image inspect`; `None` if there is no such image; raises UnreadableAnswer."""
    with _parsing("docker image inspect", text):
        return next((_image(item) for item in _json_objects(text)), None)


def parse_images(text: str) -> tuple[Image, ...]:
    """Parse `docker image inspect` of several images; raises UnreadableAnswer."""
    with _parsing("docker image inspect", text):
        return tuple(_image(item) for item in _json_objects(text))


@contextmanager
def _parsing(command: str, text: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        raise UnreadableAnswer(
            f"`{command}` printed output that cannot be parsed", evidence=untrusted.excerpt(text)
        ) from None


def _image(item: dict[str, Any]) -> Image:
    config: dict[str, Any] = {} if item.get("Config") is None else item["Config"]
    content = [item.get("RootFS"), item.get("Architecture")]
    content += [
        config.get(key) or None for key in ("Env", "Entrypoint", "Cmd", "User", "WorkingDir")
    ]
    return Image(
        id=_text(item["Id"]),
        identity=hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest(),
        digests=_texts(item.get("RepoDigests")),
        architecture=_text(item.get("Architecture", "")),
        labels=_labels(config),
        env=_env(config),
        user=_text(config.get("User") or ""),
        names=tuple(tag for tag in item.get("RepoTags") or () if isinstance(tag, str)),
        layers=_texts(dict(item.get("RootFS") or {}).get("Layers")),
        size=int(item.get("Size") or 0),
    )


def _container(item: dict[str, Any]) -> Container:
    config, state = item["Config"], item["State"]
    host = dict(item.get("HostConfig") or {})
    labels = _labels(config)
    return Container(
        name=_text(item["Name"]).lstrip("/"),
        id=_text(item["Id"]),
        role=labels.get(ROLE, ""),
        node=labels.get(NODE, ""),
        image=_text(config.get("Image", "")),
        status=_text(state.get("Status", "unknown")),
        spec=labels.get(SPEC, ""),
        exit_code=int(state.get("ExitCode", 0)),
        restarts=int(item.get("RestartCount", 0)),
        env=_env(config),
        labels=labels,
        error=_text(state.get("Error", "")),
        argv=_texts(config.get("Cmd")),
        started=_text(state.get("StartedAt", "")),
        privileged=host.get("Privileged") is True,
        log_driver=_text(dict(host.get("LogConfig") or {}).get("Type", "")),
    )


def _gpu_allocation(name: Any, cluster: Any, requests: Any) -> GpuAllocation:
    # https://docs.docker.com/reference/api/engine/: HostConfig.DeviceRequests
    gpu_requests = [request for request in requests or () if _requests_gpus(request)]
    return GpuAllocation(
        container=_text(name).lstrip("/"),
        cluster=_text(cluster),
        count=next((int(request["Count"]) for request in gpu_requests if request.get("Count")), 0),
        ids=tuple(
            device_id for request in gpu_requests for device_id in _texts(request.get("DeviceIDs"))
        ),
    )


def _requests_gpus(request: dict[str, Any]) -> bool:
    return any("gpu" in _texts(capabilities) for capabilities in request.get("Capabilities") or ())


def _env(config: Mapping[str, Any]) -> dict[str, str]:
    pairs = (pair.partition("=") for pair in _texts(config.get("Env")))
    return {name: value for name, _, value in pairs}


def _labels(config: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): _text(value) for name, value in dict(config.get("Labels") or {}).items()}


def _json_objects(text: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = untrusted.loads(text) if text.strip() else []
    if not isinstance(items, list):
        raise TypeError("not a list")
    return items


def _text(value: object) -> str:
    """Return the value if it is text that can be an argument of a command; else raise TypeError."""
    if not isinstance(value, str) or "\0" in value:
        raise TypeError(f"not text: {value!r:.80}")
    return value


def _texts(values: object) -> tuple[str, ...]:
    if not isinstance(values, (list, type(None))):
        raise TypeError(f"not a list: {values!r:.80}")
    return tuple(_text(value) for value in values or ())
