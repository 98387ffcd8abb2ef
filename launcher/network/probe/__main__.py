"""Start the probe of `check-nccl`, or the check of an exported pod: that has `-- COMMAND`."""

import sys

import network
import network_gate

if __name__ == "__main__":
    sys.exit(network_gate.main() if "--" in sys.argv else network.main())
