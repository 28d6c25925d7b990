"""Other libraries' models with dilated attention: `nn.MultiheadAttention`, and transformers in `huggingface`."""
