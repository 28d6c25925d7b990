"""Measurements: suites of cases, what they cost against dense attention in the same run, and where the time goes."""
