"""Context parallelism: dilated attention over a sequence that is sharded contiguously over the ranks of a group."""
