"""Measure Paceline in the first minutes on a GPU: one program with one time budget, most valuable parts first.

- __main__.py: options
- sizes.py, plan.py: what is measured, and in which order
- running.py: calls that resume an interrupted run, and the processes that carry out the steps
- device.py, engines/, kernels/: the orders of those processes
- report.py: the tables
- device_table.py: converts a run into a device table for the simulator
"""
