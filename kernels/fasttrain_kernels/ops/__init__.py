"""The ops, one file or folder each; fasttrain_kernels has their public functions."""
