"""Start the probe of `check-nccl`, or the check of an exported pod: that has `-- COMMAND`."""

import sys

import network
import network_gate

if __name__ == "__main__":
    if "--" in sys.argv:
        network_gate.main()
    sys.exit(network.main())
