"""The `vlaunch` command: command names, lazy loading, and error handling."""
