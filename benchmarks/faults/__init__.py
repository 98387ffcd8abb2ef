"""The fault campaign: each fault at a random moment of each command, on practice hosts of its own,
and what became of it.

    python -m benchmarks.faults [--verb up] [--only FAULT …] [--seeds 3] [--real] [--report]

A run is one line of JSON in the results file; a fault, verb, seed and engine that are in it are not
run again.
"""
