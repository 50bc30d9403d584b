"""Measure the engines: tokens, step times, idle time, graphs, waits, and the cost of drafts.

- setup.py: the engines, each built in a separate process, and models with random weights
- driving.py: runs samples through an engine, with marks on the device around each of its steps
- orders.py: the measurements
- replay.py: batches whose tokens are given
"""
