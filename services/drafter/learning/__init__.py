"""The EAGLE-3 head and its training. Uses torch and transformers, but neither gRPC, Redis nor vLLM.

learner.py is the entry: updates, evaluation and checkpoints of a head. data.py, with samples, settings and reports,
is the only part that the service itself imports; it does not need torch.
"""
