"""The containers of a cluster and Ray in them: `up`, `down`, `secrets`."""
