"""Compute plans: `table` chooses a backend; every other module is one way of computing."""
