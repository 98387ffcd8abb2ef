"""The same cluster for other programs: Kubernetes, Prometheus, firewalls."""

COMMANDS = {"export": (270, "for other programs: firewalls, Prometheus, Kubernetes")}

EXTENSIONS = {"batch": "pod_options:batch_flags"}
