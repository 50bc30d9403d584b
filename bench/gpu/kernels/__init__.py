"""Measure the kernels on the device: exact answers, ceilings, sweeps, and times compared with other libraries.

- steps.py: the steps, in order of their dependencies
- exact.py: checks that results are right on the device, and that compiled code is as expected
- engine_step.py, philox.py: all kernels that an engine's step runs around its model, and noise alone
- cases.py, measure.py: kernels in their settings, the alternatives of a user, times, and the fastest parameters

It needs torch and Triton, and neither vLLM nor numba. The report names libraries that are not installed.
"""
