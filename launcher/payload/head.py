"""Asks, inside a container, what the launcher wants to know: `vlaunch_agent/head.py` has the
verbs.
"""

import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib"))

from vlaunch_agent.head import main

sys.exit(main())
