"""Compile cache of a cluster on a node: file system, size and removal."""

import re
import shlex
from dataclasses import dataclass

from launcher.core import shell
from launcher.core.domain import Argv

# Names from findmnt(8) and stat(1). FUSE file systems can be local, but those used for models on
# servers (sshfs, s3fs, GlusterFS, JuiceFS, GCS) are not.
_REMOTE = re.compile(
    r"nfs\d?|cifs|smb\w*|lustre|ceph|beegfs|gpfs|glusterfs|wekafs|panfs|orangefs|pvfs2|afs|9p"
    r"|gfs2?|gfs2/gfs|ocfs2|virtiofs|fuse(?!blk|\.fuse-overlayfs)[\w.-]*"
)
_PART = "compiled"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileCache:
    """Compile cache of a cluster on a node.

    `kind` is the type of its file system; `size` is in bytes, `None` if it does not exist yet.
    """

    kind: str
    size: int | None = None

    @property
    def remote(self) -> bool:
        """True on a network or shared file system."""
        return _REMOTE.fullmatch(self.kind) is not None


def query_script(cache_dir: str | None, cluster: str) -> str:
    """Return the shell code that queries the cache, for `host.probe(extra_script=…)`; without
    `cache_dir` the cache is below the state directory.
    """
    folder = '"$state/cache/$cluster"'
    if cache_dir is not None:
        folder = shlex.quote(f"{cache_dir}/{cluster}")
    program = shell.program_text("compile_cache")
    return f"sh_c {_PART} {shlex.quote(program)} {folder}\n"


def parse_cache(text: str | None) -> CompileCache | None:
    """Parse the output of `query_script`; None if it did not run or failed."""
    match = re.fullmatch(
        r"([\w./-]{1,40}|UNKNOWN \(0x[0-9a-f]{1,16}\))(?:\n(\d{1,15}))?", text or ""
    )
    if match is None:
        return None
    return CompileCache(kind=match[1], size=int(match[2]) * 1024 if match[2] else None)


def purge(docker: Argv, folder: str, *, parent: str, image: str) -> Argv:
    """Remove the cache, and `parent` if it is empty then; `image` is on the node, or empty."""
    program = shell.program_text("compile_cache_purge")
    return ("sh", "-c", program, "purge", folder, parent, image, *docker)
