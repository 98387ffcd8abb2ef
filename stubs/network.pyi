from launcher.network.probe.network import *
