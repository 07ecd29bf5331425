"""Static analysis of kernels at training shapes, without a GPU: ours and the baselines, Liger and cut-cross-entropy.

python -m bench.static --target sm_90

cases         ops, shapes and physical limits, and our own calls; liger, cce: the baselines
cache         bytes that pass the L2 of a card
counts        bytes and operations at full size, exactly, from small interpreted runs
survey        one row for each launch: counts, and the metadata of the binary that is compiled for a target
prediction    time, as a band; gpus: what it is computed from
rules         ours against the baselines, and fresh rows against the stored ones
summary       bench/results/static.md
"""
