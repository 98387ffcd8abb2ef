"""Known failures of clusters: their log lines, causes and fixes, in a data file per layer.

`vlaunch doctor`, `up`, `serve`, the checks and the driver of batch jobs use the same entries;
docs/reference/failures.md is generated from them.
"""
