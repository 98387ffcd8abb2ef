from launcher.network.probe.network_links import *
