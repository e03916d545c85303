"""Runs rules: one step and K steps, whole or in blocks; sequences; the chunk plan."""
