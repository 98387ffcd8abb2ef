from launcher.agent.health import api as api
