from launcher.distribute.tls import *
