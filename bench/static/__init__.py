"""What kernels ask of a GPU at training shapes, without a GPU: ours beside Liger's and cut-cross-entropy's.

python -m bench.static --target sm_90

cases         ops, shapes and physical limits, and our own calls; liger, cut: the same ops of others
cache         bytes that pass the last cache of a card
counts        bytes and operations at full size, exactly, from small interpreted runs
survey        one row for each launch: counts, and the facts of the binary that is compiled for a target
prediction    time, as a band; gpus: what it is computed from
rules         ours against theirs, and fresh rows against the stored ones
"""
