"""Commands for hosts before they form a cluster: `check` and `init`."""
