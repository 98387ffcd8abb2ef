"""The `vlaunch` command: names of commands, loaded when they are called, and its errors."""
