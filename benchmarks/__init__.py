"""Speed and memory of the online gradients beside their alternatives: `python -m benchmarks`."""
