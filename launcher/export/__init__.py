"""The same cluster for other programs: Kubernetes, Prometheus, firewalls."""

COMMANDS = {"export": (55, "Generate Kubernetes, Prometheus and firewall files")}
