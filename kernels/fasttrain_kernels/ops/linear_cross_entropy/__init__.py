"""The output head's matmul and its cross entropy, without ever holding all logits.

    y      = hidden @ weight.T                      or softcap * tanh(that / softcap)
    lse    = log sum_v exp(y_v)
    loss   = lse - (1 - s) * y_target - s * mean_v(y_v) + z_loss * lse^2             s: label_smoothing
    dy_v   = (1 + 2 * z_loss * lse) * exp(y_v - lse) - s / V - (1 - s) * [v == target]
    dhidden = dlogits @ weight,  dweight = dlogits.T @ hidden

The logits of a training step are larger than anything else in it: 2 * M * V bytes in bf16, and eager PyTorch holds
them, their float32 log-softmax and their gradient at once. Here a chunk of tokens at a time has its logits computed,
turned into their gradient in place, and multiplied into dhidden and dweight, all in forward. What is held between
forward and backward is the two gradients. The matmuls are BLAS, 6 * M * H * V FLOP as in eager; the rest is one kernel
per chunk.

M tokens, H hidden size, V vocabulary.

    reference.py  the specification
    kernels.py    chunk of logits -> loss, lse, gradient: the Triton kernel; launch.py launches it
    cpu.py        its CPU implementation
    chunks.py     the chunk rule: how many tokens have their logits in memory at a time
    chunked.py    the chunked forward, with its matmuls
    op.py         torch ops, gradients, and the public functions
"""
