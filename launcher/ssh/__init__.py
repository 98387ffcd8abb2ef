"""Commands on nodes through SSH, or on this machine, and their answers."""
