# The agent's name inside containers.
from launcher.agent import api as api
from launcher.agent import submissions as submissions
