"""The engines: tokens, step times, idle time, graphs, waits, and what drafts cost.

- setup.py: the engines, to be built in processes of their own
- model.py: models of random weights
- driving.py: samples through an engine, and marks on the device around each of its steps
- orders.py: what is measured
- tables.py: the tables
"""
