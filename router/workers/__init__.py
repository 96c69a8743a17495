"""What the router knows of each worker: its last status, what was assigned since, its state.

Pure: no I/O, no clock. The lowest room; all others may import all of it.
"""
