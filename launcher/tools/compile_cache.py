"""What engines compile on a node: where it lies, how large it is, how it is removed."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from launcher.core import shell
from launcher.core.domain import Argv

# Of Linux, as findmnt(8) and stat(1) call them. A FUSE file system may be local, but what keeps
# models that way on servers (sshfs, s3fs, GlusterFS, JuiceFS, GCS) is not.
_REMOTE = re.compile(
    r"nfs\d?|cifs|smb\w*|lustre|ceph|beegfs|gpfs|glusterfs|wekafs|panfs|orangefs|pvfs2|afs|9p"
    r"|gfs2?|gfs2/gfs|ocfs2|virtiofs|fuse(?!blk|\.fuse-overlayfs)[\w.-]*"
)
_PART = "compiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCache:
    """The folder of compiled code of a cluster on a node.

    `kind` is its file system's; `size` is in bytes, `None` where there is no such folder yet.
    """

    kind: str
    size: int | None = None

    @property
    def remote(self) -> bool:
        """True when its file system is another machine's, or shared with others."""
        return _REMOTE.fullmatch(self.kind) is not None


def script(cache_dir: str | None, cluster: str) -> str:
    """Return the shell that asks for it, to run behind the probe (`host.probe(more=…)`); without a
    `cache_dir` it is below the state directory.
    """
    folder = '"$state/cache/$cluster"'
    if cache_dir is not None:
        folder = shlex.quote(f"{cache_dir}/{cluster}")
    program = shell.program("compile_cache")
    return f"sh_c {_PART} {shlex.quote(program)} {folder}\n"


def read(text: str | None) -> CompileCache | None:
    """Read its answer; None where it was not asked, or gave none."""
    found = re.fullmatch(
        r"([\w./-]{1,40}|UNKNOWN \(0x[0-9a-f]{1,16}\))(?:\n(\d{1,15}))?", text or ""
    )
    if found is None:
        return None
    return CompileCache(kind=found[1], size=int(found[2]) * 1024 if found[2] else None)


def purge(docker: Argv, folder: str, *, around: str, image: str) -> Argv:
    """Remove the folder, and `around` when nothing else is left in it; `image` is one that is on
    the node, where there is any.
    """
    program = shell.program("compile_cache_purge")
    return ("sh", "-c", program, "purge", folder, around, image, *docker)
