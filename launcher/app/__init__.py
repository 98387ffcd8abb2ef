"""The frame of a command: session, options, plans, lock, audit trail, progress, tables, errors."""
