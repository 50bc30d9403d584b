"""First minutes on a GPU: one program with one budget, whose parts are done in the order of what they are worth.

- __main__.py: options
- sizes.py, plan.py: what is measured, and in which order
- running.py, state.py, host.py: calls that go on where the last one stopped, and the processes that do the steps
- device.py, engines/, kernels/: the orders of those processes
- report.py, markdown.py: the tables
- device_table.py: what a run found, as a table for the simulator
- pack/: vLLM and its packages, to be brought to a machine without them
"""
