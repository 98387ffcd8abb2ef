from launcher.network.probe.network_rank import *
