"""Practice hosts in network namespaces of this machine, with their own sshd and Docker."""
