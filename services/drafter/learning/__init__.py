"""The drafter's model and how it learns; torch and transformers, no gRPC, no Redis, no vLLM.

- head.py: the EAGLE-3 head, tensor for tensor what a checkpoint holds
- target.py: the policy: features and the distribution to learn
- unroll.py: training-time test: the head run on its own features as the draft loop will run it
- learner.py: the updates; evaluation.py: how far its drafts are accepted
"""
