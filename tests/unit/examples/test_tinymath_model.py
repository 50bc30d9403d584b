"""The committed model folder and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest

import examples.tinymath
from examples.tinymath import tokenizer

FOLDER = Path(examples.tinymath.__file__).parent / "model"


def test_every_character_comes_back() -> None:
    text = tokenizer.BOS + tokenizer.ALPHABET + tokenizer.EOS + tokenizer.PAD
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.BOS_ID
    assert ids[-2:] == [tokenizer.EOS_ID, tokenizer.PAD_ID]
    assert tokenizer.decode(ids) == text
    assert len(set(tokenizer.TOKENS)) == len(tokenizer.TOKENS) <= tokenizer.SIZE


def test_a_foreign_character_is_refused() -> None:
    with pytest.raises(KeyError):
        tokenizer.encode("É")


def test_the_hugging_face_files_agree_with_the_plain_path() -> None:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(FOLDER, local_files_only=True)
    rng = Random(0)
    for _ in range(200):
        text = "".join(rng.choices(tokenizer.TOKENS, k=rng.randrange(1, 60)))
        ids = tokenizer.encode(text)
        assert loaded.encode(text, add_special_tokens=False) == ids
        assert loaded.decode(ids) == text
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (0, 1, 2)


def test_the_folder_is_small_and_whole() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert sum(sizes.values()) <= 10 * 2**20
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(sizes)


def test_the_config_suits_the_engine() -> None:
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert config["head_dim"] == 32
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == tokenizer.SIZE <= 128
    assert config["max_position_embeddings"] >= 1200 + 64
    assert json.loads((FOLDER / "generation_config.json").read_text())["eos_token_id"] == tokenizer.EOS_ID


def test_the_model_prefers_a_true_solution_to_a_false_one() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    grpo = pytest.importorskip("examples.tinymath.grpo")
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER)
    assert 1_000_000 <= model.num_parameters() <= 3_000_000
    prompt = tokenizer.prompt_ids("23+45\n")
    told = ["23+45:3+5=8,2+4=6,>68;#68<eos>", "23+45:3+5=9,2+4=7,>79;#79<eos>"]
    samples = [grpo.GrpoSample("g", prompt, tokenizer.encode(text), [], 0.0) for text in told]
    with torch.no_grad():
        true, false = grpo.response_logprobs(model, samples).view(2, -1).sum(1).tolist()
    assert true > false + 3
