"""The fault campaign: each fault at a random moment of each command, on lab hosts of its own.

    python -m benchmarks.faults [--verb up] [--only FAULT …] [--seeds 3] [--real] [--report]

A run is one line of JSON in the results file. A combination of fault, verb, seed and engine in that
file is not run again.
"""
