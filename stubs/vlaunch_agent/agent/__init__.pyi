# The agent's name inside containers.
