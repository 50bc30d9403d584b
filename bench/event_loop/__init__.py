"""Cost of the gRPC event loop of an instance to the thread that steps the engine.

- instance.py: an instance as it is, with a socket over which rounds are begun and ended
- turns.py: times of the engine thread, turn by turn, and of all other threads
- loads.py: samples without a client, and by a gateway's batch and Generate streams
- boundary.py: what the same would cost across a process boundary
- figures.py: ratios and parts
"""
