"""The `vlaunch` command: names of commands, loaded when they are called, and its errors."""

COMMANDS = {
    "schema": (290, "the inventory's JSON Schema, for editors"),
    "completion": (300, "shell completion for bash, zsh or fish"),
    "payload": (310, ""),
}
