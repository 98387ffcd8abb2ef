"""Which TP × PP, and why: from the GPUs of the cluster and, when it can be read, the model's configuration."""
