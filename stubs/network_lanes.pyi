from launcher.network.probe.network_lanes import *
