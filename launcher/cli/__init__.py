"""The `vlaunch` command: command names, lazy loading, and error handling."""

COMMANDS = {
    "schema": (62, "Print the JSON Schema of inventories or jobs"),
    "completion": (63, "Print shell completion"),
    "payload": (70, ""),
}
