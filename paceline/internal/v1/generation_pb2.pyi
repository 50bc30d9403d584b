import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from paceline.internal.v1 import weight_peer_pb2 as _weight_peer_pb2
from paceline.v1 import fleet_pb2 as _fleet_pb2
from paceline.v1 import sample_pb2 as _sample_pb2
from paceline.v1 import weight_pb2 as _weight_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkItem(_message.Message):
    __slots__ = ("handle", "prompt_token_ids", "prefix_token_ids", "sampling", "exactness", "seed", "policy_version", "reference_token_ids", "prompt_id", "run_id", "slot", "step", "trace_parent", "streamed", "environment_last")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TRACE_PARENT_FIELD_NUMBER: _ClassVar[int]
    STREAMED_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_LAST_FIELD_NUMBER: _ClassVar[int]
    handle: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prefix_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sample_pb2.SamplingParams
    exactness: _sample_pb2.Exactness
    seed: int
    policy_version: int
    reference_token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_id: str
    run_id: str
    slot: int
    step: int
    trace_parent: str
    streamed: bool
    environment_last: bool
    def __init__(self, handle: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., prefix_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sample_pb2.SamplingParams, _Mapping]] = ..., exactness: _Optional[_Union[_sample_pb2.Exactness, _Mapping]] = ..., seed: _Optional[int] = ..., policy_version: _Optional[int] = ..., reference_token_ids: _Optional[_Iterable[int]] = ..., prompt_id: _Optional[str] = ..., run_id: _Optional[str] = ..., slot: _Optional[int] = ..., step: _Optional[int] = ..., trace_parent: _Optional[str] = ..., streamed: bool = ..., environment_last: bool = ...) -> None: ...

