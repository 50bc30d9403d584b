"""Our attention in vLLM's backends against vLLM's own kernel, on KV that vLLM wrote and metadata that it built."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl, TritonAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kernels import backend
from kernels.backend import Backend, KernelMismatch
from kernels.short_query_attention import AttentionStep, triton_attend
from kernels.short_query_attention.attend import attend_reference
from kernels.short_query_attention.race import AttentionName, vllm_unified_attention
from services.generation.engine import attention_backend as attention
from services.generation.engine.attention_backend import (
    LONGEST_SHORT_QUERY,
    ShortQueryFlashBackend,
    ShortQueryMixin,
    ShortQueryTritonBackend,
    ShortQueryTritonImpl,
    layer_refusal,
    traits_of,
    use_attention,
)
from services.generation.engine.kernel_choice import failed
from tests.support.models import tiny_model

HEADS, KV_HEADS, SIZE, BLOCK, MODEL_LENGTH = 4, 2, 32, 16, 256
LAYER = SimpleNamespace(**{f"_{name}_scale": torch.tensor(1.0) for name in "qkv"})
TOLERANCE = {
    torch.float32: 3e-6,
    torch.float16: 2e-3,
}  # The interpreter gets bfloat16 in vLLM's kernels wrong.
# Positions and query tokens: decoding, drafts over a block's edge, as many as a short step has, a whole prompt.
MIXED = ([50, 35, 130, 7], [1, 5, 16, 7])


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    model = tiny_model(tmp_path_factory.mktemp("model"))
    arguments = EngineArgs(
        model=str(model), skip_tokenizer_init=True, dtype="float32", max_model_len=MODEL_LENGTH
    )
    with set_current_vllm_config(made := arguments.create_engine_config()):
        yield made


def make_impl(config, kind=ShortQueryTritonImpl, window=None, **options):
    return kind(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, window, "auto", **options)


class Batch:
    """Requests with KV that vLLM's kernel wrote, all else NaN, and buffers as vLLM's runner has them.

    `requests` and `tokens` are how many there is room for: what is left over is padding.
    """

    def __init__(self, config, lengths, queries, dtype=torch.float32, requests=0, tokens=0, turned=False):
        torch.manual_seed(sum(lengths))
        self.lengths, self.queries, self.used = lengths, queries, sum(queries)
        self.requests, self.tokens = max(requests, len(lengths)), max(tokens, sum(queries))
        columns = MODEL_LENGTH // BLOCK
        count = 1 + len(lengths) * columns
        # Block 0 is nobody's: vLLM fills the table of padding with it.
        shape = (count, BLOCK, KV_HEADS, 2 * SIZE) if turned else (count, KV_HEADS, BLOCK, 2 * SIZE)
        cache = torch.full(shape, torch.nan, dtype=dtype)
        self.cache = cache.transpose(1, 2) if turned else cache
        self.table = torch.zeros(self.requests, columns, dtype=torch.int32)
        self.table[: len(lengths)] = 1 + torch.randperm(count - 1).view(len(lengths), columns)
        writer = make_impl(config, TritonAttentionImpl)
        for row, length in zip(self.table, lengths, strict=False):
            position = torch.arange(length)
            slots = row[position // BLOCK].long() * BLOCK + position % BLOCK
            key, value = torch.randn(2, length, KV_HEADS, SIZE).to(dtype)
            writer.do_kv_cache_update(LAYER, key, value, self.cache, slots)
        qkv = torch.randn(self.tokens, HEADS + 2 * KV_HEADS, SIZE).to(dtype)
        self.query = qkv[:, :HEADS]
        self.cu = torch.tensor([0, *queries, *[0] * (self.requests - len(queries))]).cumsum(0).to(torch.int32)
        self.seq_lens = torch.zeros(self.requests, dtype=torch.int32)
        self.seq_lens[: len(lengths)] = torch.tensor(lengths)

    def common(self, **change):
        return CommonAttentionMetadata(
            **{
                "query_start_loc": self.cu,
                "query_start_loc_cpu": self.cu,
                "seq_lens": self.seq_lens,
                "num_reqs": self.requests,
                "num_actual_tokens": self.tokens,
                "max_query_len": max(self.queries),
                "max_seq_len": max(self.lengths),
                "block_table_tensor": self.table,
                "slot_mapping": torch.zeros(self.tokens, dtype=torch.int64),
            }
            | change
        )

    def metadata(self, config, capture=False, **change):
        spec = FullAttentionSpec(
            block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=self.query.dtype
        )
        builder = TritonAttentionMetadataBuilder(spec, [], config, torch.device("cpu"))
        common = self.common(**change)
        return builder.build_for_cudagraph_capture(common) if capture else builder.build(0, common)

    def forward(self, impl, metadata):
        out = torch.full((self.tokens, HEADS, SIZE), 7.0, dtype=self.query.dtype)
        assert impl.forward(LAYER, self.query, None, None, self.cache, metadata, out) is out
        return out

    def step(self, window=None):
        """What vLLM asks for, in the kernel's terms."""
        return AttentionStep(
            query=self.query[: self.used],
            keys=self.cache[..., :SIZE].transpose(1, 2),
            values=self.cache[..., SIZE:].transpose(1, 2),
            block_table=self.table,
            lengths=self.seq_lens,
            cu_queries=self.cu,
            longest_query=max(self.queries),
            longest=max(self.lengths),
            scale=SIZE**-0.5,
            window=window,
        )

    def exact(self, window=None):
        """In float64, of the query tokens of requests."""
        return attend_reference(self.step(window), torch.float64).double()


