"""The first hour on a GPU as one program: answers to the bit, ceilings, sweeps, and the table.

- plan.py: the steps, in order
- exact.py, graphs.py: whether results are right on the device, and compiled code is what was expected
- engine_step.py: all that an engine's step runs around its model, in one graph and without waiting
- sweeps.py: the fastest launch parameters
- cases.py, rivals.py, measure.py: kernels in their settings, what a user would have otherwise, and times
- state.py, worker.py: steps that are done, and the process that does them
- report.py: the table

It needs torch and Triton, and neither vLLM, numba nor pytest; rivals that are not installed are named as such.
"""
