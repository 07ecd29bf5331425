"""Which tokens a step trains on. docs/data.md explains the files, the order, and how a batch is made."""
