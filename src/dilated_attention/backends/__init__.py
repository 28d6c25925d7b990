"""Compute plans: `table` lists the backends and chooses one; the other modules are the backends and what they share."""
