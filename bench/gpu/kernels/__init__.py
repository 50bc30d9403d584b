"""Measure the kernels on the device: exact answers, ceilings, sweeps, and times compared with other libraries.

- setup.py: the process that carries out the steps
- steps.py: the steps, in order of their dependencies
- exact.py, graphs.py: checks that results are right on the device, and that compiled code is as expected
- engine_step.py, philox.py: all kernels that an engine's step runs around its model, and noise alone
- sweeps.py: the fastest launch parameters
- cases.py, measure.py: kernels in their settings, the alternatives of a user, and times
- tables.py: the tables

It needs torch and Triton, and neither vLLM nor numba. The report names libraries that are not installed.
"""
