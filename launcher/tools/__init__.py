"""Docker, Ray, vLLM and the host: commands for each, and parsers of their output.

`site/` has what is known of a cluster, `shipped/` what is sent to its nodes.
"""
