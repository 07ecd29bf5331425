"""The host side of a CUDA run, on a machine without a GPU: stub libraries in the place of CUDA's (README.md)."""
