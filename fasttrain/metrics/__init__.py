"""What a run measures, writes and shows. docs/metrics.md explains the files and every figure."""
