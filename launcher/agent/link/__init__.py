"""Orders and reports between the agents of a cluster, and answers to the launcher."""
