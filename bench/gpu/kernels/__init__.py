"""The kernels on the device: answers to the bit, ceilings, sweeps, and times beside those of other libraries.

- setup.py: the process that does the steps
- steps.py: the steps, in the order of what depends on what
- exact.py, graphs.py: whether results are right on the device, and compiled code is what was expected
- engine_step.py, philox.py: all that an engine's step runs around its model, and nothing but noise
- sweeps.py: the fastest launch parameters
- cases.py, measure.py: kernels in their settings, what a user would have otherwise, and times
- tables.py: the tables
- compiled.py: what the code takes on devices that are not there, a program of its own

It needs torch and Triton, and neither vLLM nor numba; libraries that are not installed are named as such.
"""
