"""Docker, Ray, vLLM and the host: commands for each, and parsers of their output."""
