"""Commands that start, stop, watch, query and measure servers."""
