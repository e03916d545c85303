"""The program of one step.

Its equations sorted by what they depend on, run forward and linearised.
"""
