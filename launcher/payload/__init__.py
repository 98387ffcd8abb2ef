"""What runs inside the containers.

The launcher imports from here only shapes and rules: `agent.desired`, `agent.cause`.
"""
