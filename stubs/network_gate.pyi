from launcher.network.probe.network_gate import *
