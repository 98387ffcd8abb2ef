"""The `vlaunch` command: command names, lazy loading, and error handling."""

COMMANDS = {
    "schema": (290, "the inventory's JSON Schema, for editors"),
    "completion": (300, "shell completion for bash, zsh or fish"),
    "payload": (310, ""),
}
