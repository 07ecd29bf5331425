"""Datasets of other programs, read where they are, without conversion: nanoGPT, llm.c, modded-nanogpt and Megatron.

What they are is recognised by their content. What they do not say is `Described`.
"""
