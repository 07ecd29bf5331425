"""Attention with grouped heads, packed documents, sliding windows and softcap.

Read in this order: reference (the specification), intervals (the idea), triton_forward and triton_backward, blocked
(the CPU implementation in torch), cpp (the one in C++), capabilities (which of them runs), vendors (those that are not
ours), op (the public functions).
"""
