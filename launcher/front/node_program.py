"""Program on a front's node: change the map of keys, and query HAProxy through its socket.

Its text is sent as `python3 -c`, into the node's container. Arguments: the folder of the front, the
path of the map in HAProxy's container, and a command: `add DIGEST LINE`, `revoke NAME`, or
`status`, which prints the keys and HAProxy's answers as JSON.
"""

import fcntl
import json
import os
import re
import socket
import sys


def main(folder: str, haproxy_map: str, command: str, *arguments: str) -> None:
    """Run one command; exits with 1 and a message for keys that exist or do not."""
    path = os.path.join(folder, "keys.map")
    with open(os.path.join(folder, ".keys.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(path) as file:
            keys = dict(line.split(None, 1) for line in file.read().splitlines() if " " in line)
        if command == "status":
            queries = {name: query(folder, f"show {name}") for name in ("info", "stat")}
            print(json.dumps({"keys": keys, **queries}))
            return
        name = arguments[-1].partition(":")[0]
        old = [digest for digest, line in keys.items() if line.partition(":")[0] == name]
        if command == "add":
            if old:
                sys.exit(f"{name} already has a key")
            keys[arguments[0]] = arguments[1]
            change = f"add map {haproxy_map} {arguments[0]} {arguments[1]}"
        else:
            if not old:
                sys.exit(f"{name} has no key")
            del keys[old[0]]
            change = f"del map {haproxy_map} {old[0]}"
        # The file first: a front that starts meanwhile reads the new keys.
        descriptor = os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            file.writelines(f"{digest} {line}\n" for digest, line in keys.items())
            os.fchown(descriptor, os.stat(path).st_uid, os.stat(path).st_gid)
            file.flush()
            os.fsync(descriptor)
        os.replace(f"{path}.new", path)
        # Workers before a reload still answer on connections that stay open.
        workers = (query(folder, "show proc", "master.sock") or "").partition("# old workers")[2]
        for pid in re.findall(r"^(\d+) ", workers.partition("# programs")[0], re.MULTILINE):
            query(folder, f"@!{pid} {change}", "master.sock")
        if reply := (query(folder, change) or "").strip():
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
