"""A plan as an equivalent shell script: the output of `--dry-run`."""

import shlex
from collections.abc import Sequence

from launcher.core.domain import Inventory, Node
from launcher.core.plan import Plan, Stage, split_waves
from launcher.core.sizes import format_count
from launcher.core.transport import Command
from launcher.core.untrusted import single_line
from launcher.tools import containers, ray
from launcher.tools.shipped import node_files
from launcher.tools.site import Site


def render_script(inventory: Inventory, plans: Sequence[Plan]) -> str:
    """Render plans as bash.

    Secrets are named by their source, never by value; `on NODE argv…` is the command that the run
    sends.
    """
    nodes = format_count(len(inventory.nodes), "node")
    lines = [
        "#!/usr/bin/env bash",
        (
            f"# vlaunch {plans[0].verb}: cluster {inventory.cluster}, {nodes},"
            f" from {single_line(inventory.path.name)}"
        ),
        (
            "# Each `on NODE …` is one command of the run. The run also sets a deadline for it,"
            " here and on the node."
        ),
        "set -euo pipefail",
        "{  # read completely before it starts, so that it can be piped into bash",
        "",
        "# Quotes each word for any POSIX shell, in any locale; `%q` of printf does not.",
        """quoted() { local q="'"; for word; do printf "'%s' " "${word//$q/$q\\\\$q$q}"; done; }""",
        "",
        "on() {",
        "  local node=$1; shift",
        "  case $node in",
        *(f"    {shlex.quote(node.name)}) {_connect_argv(node)} ;;" for node in inventory.nodes),
        "  esac",
        "}",
        "",
        "# Waits for all background jobs; a failed one ends the script.",
        'all() { local job; for job in $(jobs -p); do wait "$job"; done; }',
        *_render_token(inventory, plans),
        *_render_certificates(inventory, plans),
    ]
    for plan in plans:
        lines += [f"# note: {line}" for note in plan.notes for line in note.splitlines()]
        for stage in plan.stages:
            lines += _render_stage(stage)
    lines += ["", "exit", "} </dev/null"]
    return "\n".join(lines) + "\n"


def _render_stage(stage: Stage) -> list[str]:
    lines = ["", f"# == {stage.title}"]
    for wave in split_waves(stage.steps):
        jobs = [_render_step(step.command) for step in wave]
        lines += [*(f"{job} &" for job in jobs), "all"] if len(jobs) > 1 else jobs
    return [*lines, *(f"# gate {gate.id}: {gate.what}" for gate in stage.gates)]


def _render_token(inventory: Inventory, plans: Sequence[Plan]) -> list[str]:
    """Render the source of the Ray token: a running head keeps it, a new one gets a new one."""
    writes = [
        step.command
        for plan in plans
        for step in plan.steps
        if ray.TOKEN in step.command.shown_stdin
    ]
    if not writes:
        return []
    head = inventory.head
    if any(command.node == head.name for command in writes):
        comment = (
            "The run uses the head's token, or creates one; hashes in container labels include it."
        )
        source = "openssl rand -hex 32"
    else:
        comment = "The head keeps running, and its token is the cluster's."
        path = f"{containers.SECRETS}/{ray.TOKEN}"
        source = shlex.join(
            ("on", head.name, *Site(inventory).in_container(head, ("cat", path)).argv)
        )
    return ["", f"# {comment}", f': "${{RAY_AUTH_TOKEN:=$({source})}}"']


# Equivalent of launcher/app/certificates.py for OpenSSL 3. The authority's key is in a temporary
# file, which the script removes after the last signature.
_ISSUE = r"""
# The run issues the agents' certificates in memory. Here, the authority's key is in a temporary
# folder, and removed after the last signature.
certificates=$(mktemp -d)
trap 'rm -rf "$certificates"' EXIT
signer=()
issue() {
  local file=$certificates/$1 name=$2; shift 2
  openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out "$file.key"
  openssl req -x509 -new -key "$file.key" ${signer[@]+"${signer[@]}"} -days 1825 -out "$file.pem" \
    -subj "/O=CLUSTER/CN=$name" -config <(printf '%s\n' '[req]' distinguished_name=name \
    x509_extensions=more '[name]' '[more]' "$@")
}
issue .ca vlaunch basicConstraints=critical,CA:TRUE,pathlen:0 keyUsage=critical,keyCertSign \
  subjectKeyIdentifier=hash
signer=(-CA "$certificates"/.ca.pem -CAkey "$certificates"/.ca.key)
node() {
  issue "$1" "$1" basicConstraints=critical,CA:FALSE keyUsage=critical,digitalSignature \
    extendedKeyUsage=serverAuth,clientAuth authorityKeyIdentifier=keyid \
    subjectAltName=DNS:"$1",IP:"$2"
  cat "$certificates/$1.key" >>"$certificates/$1.pem"
}
"""


def _render_certificates(inventory: Inventory, plans: Sequence[Plan]) -> list[str]:
    """Render the issue of the agents' certificates, if the plans write them."""
    steps = (step for plan in plans for step in plan.steps)
    if not any(step.command.shown_stdin.startswith(node_files.ISSUED) for step in steps):
        return []
    issue = _ISSUE.replace("CLUSTER", inventory.cluster).splitlines()
    issued = [shlex.join(("node", node.name, node.ip)) for node in inventory.nodes]
    return [*issue, *issued, 'rm "$certificates"/.ca.key']


def _render_step(command: Command) -> str:
    sent = shlex.join(("on", command.node, *command.argv))
    return f"{command.shown_stdin} | {sent}" if command.shown_stdin else sent


def _connect_argv(node: Node) -> str:
    if node.connection == "local":
        return '"$@"'
    options = [
        *(("-p", str(node.ssh.port)) if node.ssh.port else ()),
        *(("-i", node.ssh.identity) if node.ssh.identity else ()),
        *(("-J", node.ssh.jump) if node.ssh.jump else ()),
        *(("-o", f"UserKnownHostsFile={node.ssh.known_hosts}") if node.ssh.known_hosts else ()),
    ]
    login = f"{node.ssh.user}@{node.host}" if node.ssh.user else node.host
    return f'ssh {shlex.join((*options, login))} "$(quoted "$@")"'
