"""Driver of a batch job; runs inside the cluster."""