def off_by(found, exact):
    return (found.double() - exact).abs().max() / exact.abs().max()


@pytest.mark.parametrize(
    ("dtype", "window", "turned"),
    [(torch.float32, None, False), (torch.float16, None, True), (torch.float32, 20, True)],
    ids=["float32", "float16, tokens first", "window, tokens first"],
)
def test_a_short_step_is_ours_and_gives_what_vllms_kernel_gives(config, launches, dtype, window, turned):
    batch = Batch(config, *MIXED, dtype=dtype, requests=6, tokens=32, turned=turned)
    metadata = batch.metadata(config)
    ours = batch.forward(make_impl(config, window=window), metadata)
    assert [step.longest_query for step in launches] == [16]
    exact = batch.exact(window)
    assert off_by(ours[: batch.used], exact) < TOLERANCE[dtype]
    # Padding is nobody's row.
    assert (ours[batch.used :] == 7).all()
    theirs = batch.forward(make_impl(config, TritonAttentionImpl, window=window), metadata)
    assert off_by(theirs[: batch.used], exact) < TOLERANCE[dtype]
    assert len(launches) == 1


def test_a_step_with_a_long_query_is_vllms(config, launches):
    batch = Batch(config, [50, 35], [1, LONGEST_SHORT_QUERY + 1])
    found = batch.forward(make_impl(config), batch.metadata(config))
    assert off_by(found, batch.exact()) < TOLERANCE[torch.float32]
    assert not launches


