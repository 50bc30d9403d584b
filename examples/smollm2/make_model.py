"""Convert a model in a GGUF file to a folder that transformers and vLLM load; `scripts/real-model` runs this.

The weights are float32, with the values of the 4-bit codes of the file.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig


def store(gguf: Path, folder: Path) -> None:
    """Write config, weights, tokenizer and chat template of a GGUF file to a folder, replacing it as a whole.

    Raises:
        ImportError: the package gguf is not installed.
        OSError: the file cannot be read, or the folder cannot be written.
    """
    read = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # transformers treats the model as quantized and refuses to store it, although its weights are float32.
    del read.config.quantization_config
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    part = folder.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    shutil.rmtree(folder, ignore_errors=True)
    part.rename(folder)


if __name__ == "__main__":
    store(Path(sys.argv[1]), Path(sys.argv[2]))
