"""Training on text: what `dilated-attention train` and `demo` run."""
