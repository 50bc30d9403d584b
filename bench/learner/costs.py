"""Costs of teaching a head for a policy of 70B, computed: nothing here is measured.

The learner needs of each token the features of three layers and the last output, from which it computes the
distribution. It gets them by a second forward pass of the policy, or the engine stores them as it generates.
"""

from __future__ import annotations

from bench.learner.replay import UPDATE_TOKENS
from services.simulator.device_tables import H100, LLAMA_70B, decoding_table

_LAYERS, _HIDDEN, _VOCABULARY, _BYTES = 3, 8192, 128_256, 2
_DEVICES = 8
"""That hold the policy."""
STEP_TOKENS = 100_000 * 4_000
"""Tokens of a step of 100,000 samples of 4,000."""
_SAMPLES, _CONTEXT = 256, 4_000
"""Of an instance."""
_TOP_K = 20


def computed() -> dict[str, float]:
    """Return the figures, in bytes and seconds."""
    token = (_LAYERS + 1) * _HIDDEN * _BYTES
    weights = 2 * LLAMA_70B.weights
    step = decoding_table("70B", LLAMA_70B, H100, _DEVICES).seconds(_SAMPLES, _SAMPLES, _SAMPLES * _CONTEXT)
    pass_seconds = 2 * LLAMA_70B.weights * UPDATE_TOKENS / (_DEVICES * H100.compute)
    return {
        "stored_bytes_a_token": token,
        "stored_bytes_an_update": token * UPDATE_TOKENS,
        "stored_bytes_a_step": token * STEP_TOKENS,
        "instance_bytes_a_second": token * _SAMPLES / step,
        "second_pass_seconds_an_update": pass_seconds,
        "second_pass_devices": _DEVICES,
        "weights_bytes_a_version": weights,
        "stored_tokens_as_large_as_weights": weights / token,
        "logits_bytes_a_token": _VOCABULARY * _BYTES,
        "top_k_bytes_a_token": _TOP_K * (4 + _BYTES),
    }
