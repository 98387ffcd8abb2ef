"""The same cluster for other programs: Kubernetes, Prometheus, firewalls."""
