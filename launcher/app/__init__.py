"""The frame of a command: session, options, lock, audit trail, progress, tables and errors."""
