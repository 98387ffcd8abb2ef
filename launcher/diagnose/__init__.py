"""Causes of faults and their evidence: `doctor`, `logs`, `collect`."""
