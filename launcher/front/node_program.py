"""Program on a front's node: change the map of keys, and query HAProxy through its socket.

Its text is sent as `python3 -c`, as root beside the front's container. Arguments: the folder of the
front, the path of the map in HAProxy's container, and a command: `add DIGEST LINE`, `revoke NAME
DIGEST…`, or `status`, which prints the map and HAProxy's answers as JSON. Both changes may be
repeated. A revoked key stays in the map as a comment, so that no other node's map brings it back.
"""

import fcntl
import json
import os
import re
import socket
import sys

REVOKED = "# revoked "


def main(folder: str, haproxy_map: str, command: str, *arguments: str) -> None:
    """Run one command; exits with 1 and a message if HAProxy did not change its keys."""
    path = os.path.join(folder, "keys.map")
    with open(os.path.join(folder, ".keys.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(path) as file:
            lines = dict.fromkeys(file.read().splitlines())
        if command == "status":
            queries = {name: query(folder, f"show {name}") for name in ("info", "stat")}
            print(json.dumps({"keys": "".join(f"{line}\n" for line in lines), **queries}))
            return
        if command == "add":
            digest, value = arguments
            lines[f"{digest} {value}"] = None
            changes = [f"del map {haproxy_map} {digest}", f"add map {haproxy_map} {digest} {value}"]
        else:
            named = (line.split(" ")[0] for line in lines if f" {arguments[0]}:" in line)
            gone = dict.fromkeys((*named, *arguments[1:]))
            lines = {line: None for line in lines if line.split(" ")[0] not in gone}
            lines |= {REVOKED + digest: None for digest in gone}
            changes = [f"del map {haproxy_map} {digest}" for digest in gone]
        # The file first: a front that starts meanwhile reads the new keys.
        descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            file.writelines(f"{line}\n" for line in lines)
            os.fchown(descriptor, os.stat(path).st_uid, os.stat(path).st_gid)
            file.flush()
            os.fsync(descriptor)
        os.replace(f"{path}.new", path)
        # Workers before a reload still answer on connections that stay open.
        workers = (query(folder, "show proc", "master.sock") or "").partition("# old workers")[2]
        pids = re.findall(r"^(\d+) ", workers.partition("# programs")[0], re.MULTILINE)
        for change in changes:
            for pid in pids:
                query(folder, f"@!{pid} {change}", "master.sock")
            reply = (query(folder, change) or "").strip()
            if reply not in ("", "Key not found."):
                sys.exit(f"HAProxy did not change its keys: {reply}")


def query(folder: str, command: str, name: str = "haproxy.sock") -> "str | None":
    """Return HAProxy's answer; None if it does not run."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(5)
        # Relative: the path of a socket has at most 107 characters.
        os.chdir(folder)
        try:
            client.connect(name)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        client.sendall(f"{command}\n".encode())
        client.shutdown(socket.SHUT_WR)  # the master waits for more commands
        with client.makefile() as answer:
            return answer.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
