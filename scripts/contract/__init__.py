"""Check of `launcher/upstream/` against the source of the programs: `make contract`."""
