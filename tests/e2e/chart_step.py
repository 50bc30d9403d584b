"""Generate a step in the trainer's pod and print a checksum of its tokens: `python - RUN LONGEST SEED`.

It prints a line for each sample that arrives. When the first does, most of the others are far from their end.
"""

import hashlib
import os
import sys
from pathlib import Path

from paceline import Client, Group, SamplingParams, Tls

ADDRESS = "paceline-gateway.ml.svc.cluster.local:7400"
PROMPTS, SAMPLES = 8, 4


def main(run_id: str, longest: int, seed: int) -> None:
    """Print what the step gave: a checksum, and the instances that generated it."""
    tls = Tls(ca_file=Path("/tls/ca.crt"), cert_file=Path("/tls/tls.crt"), key_file=Path("/tls/tls.key"))
    lengths = [SamplingParams(max_tokens=16 if i == 0 else longest, ignore_eos=True) for i in range(PROMPTS)]
    groups = [Group(f"p{i}", [3 + i % 10, 4, 5 + i % 7], SAMPLES, lengths[i]) for i in range(PROMPTS)]
    tokens: dict[tuple[str, int], list[int]] = {}
    instances = set()
    with (
        Client(ADDRESS, token=os.environ["PACELINE_TOKEN"], tls=tls) as client,
        client.run(run_id, seed=seed) as run,
    ):
        for sample in run.rollout(0, groups, lengths[1]):
            print("arrived", sample.prompt_id, sample.slot, flush=True)
            tokens[sample.prompt_id, sample.slot] = list(map(int, sample.token_ids))
            instances.update(span.instance_id for span in sample.provenance.instance_spans)
    assert len(tokens) == PROMPTS * SAMPLES, f"{len(tokens)} samples came"
    print(hashlib.sha256(repr(sorted(tokens.items())).encode()).hexdigest(), *sorted(instances))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
