"""The checks of nodes, with the fix of each finding."""
