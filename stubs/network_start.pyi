from launcher.network.probe.network_start import *