@pytest.mark.parametrize(
    ("capture", "lengths", "queries"),
    [
        # Plain decoding, captured with one token a request: the last seats are empty.
        ({"max_query_len": 1}, [50, 130, 1, 255], [1, 1, 1, 1]),
        # Any batch of 6 tokens, captured as 6 requests that might have 6 each.
        ({"max_query_len": 6}, [50, 130, 9], [1, 4, 1]),
    ],
    ids=["decoding", "mixed"],
)
def test_a_captured_launch_does_for_every_step_that_it_is_replayed_with(
    config, launches, capture, lengths, queries
):
    batch = Batch(config, lengths, queries, requests=6, tokens=6)
    buffers = {name: getattr(batch, name).clone() for name in ("cu", "seq_lens", "table")}
    batch.cu.copy_(torch.arange(7))
    batch.table.zero_()
    metadata = batch.metadata(config, capture=True, max_seq_len=MODEL_LENGTH, **capture)
    assert (batch.seq_lens == 1).all()
    # A replay has the numbers of the capture, and finds new values in its tensors.
    for name, values in buffers.items():
        getattr(batch, name).copy_(values)
    found = batch.forward(make_impl(config), metadata)
    assert len(launches) == 1
    assert off_by(found[: batch.used], batch.exact()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"logits_soft_cap": 30.0}, "capped"),
        ({"sinks": torch.zeros(HEADS)}, "sinks"),
        ({"attn_type": "encoder_decoder"}, "decoder"),
        ({"chunk_lookback": 2}, "chunks"),
    ],
)
def test_a_layer_that_ours_cannot_compute_is_vllms(config, launches, options, reason):
    impl = make_impl(config, **options)
    assert reason in layer_refusal(traits_of(impl))
    batch = Batch(config, [50, 35], [1, 5])
    batch.forward(impl, batch.metadata(config))
    assert not launches


def test_a_step_with_other_masks_is_vllms(config):
    impl = make_impl(config)
    batch = Batch(config, [50], [3])

    def takes(scales=(None, None), query=batch.query, **change):
        metadata = SimpleNamespace(**(vars(batch.metadata(config)) | change))
        return impl._takes(query, batch.cache, metadata, torch.empty_like(query), scales)

    assert takes()
    assert not takes(causal=False)
    assert not takes(causal=torch.ones(1, dtype=torch.int32))
    assert not takes(mm_prefix_range={0: [(0, 2)]})
    assert not takes(rswa_prefix_lens=torch.ones(1))
    assert not takes(scales=(torch.ones(1), None))
    assert not takes(query=batch.query.half())
    assert not impl._takes(batch.query, batch.cache, None, batch.query, (None, None))


def test_without_metadata_the_memory_of_the_pieces_is_there_already(config):
    attention._shared_scratch.cache_clear()
    impl = make_impl(config)
    batch = Batch(config, [50], [1])
    assert (batch.forward(impl, None) == 0).all()
    assert attention._shared_scratch.cache_info().currsize == 1


def test_metadata_of_flash_attention_is_read_alike(config, launches):
    batch = Batch(config, *MIXED)
    shared = (
        "num_actual_tokens",
        "max_query_len",
        "query_start_loc",
        "max_seq_len",
        "seq_lens",
        "block_table",
    )
    triton = batch.metadata(config)
    fields = {name: getattr(triton, name) for name in (*shared, "slot_mapping", "causal")}
    found = batch.forward(make_impl(config), FlashAttentionMetadata(**fields))
    assert len(launches) == 1
    assert off_by(found, batch.exact()) < TOLERANCE[torch.float32]


def test_the_benchmarks_rival_computes_the_same(config):
    batch = Batch(config, *MIXED)
    assert off_by(vllm_unified_attention(batch.step())(), batch.exact()) < TOLERANCE[torch.float32]


_PASSED = set()
"""Kernels and shapes for which the check of attention has passed."""