class WorkRequest(_message.Message):
    __slots__ = ("start", "abort", "claim", "report_interval")
    START_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    CLAIM_FIELD_NUMBER: _ClassVar[int]
    REPORT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    start: _containers.RepeatedCompositeFieldContainer[WorkItem]
    abort: _containers.RepeatedScalarFieldContainer[int]
    claim: _containers.RepeatedCompositeFieldContainer[Claim]
    report_interval: _duration_pb2.Duration
    def __init__(self, start: _Optional[_Iterable[_Union[WorkItem, _Mapping]]] = ..., abort: _Optional[_Iterable[int]] = ..., claim: _Optional[_Iterable[_Union[Claim, _Mapping]]] = ..., report_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Claim(_message.Message):
    __slots__ = ("handle", "migration_id")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    MIGRATION_ID_FIELD_NUMBER: _ClassVar[int]
    handle: int
    migration_id: str
    def __init__(self, handle: _Optional[int] = ..., migration_id: _Optional[str] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("handle", "tokens", "verified_logprobs", "prompt_logprobs")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    tokens: _sample_pb2.TokenColumns
    verified_logprobs: _containers.RepeatedScalarFieldContainer[float]
    prompt_logprobs: _sample_pb2.TokenColumns
    def __init__(self, handle: _Optional[int] = ..., tokens: _Optional[_Union[_sample_pb2.TokenColumns, _Mapping]] = ..., verified_logprobs: _Optional[_Iterable[float]] = ..., prompt_logprobs: _Optional[_Union[_sample_pb2.TokenColumns, _Mapping]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("handle", "finish_reason", "draft_sources", "decode_steps", "verify_steps", "queue_time", "generation_time", "reused_prefix", "cached_tokens", "resume_on", "stop_string", "cached_context_tokens", "prefill_time", "verify_time", "plain_time")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SOURCES_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_STEPS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TIME_FIELD_NUMBER: _ClassVar[int]
    REUSED_PREFIX_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUME_ON_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    CACHED_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TIME_FIELD_NUMBER: _ClassVar[int]
    VERIFY_TIME_FIELD_NUMBER: _ClassVar[int]
    PLAIN_TIME_FIELD_NUMBER: _ClassVar[int]
    handle: int
    finish_reason: _sample_pb2.FinishReason
    draft_sources: _containers.RepeatedCompositeFieldContainer[_sample_pb2.DraftSource]
    decode_steps: int
    verify_steps: int
    queue_time: _duration_pb2.Duration
    generation_time: _duration_pb2.Duration
    reused_prefix: int
    cached_tokens: int
    resume_on: str
    stop_string: str
    cached_context_tokens: int
    prefill_time: _duration_pb2.Duration
    verify_time: _duration_pb2.Duration
    plain_time: _duration_pb2.Duration
    def __init__(self, handle: _Optional[int] = ..., finish_reason: _Optional[_Union[_sample_pb2.FinishReason, str]] = ..., draft_sources: _Optional[_Iterable[_Union[_sample_pb2.DraftSource, _Mapping]]] = ..., decode_steps: _Optional[int] = ..., verify_steps: _Optional[int] = ..., queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., generation_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., reused_prefix: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., resume_on: _Optional[str] = ..., stop_string: _Optional[str] = ..., cached_context_tokens: _Optional[int] = ..., prefill_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., verify_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., plain_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("handle", "code", "message", "field", "reason")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    handle: int
    code: int
    message: str
    field: str
    reason: str
    def __init__(self, handle: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class WorkResponse(_message.Message):
    __slots__ = ("deltas", "finished", "refused", "load", "policy_version", "moved")
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    deltas: _containers.RepeatedCompositeFieldContainer[Delta]
    finished: _containers.RepeatedCompositeFieldContainer[Finished]
    refused: _containers.RepeatedCompositeFieldContainer[Refused]
    load: _fleet_pb2.InstanceLoad
    policy_version: int
    moved: _containers.RepeatedCompositeFieldContainer[Moved]
    def __init__(self, deltas: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., finished: _Optional[_Iterable[_Union[Finished, _Mapping]]] = ..., refused: _Optional[_Iterable[_Union[Refused, _Mapping]]] = ..., load: _Optional[_Union[_fleet_pb2.InstanceLoad, _Mapping]] = ..., policy_version: _Optional[int] = ..., moved: _Optional[_Iterable[_Union[Moved, _Mapping]]] = ...) -> None: ...

class Moved(_message.Message):
    __slots__ = ("handle", "migration_id", "instance_id", "address", "response_tokens")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    MIGRATION_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    handle: int
    migration_id: str
    instance_id: str
    address: str
    response_tokens: int
    def __init__(self, handle: _Optional[int] = ..., migration_id: _Optional[str] = ..., instance_id: _Optional[str] = ..., address: _Optional[str] = ..., response_tokens: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("instance", "staged_policy_version", "staged_checksum")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    STAGED_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    STAGED_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    instance: _fleet_pb2.Instance
    staged_policy_version: int
    staged_checksum: str
    def __init__(self, instance: _Optional[_Union[_fleet_pb2.Instance, _Mapping]] = ..., staged_policy_version: _Optional[int] = ..., staged_checksum: _Optional[str] = ...) -> None: ...

class PauseEngineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseEngineResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeEngineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeEngineResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainEngineRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainEngineResponse(_message.Message):
    __slots__ = ("handed_over",)
    HANDED_OVER_FIELD_NUMBER: _ClassVar[int]
    handed_over: int
    def __init__(self, handed_over: _Optional[int] = ...) -> None: ...

class StageWeightsRequest(_message.Message):
    __slots__ = ("policy_version", "target", "disk", "peers")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DISK_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    target: _weight_pb2.WeightTarget
    disk: _weight_pb2.DiskWeights
    peers: _weight_peer_pb2.PeerWeights
    def __init__(self, policy_version: _Optional[int] = ..., target: _Optional[_Union[_weight_pb2.WeightTarget, str]] = ..., disk: _Optional[_Union[_weight_pb2.DiskWeights, _Mapping]] = ..., peers: _Optional[_Union[_weight_peer_pb2.PeerWeights, _Mapping]] = ...) -> None: ...

class StageWeightsResponse(_message.Message):
    __slots__ = ("checksum", "stage_time")
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    STAGE_TIME_FIELD_NUMBER: _ClassVar[int]
    checksum: str
    stage_time: _duration_pb2.Duration
    def __init__(self, checksum: _Optional[str] = ..., stage_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ApplyWeightsRequest(_message.Message):
    __slots__ = ("policy_version", "in_flight")
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    in_flight: _weight_pb2.InFlight
    def __init__(self, policy_version: _Optional[int] = ..., in_flight: _Optional[_Union[_weight_pb2.InFlight, str]] = ...) -> None: ...

class ApplyWeightsResponse(_message.Message):
    __slots__ = ("apply_time", "dropped_blocks", "halt_time", "continued_samples", "kept_samples")
    APPLY_TIME_FIELD_NUMBER: _ClassVar[int]
    DROPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HALT_TIME_FIELD_NUMBER: _ClassVar[int]
    CONTINUED_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    KEPT_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    apply_time: _duration_pb2.Duration
    dropped_blocks: int
    halt_time: _duration_pb2.Duration
    continued_samples: int
    kept_samples: int
    def __init__(self, apply_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., dropped_blocks: _Optional[int] = ..., halt_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., continued_samples: _Optional[int] = ..., kept_samples: _Optional[int] = ...) -> None: ...

class DiscardWeightsRequest(_message.Message):
    __slots__ = ("policy_version",)
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    policy_version: int
    def __init__(self, policy_version: _Optional[int] = ...) -> None: ...

class DiscardWeightsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
