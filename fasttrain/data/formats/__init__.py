"""Datasets of nanoGPT, llm.c, modded-nanogpt and Megatron, read where they are and recognised by their content."""
