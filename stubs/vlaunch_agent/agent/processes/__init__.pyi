from launcher.agent.processes import submissions as submissions
