"""The EAGLE-3 head and its training. Uses torch and transformers, but neither gRPC, Redis nor vLLM.

- head.py: the EAGLE-3 head, tensor for tensor as in a checkpoint
- target.py: the target model: features of its layers, and the distribution to learn
- unroll.py: training-time test, which runs the head on its own features as the draft loop will
- learner.py: the updates
- evaluation.py: acceptance of the head's drafts on finished samples
- data.py: samples and reports, the only part that the service itself imports
"""
