"""Everything that is to be known about a GPU: `python -m benchmarks.gpu.run`."""