class TestRegistry:
    """Whose place ours takes, and when."""

    PLACES = (
        (AttentionBackendEnum.FLASH_ATTN, ShortQueryFlashBackend),
        (AttentionBackendEnum.TRITON_ATTN, ShortQueryTritonBackend),
    )

    @pytest.fixture(autouse=True)
    def clean(self, monkeypatch):
        monkeypatch.setattr(backend, "_chosen", Backend.AUTO)
        yield
        for place, _ in self.PLACES:
            place.clear_override()

    @pytest.fixture
    def cuda(self, monkeypatch):
        """As if the kernels ran on CUDA: the check of attention runs here, once for each kernel that passes it."""
        real = attention.check_attention

        def check(_, *rest):
            if (triton_attend.attend_triton, rest) not in _PASSED:
                real(torch.device("cpu"), *rest)
                _PASSED.add((triton_attend.attend_triton, rest))

        monkeypatch.setattr(attention, "choose", lambda _: Backend.TRITON)
        monkeypatch.setattr(attention, "check_attention", check)
        return torch.device("cuda")

    def used(self, config, device, fastest="ours"):
        """Return whether ours is used, with `auto` where it was measured to be the fastest."""

        def measured(config, device, *, ours):
            return AttentionName(fastest if ours or fastest != "ours" else "vllm")

        return use_attention(config, device, measured) is AttentionName.OURS

    def test_on_cuda_ours_are_in_vllms_registry_under_vllms_names(self, config, cuda):
        assert self.used(config, cuda)
        for place, ours in self.PLACES:
            assert place.get_class() is ours
            assert issubclass(ours.get_impl_cls(), ShortQueryMixin)
            assert ours.get_name() == place.name

    def test_on_cpu_and_with_the_reference_vllms_are(self, config, monkeypatch):
        for place, ours in self.PLACES:
            attention.register_backend(place, f"{ours.__module__}.{ours.__qualname__}")
        assert not self.used(config, torch.device("cpu"))
        backend.use("reference")
        assert not self.used(config, torch.device("cuda"))
        assert not any(place.is_overridden() for place, _ in self.PLACES)

    def test_wrong_attention_is_left_out_or_an_error(self, config, cuda, monkeypatch, caplog):
        def wrong(*_):
            raise KernelMismatch("off by more than rounding")

        monkeypatch.setattr(attention, "check_attention", wrong)
        assert not self.used(config, cuda)
        assert "kernels_left_out: attention: KernelMismatch: off by more" in caplog.text
        assert failed() == ("attention",)
        backend.use("triton")
        with pytest.raises(KernelMismatch):
            self.used(config, cuda)

    @pytest.mark.parametrize("change", [{"use_mla": True}, {"get_head_size": lambda: 20}])
    def test_models_of_another_kind_have_vllms(self, config, cuda, change):
        real = config.model_config
        names = ("use_mla", "get_head_size", "get_num_attention_heads", "get_num_kv_heads", "dtype")
        model = SimpleNamespace(**{name: getattr(real, name) for name in names} | change)
        other = SimpleNamespace(
            model_config=model,
            parallel_config=config.parallel_config,
            attention_config=config.attention_config,
        )
        assert not self.used(other, cuda)

    def test_for_trees_it_is_ours_where_masks_are_right_and_nothing_is_measured(
        self, config, cuda, monkeypatch, caplog
    ):
        def measured(*_, **__):
            raise AssertionError("nothing is to be measured: ranks without the kernel would not take part")

        def ignoring_masks(step, **options):
            return real(replace(step, tree=None), **options)

        assert use_attention(config, cuda, measured, masks=True) is AttentionName.OURS
        real = triton_attend.attend_triton
        monkeypatch.setattr(triton_attend, "attend_triton", ignoring_masks)
        assert self.used(config, cuda)
        assert use_attention(config, cuda, measured, masks=True) is AttentionName.VLLM
        assert not any(place.is_overridden() for place, _ in self.PLACES)
        assert "kernels_left_out: attention: KernelMismatch" in caplog.text

    def test_auto_leaves_attention_to_vllm_until_another_is_faster(self, config, cuda):
        assert not self.used(config, cuda, "vllm")
        assert not any(place.is_overridden() for place, _ in self.PLACES)
        assert config.attention_config.backend is None
        try:
            assert use_attention(config, cuda, lambda *_, ours: AttentionName.FLASHINFER) == "flashinfer"
            assert config.attention_config.backend is AttentionBackendEnum.FLASHINFER
            # Now it is a backend that was asked for.
            assert not self.used(config, cuda)
        finally:
            config.attention_config.backend = None
        backend.use("triton")
        assert self.used(config, cuda, "vllm")
