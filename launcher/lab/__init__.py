"""Lab hosts in network namespaces of this machine, each with its own sshd and Docker."""

NODE_PROGRAMS = {"vlaunch_cpu_ray": "plugin:files"}
