from launcher.core.tls import *
