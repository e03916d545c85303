"""Published experiments, run again with every rule: `python -m benchmarks.reproduce`, see
docs/reproduce.md.
"""
