"""Push other weights from the trainer's pod, by stream: `python - MODEL`, a file of tensors.

It prints the version, and the instances that have applied it.
"""

import os
import sys
from pathlib import Path

from safetensors.numpy import load_file

from paceline import Client, Tls

ADDRESS = "paceline-gateway.ml.svc.cluster.local:7400"


def main(model: str) -> None:
    """Push the tensors, each half as large again."""
    tls = Tls(ca_file=Path("/tls/ca.crt"), cert_file=Path("/tls/tls.crt"), key_file=Path("/tls/tls.key"))
    tensors = {name: tensor * 1.5 for name, tensor in load_file(model).items()}
    with (
        Client(ADDRESS, token=os.environ["PACELINE_TOKEN"], tls=tls) as client,
        client.run("pushed", seed=7) as run,
    ):
        finished = run.push_weights(tensors)
    applied = sorted(each.instance_id for each in finished.instances if each.applied)
    print(finished.policy_version, *applied)


if __name__ == "__main__":
    main(sys.argv[1])
