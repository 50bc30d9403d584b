"""Every name of vLLM that the engine leans on, and why: what to read, and to check, before another version.

`tests/integration/exactness/test_symbols.py` compares this list with the installed vLLM and with the imports of
this folder. Names only: that they still *behave* is what the other tests in that folder show.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

VERSION = "0.32"
"""The minor version that the list was written for."""

FILLER = -1
"""vLLM's filler behind a sample's last token in the matrix of sampled tokens."""


class Kind(Enum):
    """What a symbol is; an attribute may be set in `__init__` only, or be a field or a property."""

    CALLABLE = "callable"
    ATTRIBUTE = "attribute"


@dataclass(frozen=True, slots=True)
class Symbol:
    """`path` inside `module`, such as Request.num_tokens; `parameters` are the names that we pass or override."""

    module: str
    path: str
    why: str
    kind: Kind = Kind.CALLABLE
    parameters: tuple[str, ...] = ()


def _fields(module: str, owner: str, names: str, why: str) -> tuple[Symbol, ...]:
    return tuple(Symbol(module, f"{owner}.{name}", why, Kind.ATTRIBUTE) for name in names.split())


ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0 keeps the engine core in our process",
    "VLLM_USE_V2_MODEL_RUNNER": "0: the V2 runner has other hooks",
    "VLLM_NO_USAGE_STATS": "nothing is reported to anybody",
    "VLLM_LOGGING_LEVEL": "warnings only",
    "VLLM_CPU_OMP_THREADS_BIND": "the cores of a CPU instance",
}

_CONFIG = (
    Symbol(
        "vllm.engine.arg_utils",
        "EngineArgs",
        "what an engine is built from",
        parameters=(
            "model",
            "tokenizer",
            "skip_tokenizer_init",
            "dtype",
            "max_num_seqs",
            "max_model_len",
            "max_num_batched_tokens",
            "kv_cache_memory_bytes",
            "block_size",
            "gpu_memory_utilization",
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "enforce_eager",
            "tensor_parallel_size",
            "enable_sleep_mode",
            "additional_config",
            "distributed_executor_backend",
            "async_scheduling",
            "disable_log_stats",
            "seed",
            "worker_cls",
        ),
    ),
    Symbol("vllm.engine.arg_utils", "EngineArgs.create_engine_config", "the configuration"),
    *_fields("vllm.config", "VllmConfig", "model_config", "limits and precision"),
    *_fields("vllm.config", "ModelConfig", "max_model_len dtype hf_text_config", "limits, end tokens"),
    Symbol("vllm.config", "ModelConfig.get_vocab_size", "token ids beyond it end in an IndexError"),
    Symbol("vllm.config", "ModelConfig.try_get_generation_config", "end tokens"),
    Symbol("vllm.platforms", "current_platform", "CPU or CUDA", Kind.ATTRIBUTE),
    Symbol("vllm.platforms.interface", "Platform.is_cpu", "CPU or CUDA"),
    *_fields("vllm.platforms.interface", "Platform", "device_name", "reported to the fleet"),
)

_CORE = (
    Symbol(
        "vllm.v1.engine.core",
        "EngineCore",
        "the engine, without vLLM's front end",
        parameters=("vllm_config", "executor_class", "log_stats"),
    ),
    *_fields("vllm.v1.engine.core", "EngineCore", "scheduler request_block_hasher", "stepped by us"),
    Symbol("vllm.v1.engine.core", "EngineCore.add_request", "queue a sample", parameters=("request",)),
    Symbol("vllm.v1.engine.core", "EngineCore.abort_requests", "end samples", parameters=("request_ids",)),
    Symbol("vllm.v1.engine.core", "EngineCore.step", "one step"),
    Symbol(
        "vllm.v1.engine.core", "EngineCore.post_step", "vLLM's own drafts", parameters=("model_executed",)
    ),
    Symbol(
        "vllm.v1.engine.core",
        "EngineCore.collective_rpc",
        "weights and resumed samples",
        parameters=("method", "args", "kwargs"),
    ),
    Symbol("vllm.v1.engine.core", "EngineCore.reset_prefix_cache", "no KV of old weights survives"),
    Symbol(
        "vllm.v1.engine.core", "EngineCore.sleep", "weights to host memory, KV dropped", parameters=("level",)
    ),
    Symbol("vllm.v1.engine.core", "EngineCore.wake_up", "says whether all memory is back"),
    Symbol("vllm.v1.engine.core", "EngineCore.shutdown", "release the device"),
    Symbol("vllm.v1.executor", "Executor.get_class", "the executor of a configuration"),
    *_fields(
        "vllm.v1.engine",
        "EngineCoreOutput",
        "request_id new_token_ids new_logprobs finish_reason",
        "what a step did",
    ),
    *_fields("vllm.v1.engine", "EngineCoreOutputs", "outputs", "what a step did"),
    *_fields("vllm.v1.engine", "FinishReason", "STOP LENGTH", "why a sample ended"),
    *_fields("vllm.v1.outputs", "LogprobsLists", "logprobs", "log-probability of each new token"),
    *_fields(
        "vllm.v1.outputs", "LogprobsLists", "sampled_token_ranks", "carries our marks of each new token"
    ),
    Symbol(
        "vllm.sampling_params",
        "SamplingParams",
        "what the scheduler and the batch must know of a sample",
        parameters=(
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "min_tokens",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "max_tokens",
            "stop_token_ids",
            "ignore_eos",
            "logprobs",
            "detokenize",
            "skip_clone",
            "extra_args",
        ),
    ),
    *_fields("vllm.sampling_params", "SamplingParams", "extra_args", "carries seed and noise settings"),
)

_REQUEST = (
    Symbol(
        "vllm.v1.request",
        "Request",
        "a sample",
        parameters=(
            "request_id",
            "prompt_token_ids",
            "sampling_params",
            "pooling_params",
            "block_hasher",
        ),
    ),
    Symbol("vllm.v1.request", "Request.append_output_token_ids", "resume", parameters=("token_ids",)),
    *_fields(
        "vllm.v1.request",
        "Request",
        "request_id status prompt_token_ids _output_token_ids max_tokens num_output_tokens num_tokens"
        " num_computed_tokens",
        "who can verify a draft, and of what length",
    ),
    *_fields("vllm.v1.request", "Request", "spec_token_ids", "the way in for drafts"),
    *_fields(
        "vllm.v1.request", "Request", "num_preemptions", "a resumed sample may find its tokens in the cache"
    ),
    *_fields("vllm.v1.request", "RequestStatus", "PREEMPTED", "prior tokens stay output tokens"),
    *_fields(
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        "requests running waiting kv_cache_manager kv_cache_config max_num_scheduled_tokens",
        "load, drafts, KV",
    ),
    Symbol("vllm.v1.core.sched.scheduler", "Scheduler.has_requests", "whether a step would do anything"),
    *_fields("vllm.v1.core.kv_cache_manager", "KVCacheManager", "usage block_pool", "load, KV checks"),
    *_fields(
        "vllm.v1.core.block_pool",
        "BlockPool",
        "cached_block_hash_to_block num_gpu_blocks",
        "proof that no block survived a reset",
    ),
    Symbol("vllm.v1.core.block_pool", "BlockPool.get_num_free_blocks", "proof that no block survived"),
    Symbol("vllm.v1.core.block_pool", "BlockHashToBlockMap.__len__", "cached blocks"),
    *_fields(
        "vllm.v1.kv_cache_interface", "KVCacheConfig", "kv_cache_groups", "block tables of a resumed sample"
    ),
)

_RUNNER = tuple(
    symbol
    for module, owner in (
        ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
        ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner"),
    )
    for symbol in (
        Symbol(
            module,
            f"{owner}._prepare_inputs",
            "lays out a row of logits for each draft token while speculative_config is not None",
            parameters=("scheduler_output", "num_scheduled_tokens"),
        ),
        Symbol(module, f"{owner}._sample", "replaced", parameters=("logits", "spec_decode_metadata")),
        Symbol(
            module,
            f"{owner}._on_request_state_removed",
            "forget a sample's noise",
            parameters=("req_id", "req_state"),
        ),
        *_fields(module, owner, "requests input_batch speculative_config", "state of the batch"),
        *_fields(module, owner, "discard_request_mask", "samples whose prompt is only partly computed"),
    )
)

_WORKER = (
    *_fields(
        "vllm.v1.worker.gpu_input_batch",
        "InputBatch",
        "req_ids num_reqs num_tokens_no_spec num_prompt_tokens sampling_metadata",
        "positions and sampling of each row",
    ),
    Symbol(
        "vllm.v1.worker.gpu_input_batch",
        "CachedRequestState",
        "a resumed sample, as a preemption would have left it",
        parameters=(
            "req_id",
            "prompt_token_ids",
            "mm_features",
            "sampling_params",
            "generator",
            "block_ids",
            "num_computed_tokens",
            "output_token_ids",
        ),
    ),
    *_fields(
        "vllm.v1.core.sched.output", "SchedulerOutput", "scheduled_spec_decode_tokens", "drafts of a step"
    ),
    *_fields(
        "vllm.v1.spec_decode.metadata", "SpecDecodeMetadata", "num_draft_tokens draft_token_ids", "drafts"
    ),
    Symbol(
        "vllm.v1.worker.cpu_worker", "CPUWorker.reload_weights", "overridden: the output head is packed anew"
    ),
    Symbol(
        "vllm.v1.worker.gpu_model_runner", "GPUModelRunner.get_model", "the model whose head is packed anew"
    ),
    Symbol("vllm.model_executor.layers.vocab_parallel_embedding", "ParallelLMHead", "the output head"),
    Symbol(
        "vllm.model_executor.layers.vocab_parallel_embedding",
        "UnquantizedEmbeddingMethod.process_weights_after_loading",
        "packs the output head for the CPU kernel",
        parameters=("layer",),
    ),
    Symbol("vllm.v1.worker.cpu_worker", "CPUWorker.init_device", "builds the runner that is re-classed"),
    *_fields("vllm.v1.worker.cpu_worker", "CPUWorker", "model_runner", "re-classed after init_device"),
    *_fields("vllm.v1.worker.cpu_worker", "CPUWorker", "device", "where kernels are to run"),
    *_fields("vllm.v1.worker.gpu_worker", "Worker", "device", "where kernels are to run"),
    Symbol("vllm.v1.worker.gpu_worker", "Worker._make_model_runner", "builds the runner that is re-classed"),
    Symbol(
        "vllm.v1.worker.gpu_worker",
        "Worker.reload_weights",
        "weight updates, called by name",
    ),
    Symbol(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner.reload_weights",
        "weight updates",
        parameters=("weights_iterator",),
    ),
)

_SAMPLER = (
    Symbol(
        "vllm.v1.outputs", "SamplerOutput", "tokens", parameters=("sampled_token_ids", "logprobs_tensors")
    ),
    Symbol(
        "vllm.v1.outputs",
        "LogprobsTensors",
        "log-probabilities",
        parameters=("logprob_token_ids", "logprobs", "selected_token_ranks"),
    ),
    *_fields(
        "vllm.v1.sample.metadata",
        "SamplingMetadata",
        "all_greedy temperature top_p top_k no_penalties prompt_token_ids output_token_ids"
        " presence_penalties frequency_penalties repetition_penalties",
        "sampling parameters, a row a sample",
    ),
    Symbol(
        "vllm.v1.sample.ops.penalties",
        "apply_all_penalties",
        "penalties as vLLM has them",
        parameters=(
            "logits",
            "prompt_token_ids",
            "presence_penalties",
            "frequency_penalties",
            "repetition_penalties",
            "output_token_ids",
        ),
    ),
    Symbol(
        "vllm.v1.sample.ops.topk_topp_sampler",
        "apply_top_k_top_p",
        "masks as vLLM has them",
        parameters=("logits", "k", "p"),
    ),
    Symbol(
        "vllm.v1.sample.rejection_sampler",
        "RejectionSampler.parse_output",
        "splits our [n, k + 1] matrix into each sample's tokens",
        parameters=("output_token_ids", "vocab_size", "discard_req_indices", "logprobs_tensors"),
    ),
    Symbol("vllm.v1.sample.rejection_sampler", "PLACEHOLDER_TOKEN_ID", "the filler", Kind.ATTRIBUTE),
)

_TWIN = (
    Symbol("vllm.model_executor.layers.linear", "LinearBase", "what the 4-bit twin has another kind of"),
    *_fields(
        "vllm.model_executor.layers.linear",
        "LinearBase",
        "quant_method params_dtype input_size output_size prefix",
        "shape and precision of a layer",
    ),
    Symbol(
        "vllm.model_executor.layers.linear",
        "LinearMethodBase",
        "how a layer of the twin multiplies",
    ),
    Symbol(
        "vllm.model_executor.layers.linear",
        "UnquantizedLinearMethod.apply",
        "a layer's weight is read by multiplying with it",
        parameters=("layer", "x", "bias"),
    ),
    Symbol(
        "vllm.model_executor.kernels.linear",
        "choose_mp_linear_kernel",
        "the fastest kernel for 4-bit weights; ValueError without any",
        parameters=("config",),
    ),
    Symbol(
        "vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel",
        "MPLinearLayerConfig",
        "what such a kernel is chosen for",
        parameters=(
            "full_weight_shape",
            "partition_weight_shape",
            "weight_type",
            "act_type",
            "group_size",
            "zero_points",
        ),
    ),
    *(
        Symbol(
            "vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel",
            f"MPLinearKernel.{name}",
            "packs a 4-bit weight and multiplies with it",
            parameters=parameters,
        )
        for name, parameters in (
            ("process_weights_after_loading", ("layer",)),
            ("apply_weights", ("layer", "x", "bias")),
        )
    ),
    Symbol(
        "vllm.model_executor.parameter",
        "PackedvLLMParameter",
        "4-bit weights as those kernels want them",
        parameters=("packed_factor", "packed_dim"),
    ),
    Symbol("vllm.model_executor.parameter", "GroupQuantScaleParameter", "their scales"),
    Symbol("vllm.scalar_type", "scalar_types", "the type of a 4-bit weight", Kind.ATTRIBUTE),
    Symbol("vllm.config", "set_current_vllm_config", "kernels are chosen by it", parameters=("vllm_config",)),
    *_fields("vllm.config", "VllmConfig", "additional_config", "tells workers of the twin and kernels"),
    Symbol("vllm.config", "ModelConfig.get_num_experts", "a mixture of experts has no twin"),
    *_fields("vllm.v1.core.sched.scheduler", "Scheduler", "num_lookahead_tokens", "slots for drafts"),
    *_fields("vllm.v1.worker.gpu_worker", "Worker", "model_runner", "whose model is drafted from"),
    Symbol("vllm.v1.worker.gpu_worker", "Worker.load_model", "the twin is made after it"),
    Symbol("vllm.v1.worker.cpu_worker", "CPUWorker.load_model", "the twin is made after it"),
    *_fields(
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner",
        "attn_groups model_config uses_mrope vllm_config device model_memory_usage",
        "draft steps of the twin; what is left for KV",
    ),
    *_fields(
        "vllm.v1.worker.gpu_input_batch",
        "InputBatch",
        "block_table req_id_to_index token_ids_cpu",
        "slots and latest tokens of drafts",
    ),
    *_fields("vllm.v1.worker.block_table", "BlockTable", "block_size num_blocks_per_row", "slots of drafts"),
    Symbol(
        "vllm.v1.worker.block_table",
        "BlockTable.get_device_tensor",
        "slots of drafts",
        parameters=("num_reqs",),
    ),
    Symbol(
        "vllm.v1.worker.utils",
        "AttentionGroup.build_metadata_for_drafting",
        "attention of a draft step",
        parameters=("common_attn_metadata", "draft_index"),
    ),
    Symbol(
        "vllm.v1.attention.backend",
        "CommonAttentionMetadata",
        "attention of a draft step",
        parameters=(
            "query_start_loc",
            "query_start_loc_cpu",
            "seq_lens",
            "num_reqs",
            "num_actual_tokens",
            "max_query_len",
            "max_seq_len",
            "block_table_tensor",
            "slot_mapping",
            "causal",
            "is_prefilling",
            "seq_lens_cpu_upper_bound",
        ),
    ),
    Symbol(
        "vllm.forward_context",
        "set_forward_context",
        "a draft step",
        parameters=("attn_metadata", "vllm_config", "num_tokens", "slot_mapping"),
    ),
)

_EAGLE3 = (
    Symbol(
        "vllm.config",
        "SpeculativeConfig",
        "what vLLM's EAGLE-3 head is built from, and nothing else",
        parameters=(
            "method",
            "model",
            "num_speculative_tokens",
            "target_model_config",
            "target_parallel_config",
        ),
    ),
    *_fields("vllm.config", "SpeculativeConfig", "draft_model_config", "the head's model"),
    *_fields(
        "vllm.config", "VllmConfig", "speculative_config compilation_config", "the head's, of a copy of ours"
    ),
    *_fields(
        "vllm.config", "CompilationConfig", "static_forward_context", "whose layers vLLM gives blocks of KV"
    ),
    *_fields("vllm.config", "ParallelConfig", "pipeline_parallel_size", "all layers are on one device"),
    Symbol("vllm.config", "ModelConfig.get_hidden_size", "the width of features"),
    Symbol("vllm.config", "ModelConfig.get_head_size", "the head's KV has the target's shape"),
    Symbol("vllm.config", "ModelConfig.get_total_num_kv_heads", "the head's KV has the target's shape"),
    Symbol("vllm.config", "ModelConfig.get_total_num_hidden_layers", "the layers that it reads"),
    Symbol(
        "vllm.config",
        "get_layers_from_vllm_config",
        "the target's attention layers",
        parameters=("vllm_config", "layer_type"),
    ),
    Symbol("vllm.compilation.backends", "set_model_tag", "the head is not the target", parameters=("tag",)),
    Symbol(
        "vllm.model_executor.model_loader",
        "get_model",
        "builds and loads the head",
        parameters=("vllm_config", "model_config"),
    ),
    Symbol(
        "vllm.model_executor.model_loader.reload.inplace",
        "reload_weights",
        "other weights of the head, in place",
        parameters=(
            "vllm_config",
            "model",
            "weights_iterator",
            "weights_path",
            "is_checkpoint_format",
        ),
    ),
    *(
        Symbol(
            "vllm.model_executor.models.llama_eagle3",
            f"Eagle3LlamaForCausalLM.{name}",
            "the head",
            parameters=parameters,
        )
        for name, parameters in (
            ("forward", ("input_ids", "positions", "hidden_states")),
            ("combine_hidden_states", ("hidden_states",)),
            ("compute_logits", ("hidden_states",)),
            ("load_weights", ("weights",)),
        )
    ),
    *_fields(
        "vllm.model_executor.models.llama_eagle3", "LlamaModel", "embed_tokens layers", "what is not its own"
    ),
    Symbol(
        "vllm.model_executor.models.interfaces",
        "SupportsEagle3.set_aux_hidden_state_layers",
        "the target returns hidden states",
        parameters=("layers",),
    ),
    *(
        symbol
        for module, owner in (
            ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner"),
            ("vllm.v1.worker.cpu_model_runner", "CPUModelRunner"),
        )
        for symbol in (
            Symbol(module, f"{owner}._model_forward", "where they are kept"),
            *_fields(
                module,
                owner,
                "use_aux_hidden_state_outputs dtype max_num_tokens",
                "that there are hidden states beside the output; their type; rows of a pass",
            ),
        )
    ),
    *_fields(
        "vllm.v1.core.sched.output", "SchedulerOutput", "total_num_scheduled_tokens", "rows that are tokens"
    ),
    Symbol("vllm.forward_context", "get_forward_context", "slots of the tokens of a step"),
    *_fields("vllm.forward_context", "ForwardContext", "slot_mapping", "slots of the tokens of a step"),
    Symbol(
        "vllm.model_executor.layers.attention_layer_base",
        "AttentionLayerBase",
        "what vLLM gives blocks of KV, our features among them",
    ),
    Symbol("vllm.model_executor.layers.attention", "Attention", "whose KV features lie like"),
    *_fields("vllm.model_executor.layers.attention", "Attention", "num_heads", "one group with features"),
    Symbol(
        "vllm.model_executor.layers.attention",
        "Attention.get_kv_cache_spec",
        "whose KV features lie like",
        parameters=("vllm_config",),
    ),
    Symbol("vllm.model_executor.layers.attention", "Attention.get_attn_backend", "one group with features"),
    *_fields(
        "vllm.v1.kv_cache_interface",
        "FullAttentionSpec",
        "block_size page_size_bytes dtype",
        "values of a slot",
    ),
    Symbol("vllm.distributed", "get_tensor_model_parallel_rank", "a rank keeps its share of features"),
    Symbol("vllm.distributed", "get_tensor_model_parallel_world_size", "a rank keeps its share of features"),
    Symbol(
        "vllm.distributed",
        "tensor_model_parallel_all_gather",
        "and reads all of them",
        parameters=("input_", "dim"),
    ),
    Symbol(
        "vllm.v1.worker.gpu_worker",
        "Worker._maybe_get_memory_pool_context",
        "the head sleeps with the target's weights",
        parameters=("tag",),
    ),
)

_MIGRATION = (
    *_fields(
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        "kv_holding_waiting max_num_running_reqs block_size needs_kv_cache_zeroing vllm_config",
        "seats, rows for prompts, and whether KV can be moved block by block",
    ),
    Symbol(
        "vllm.v1.core.sched.scheduler",
        "Scheduler._enqueue_waiting_request",
        "a sample with KV that waits for a seat",
        parameters=("request",),
    ),
    Symbol(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.get_block_ids",
        "where a sample's KV is",
        parameters=("request_id",),
    ),
    Symbol(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.get_computed_blocks",
        "blocks of a sample that is to come that are here already",
        parameters=("request",),
    ),
    Symbol(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.allocate_slots",
        "blocks for a sample that is to come; None when there are not enough",
        parameters=(
            "request",
            "num_new_tokens",
            "num_new_computed_tokens",
            "new_computed_blocks",
            "delay_cache_blocks",
        ),
    ),
    Symbol(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheManager.cache_blocks",
        "its KV can be shared once it is here",
        parameters=("request", "num_computed_tokens"),
    ),
    Symbol("vllm.v1.core.kv_cache_manager", "KVCacheManager.free", "a reservation", parameters=("request",)),
    Symbol(
        "vllm.v1.core.kv_cache_manager",
        "KVCacheBlocks",
        "the shared blocks, whole ones only",
        parameters=("blocks",),
    ),
    *_fields("vllm.v1.request", "Request", "output_token_ids sampling_params", "a sample that enters"),
    *_fields("vllm.v1.request", "RequestStatus", "RUNNING", "a sample that goes on"),
    *_fields("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "kv_caches", "the KV, a view a layer"),
    *_fields("vllm.v1.worker.worker_base", "WorkerBase", "rank", "whose peer gets its KV"),
)

_BACKENDS = tuple(
    (f"vllm.v1.attention.backends.{module}", name)
    for module, name in (("triton_attn", "TritonAttention"), ("flash_attn", "FlashAttention"))
)
_ATTENTION = (
    *(Symbol(module, f"{name}Backend.get_impl_cls", "ours takes its place") for module, name in _BACKENDS),
    *(
        Symbol(
            module,
            f"{name}Impl.forward",
            "computes every step that ours does not",
            parameters=(
                "layer",
                "query",
                "key",
                "value",
                "kv_cache",
                "attn_metadata",
                "output",
                "output_scale",
                "output_block_scale",
            ),
        )
        for module, name in _BACKENDS
    ),
    *(
        field
        for module, name in _BACKENDS
        for field in (
            *_fields(
                module,
                f"{name}Impl",
                "num_heads num_kv_heads head_size scale attn_type kv_cache_dtype sliding_window alibi_slopes"
                " logits_soft_cap sinks total_cp_world_size",
                "whether ours can compute the layer",
            ),
            *_fields(
                module,
                f"{name}Metadata",
                "num_actual_tokens max_query_len max_seq_len query_start_loc seq_lens block_table causal"
                " rswa_prefix_lens",
                "a step",
            ),
        )
    ),
    *_fields(_BACKENDS[0][0], "TritonAttentionImpl", "chunk_lookback", "whether ours can compute the layer"),
    *_fields(
        _BACKENDS[0][0],
        "TritonAttentionMetadata",
        "mm_prefix_range mm_prefix_range_tensor",
        "queries that see ahead",
    ),
    *_fields(
        _BACKENDS[1][0],
        "FlashAttentionMetadata",
        "mm_prefix_query_range_tensor",
        "queries that see ahead",
    ),
    *_fields("vllm.v1.attention.backend", "AttentionType", "DECODER", "whether ours can compute the layer"),
    Symbol(
        "vllm.v1.attention.backends.registry",
        "register_backend",
        "puts ours in the place of vLLM's",
        parameters=("backend", "class_path"),
    ),
    Symbol(
        "vllm.v1.attention.backends.registry", "AttentionBackendEnum.clear_override", "takes ours out again"
    ),
    *_fields(
        "vllm.v1.attention.backends.registry",
        "AttentionBackendEnum",
        "FLASH_ATTN TRITON_ATTN",
        "whose places ours take",
    ),
    Symbol(
        "vllm.config", "get_current_vllm_config_or_none", "whether microbatches overlap, as layers are built"
    ),
    *_fields("vllm.config", "VllmConfig", "parallel_config", "heads of a rank, microbatches"),
    *_fields("vllm.config", "ParallelConfig", "use_ubatching", "microbatches"),
    Symbol("vllm.config", "ModelConfig.get_head_size", "the shape that attention is checked for"),
    Symbol(
        "vllm.config",
        "ModelConfig.get_num_attention_heads",
        "the shape that attention is checked for",
        parameters=("parallel_config",),
    ),
    Symbol(
        "vllm.config",
        "ModelConfig.get_num_kv_heads",
        "the shape that attention is checked for",
        parameters=("parallel_config",),
    ),
    *_fields("vllm.config", "ModelConfig", "use_mla", "which has attention of its own"),
    Symbol("vllm", "envs", "whether results must not depend on the batch", Kind.ATTRIBUTE),
)

SYMBOLS: tuple[Symbol, ...] = (
    *_CONFIG,
    *_CORE,
    *_REQUEST,
    *_RUNNER,
    *_WORKER,
    *_MIGRATION,
    *_ATTENTION,
    *_SAMPLER,
    *_TWIN,
    *_EAGLE3,
)
