"""vLLM's own way from the body of a request to the ids of its prompts, without an engine."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parents[2] / "examples/tinymath/model"
BEGIN = "<|begin|>"


def byte_ids(folder: Path, template: str) -> Path:
    """Write a tokenizer with an id for each byte, so that ids are equal only if texts are; return its folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BEGIN, special=True)])
    # A token that `add_special_tokens` adds: a template writes it itself.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, len(letters))]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN)
    fast.chat_template = template
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder)
    return folder


@cache
def _configuration() -> Any:
    from vllm.config import ModelConfig, VllmConfig

    # No prompt is too long.
    model = ModelConfig(model=str(MODEL), hf_overrides={"max_position_embeddings": 1 << 20})
    return VllmConfig(model_config=model)


@cache
def _renderer(folder: Path) -> Any:
    from transformers import AutoTokenizer
    from vllm.renderers.hf import HfRenderer
    from vllm.tokenizers.hf import get_cached_tokenizer

    return HfRenderer(_configuration(), get_cached_tokenizer(AutoTokenizer.from_pretrained(folder)))


class VllmChat:
    """vLLM's renderer of one tokenizer."""

    def __init__(self, folder: Path, template: str | None = None) -> None:
        """`template` replaces that of the folder, as the server's option --chat-template does."""
        from vllm.renderers.online_renderer import OnlineRenderer

        self._renderer = OnlineRenderer(
            _configuration().model_config,
            _renderer(folder),
            request_logger=None,
            chat_template=template,
            chat_template_content_format="auto",
        )

    def prompt(self, body: dict[str, Any]) -> list[int] | None:
        """Return the ids of the prompt of a chat request; None if vLLM refuses it."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        found = _done(lambda: self._renderer.render_chat(ChatCompletionRequest(**copy.deepcopy(body))))
        return list(found[1][0]["prompt_token_ids"]) if isinstance(found, tuple) else None

    def prompts(self, body: dict[str, Any]) -> list[list[int]] | None:
        """Return the ids of the prompts of a completion request; None if vLLM refuses it."""
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest

        found = _done(lambda: self._renderer.render_completion(CompletionRequest(**copy.deepcopy(body))))
        return [list(each["prompt_token_ids"]) for each in found] if isinstance(found, list) else None


def _done(render: Callable[[], Awaitable[Any]]) -> Any:
    from vllm.exceptions import VLLMValidationError

    async def rendered() -> Any:
        return await render()

    try:
        return asyncio.run(rendered())
    except (TypeError, ValueError, VLLMValidationError):
        return None
