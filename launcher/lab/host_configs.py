"""Contents of the configuration files of a lab cluster."""

import json

from launcher.lab import devices, front_image, gpu_image, image
from launcher.lab.gpu_models import PLAINLY
from launcher.lab.layout import HF_HOME, Host, Lab

MODEL = f"{HF_HOME}/tiny-llama"
RAY = "2.60.0"


def etc_files(lab: Lab, host: Host) -> dict[str, str]:
    """Return the contents of a host's own files below `/etc`, by path."""
    return {
        "hostname": f"{host.name}\n",
        "hosts": _hosts(lab),
        "passwd": _ACCOUNTS,
        "group": _GROUPS,
        "shadow": "".join(
            f"{line.split(':')[0]}:*:19000:0:99999:7:::\n" for line in _ACCOUNTS.splitlines()
        ),
        "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files\n",
        "resolv.conf": "# lab hosts reach each other only\n",
        "sudoers": _SUDOERS,
        "ssh/sshd_config": _SSHD,
        "docker/daemon.json": json.dumps(_docker(lab, host), indent=2) + "\n",
    }


def _hosts(lab: Lab) -> str:
    lines = [
        "127.0.0.1 localhost",
        "::1 localhost ip6-localhost",
        *(f"{host.ip} {host.name}" for host in lab.hosts),
    ]
    return "\n".join(lines) + "\n"


def _docker(lab: Lab, host: Host) -> dict[str, object]:
    """Return dockerd's settings: host networking only, without a bridge or packet filter."""
    return {
        "bridge": "none",
        "iptables": False,
        "ip6tables": False,
        "userland-proxy": False,
        "cgroup-parent": f"/{lab.name}/{host.name}",
        "exec-opts": ["native.cgroupdriver=cgroupfs"],
    }


# `ops` cannot use the Docker socket, to test `docker: [sudo, -n, docker]` in an inventory.
_SUDOERS = """\
root ALL=(ALL:ALL) ALL
ops ALL=(root) NOPASSWD: /usr/bin/docker, /usr/local/bin/docker
"""

_ACCOUNTS = """\
root:x:0:0:root:/root:/bin/bash
sshd:x:105:65534::/run/sshd:/usr/sbin/nologin
ops:x:1000:1000:operator:/home/ops:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""

_GROUPS = """\
root:x:0:
tty:x:5:
utmp:x:43:
docker:x:999:
ops:x:1000:
nogroup:x:65534:
"""

# UsePAM needs a full PAM configuration; without it, accounts with `*` in shadow still accept keys.
_SSHD = """\
HostKey /etc/ssh/ssh_host_ed25519_key
PidFile none
UsePAM no
UseDNS no
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
AuthorizedKeysFile .ssh/authorized_keys
MaxStartups 200
MaxSessions 200
PrintMotd no
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
"""


def known_hosts(lab: Lab, keys: dict[str, str]) -> str:
    """Return a known_hosts file; `keys` has the public keys by host name."""
    return "".join(
        f"{host.ip},{host.name} {' '.join(keys[host.name].split()[:2])}\n" for host in lab.hosts
    )


def inventory(lab: Lab) -> str:
    """Return the inventory of the lab cluster."""
    simulated = lab.accelerator != "cpu"
    slots = PLAINLY if simulated else "`gpus` below are slots that Ray counts, not devices"
    nodes = "\n".join(
        f"  - {{name: {host.name}, host: {host.ip}, ip: {host.ip}, gpus: {lab.gpus}}}"
        for host in lab.hosts
    )
    # JSON strings are valid YAML strings, also for paths with spaces or colons.
    identity, host_keys, model = (
        json.dumps(str(path)) for path in (lab.identity, lab.known_hosts, MODEL)
    )
    hca = ", ".join(devices.rdma_devices(lab)[: lab.gpus])
    rdma = f", fabric: {lab.rdma}, hca: [{hca}]" if lab.rdma else ""
    return f"""\
# The lab cluster `{lab.name}`; written by `vlaunch lab up`, which overwrites it.
cluster: lab
image: {gpu_image.NAME if simulated else image.NAME}
accelerator: {lab.accelerator.ljust(20)} # {slots}
ray: {{version: "{RAY}", object_store: 200MB}}
front: {{image: {front_image.NAME}}} # one address for all servers
ssh: {{user: root, identity: {identity}, known_hosts: {host_keys}}}
hf_home: {HF_HOME}
network: {{interface: eth0{rdma}}}
env:
  HF_HUB_OFFLINE: "1"             # the hosts reach each other only
  OMP_NUM_THREADS: "1"
  VLLM_CPU_OMP_THREADS_BIND: nobind
  RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S: "0"
engine_args:
  dtype: float32
  max_model_len: 512
  max_num_seqs: 8
  kv_cache_memory_bytes: 67108864
  # Pipeline stages on a CPU need this compilation mode, which needs no compiler in the image;
  # `enforce_eager` fails at the first request.
  compilation_config: {{mode: 2, backend: eager}}
serve:
  model: {model}
nodes:
{nodes}
"""
