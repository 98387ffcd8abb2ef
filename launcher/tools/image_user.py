"""Images whose containers do not run as root, such as vLLM's `-nonroot` ones (UID 2000)."""

from __future__ import annotations

from launcher.core import shell
from launcher.core.domain import Argv
from launcher.tools import docker


def hand_over(
    docker_: Argv, image: str, user: str, secrets: str, *folders: str, cluster: str, node: str
) -> Argv:
    """Let the group of an image's user read the secrets and write the other folders; what is there
    stays the login's.
    """
    places = {f"/handed/{at}": folder for at, folder in enumerate((secrets, *folders))}
    options = ["--network", "none", "--user", "0:0"]
    for place, folder in places.items():
        options += ["--volume", f"{folder}:{place}"]
    words = ("sh", "-c", shell.program("hand_over"), "hand-over", user, *places)
    return docker.throw_away(
        docker_, image, *words, cluster=cluster, node=node, options=tuple(options)
    )
