"""Hugging Face checkpoints: their configuration, names of tensors, loading and export."""
