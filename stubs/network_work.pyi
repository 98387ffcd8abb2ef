from launcher.network.probe.network_work import *
