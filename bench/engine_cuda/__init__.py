"""First minutes of the engines on a GPU: tokens, step times, idle time, graphs, waits, and what the rest costs.

- __main__.py: options, and slices that go on where the last one stopped
- plan.py: the steps, in order
- kinds.py, host.py: the engines, each in a process of its own, and the process that asks it
- driving.py, watch.py: samples through an engine, and marks on the device around each of its steps
- orders.py, device_orders.py: what is measured, with an engine and without one
- report.py: the tables
"""
