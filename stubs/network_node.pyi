from launcher.network.probe.network_node import *
