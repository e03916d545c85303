"""The program of one step: equations sorted by what they depend on, run forward and linearised."""
