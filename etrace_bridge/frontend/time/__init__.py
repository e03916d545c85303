"""Time in a torch `forward`: which axis is time, what is state, what one step computes. See
`split.find_step`.
"""
