import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LogprobsMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOGPROBS_MODE_UNSPECIFIED: _ClassVar[LogprobsMode]
    LOGPROBS_MODE_RAW: _ClassVar[LogprobsMode]
    LOGPROBS_MODE_PROCESSED: _ClassVar[LogprobsMode]

class ExactnessLevel(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXACTNESS_LEVEL_UNSPECIFIED: _ClassVar[ExactnessLevel]
    EXACTNESS_LEVEL_EXACT: _ClassVar[ExactnessLevel]
    EXACTNESS_LEVEL_COUPLED_HISTORY: _ClassVar[ExactnessLevel]
    EXACTNESS_LEVEL_LENIENT: _ClassVar[ExactnessLevel]
    EXACTNESS_LEVEL_REJECTION: _ClassVar[ExactnessLevel]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]
    FINISH_REASON_ABANDONED: _ClassVar[FinishReason]

class SampleStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SAMPLE_STATUS_UNSPECIFIED: _ClassVar[SampleStatus]
    SAMPLE_STATUS_COMPLETED: _ClassVar[SampleStatus]
    SAMPLE_STATUS_TRUNCATED: _ClassVar[SampleStatus]
    SAMPLE_STATUS_ABORTED: _ClassVar[SampleStatus]
    SAMPLE_STATUS_FAILED: _ClassVar[SampleStatus]
LOGPROBS_MODE_UNSPECIFIED: LogprobsMode
LOGPROBS_MODE_RAW: LogprobsMode
LOGPROBS_MODE_PROCESSED: LogprobsMode
EXACTNESS_LEVEL_UNSPECIFIED: ExactnessLevel
EXACTNESS_LEVEL_EXACT: ExactnessLevel
EXACTNESS_LEVEL_COUPLED_HISTORY: ExactnessLevel
EXACTNESS_LEVEL_LENIENT: ExactnessLevel
EXACTNESS_LEVEL_REJECTION: ExactnessLevel
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason
FINISH_REASON_ABANDONED: FinishReason
SAMPLE_STATUS_UNSPECIFIED: SampleStatus
SAMPLE_STATUS_COMPLETED: SampleStatus
SAMPLE_STATUS_TRUNCATED: SampleStatus
SAMPLE_STATUS_ABORTED: SampleStatus
SAMPLE_STATUS_FAILED: SampleStatus

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "max_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "logprobs_mode", "stop", "allowed_token_ids", "top_logprobs", "prompt_logprobs", "json_schema")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_MODE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs_mode: LogprobsMode
    stop: _containers.RepeatedScalarFieldContainer[str]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: int
    prompt_logprobs: int
    json_schema: str
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., logprobs_mode: _Optional[_Union[LogprobsMode, str]] = ..., stop: _Optional[_Iterable[str]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., json_schema: _Optional[str] = ...) -> None: ...

class Exactness(_message.Message):
    __slots__ = ("level", "lenience", "reuse_delay", "kl_target", "diversity_floor")
    LEVEL_FIELD_NUMBER: _ClassVar[int]
    LENIENCE_FIELD_NUMBER: _ClassVar[int]
    REUSE_DELAY_FIELD_NUMBER: _ClassVar[int]
    KL_TARGET_FIELD_NUMBER: _ClassVar[int]
    DIVERSITY_FLOOR_FIELD_NUMBER: _ClassVar[int]
    level: ExactnessLevel
    lenience: float
    reuse_delay: int
    kl_target: float
    diversity_floor: float
    def __init__(self, level: _Optional[_Union[ExactnessLevel, str]] = ..., lenience: _Optional[float] = ..., reuse_delay: _Optional[int] = ..., kl_target: _Optional[float] = ..., diversity_floor: _Optional[float] = ...) -> None: ...

class VersionRun(_message.Message):
    __slots__ = ("tokens", "policy_version", "mixed_kv")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    MIXED_KV_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    policy_version: int
    mixed_kv: bool
    def __init__(self, tokens: _Optional[int] = ..., policy_version: _Optional[int] = ..., mixed_kv: bool = ...) -> None: ...

class TokenColumns(_message.Message):
    __slots__ = ("token_ids", "logprobs", "top_token_ids", "top_logprobs", "versions")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    versions: _containers.RepeatedCompositeFieldContainer[VersionRun]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., versions: _Optional[_Iterable[_Union[VersionRun, _Mapping]]] = ...) -> None: ...

class DraftSource(_message.Message):
    __slots__ = ("drafter", "drafted", "accepted")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    drafted: int
    accepted: int
    def __init__(self, drafter: _Optional[str] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...

class InstanceSpan(_message.Message):
    __slots__ = ("instance_id", "begin_token", "end_token", "begin", "end", "cached_context_tokens")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BEGIN_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    CACHED_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    begin_token: int
    end_token: int
    begin: _timestamp_pb2.Timestamp
    end: _timestamp_pb2.Timestamp
    cached_context_tokens: int
    def __init__(self, instance_id: _Optional[str] = ..., begin_token: _Optional[int] = ..., end_token: _Optional[int] = ..., begin: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., end: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., cached_context_tokens: _Optional[int] = ...) -> None: ...

class EnvironmentSpan(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class ToolUse(_message.Message):
    __slots__ = ("call_token_ids", "call_strings", "max_calls", "max_wait")
    CALL_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CALL_STRINGS_FIELD_NUMBER: _ClassVar[int]
    MAX_CALLS_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_FIELD_NUMBER: _ClassVar[int]
    call_token_ids: _containers.RepeatedScalarFieldContainer[int]
    call_strings: _containers.RepeatedScalarFieldContainer[str]
    max_calls: int
    max_wait: _duration_pb2.Duration
    def __init__(self, call_token_ids: _Optional[_Iterable[int]] = ..., call_strings: _Optional[_Iterable[str]] = ..., max_calls: _Optional[int] = ..., max_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Provenance(_message.Message):
    __slots__ = ("draft_sources", "drafted", "accepted", "decode_steps", "verify_steps", "reused_prefix", "migrations", "resubmissions", "exactness", "lossless", "instance_spans", "queue_time", "generation_time", "cached_tokens")
    DRAFT_SOURCES_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    VERIFY_STEPS_FIELD_NUMBER: _ClassVar[int]
    REUSED_PREFIX_FIELD_NUMBER: _ClassVar[int]
    MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    RESUBMISSIONS_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    LOSSLESS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_SPANS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_TIME_FIELD_NUMBER: _ClassVar[int]
    GENERATION_TIME_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    draft_sources: _containers.RepeatedCompositeFieldContainer[DraftSource]
    drafted: int
    accepted: int
    decode_steps: int
    verify_steps: int
    reused_prefix: int
    migrations: int
    resubmissions: int
    exactness: Exactness
    lossless: bool
    instance_spans: _containers.RepeatedCompositeFieldContainer[InstanceSpan]
    queue_time: _duration_pb2.Duration
    generation_time: _duration_pb2.Duration
    cached_tokens: int
    def __init__(self, draft_sources: _Optional[_Iterable[_Union[DraftSource, _Mapping]]] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., decode_steps: _Optional[int] = ..., verify_steps: _Optional[int] = ..., reused_prefix: _Optional[int] = ..., migrations: _Optional[int] = ..., resubmissions: _Optional[int] = ..., exactness: _Optional[_Union[Exactness, _Mapping]] = ..., lossless: bool = ..., instance_spans: _Optional[_Iterable[_Union[InstanceSpan, _Mapping]]] = ..., queue_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., generation_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("prompt_id", "slot", "tokens", "finish_reason", "status", "provenance", "seed", "error", "nonfinite_logprobs", "stop_string", "prompt_logprobs", "environment_spans", "calls", "failure")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    NONFINITE_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_STRING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_SPANS_FIELD_NUMBER: _ClassVar[int]
    CALLS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    slot: int
    tokens: TokenColumns
    finish_reason: FinishReason
    status: SampleStatus
    provenance: Provenance
    seed: int
    error: str
    nonfinite_logprobs: _containers.RepeatedScalarFieldContainer[int]
    stop_string: str
    prompt_logprobs: TokenColumns
    environment_spans: _containers.RepeatedCompositeFieldContainer[EnvironmentSpan]
    calls: _containers.RepeatedScalarFieldContainer[int]
    failure: SampleFailure
    def __init__(self, prompt_id: _Optional[str] = ..., slot: _Optional[int] = ..., tokens: _Optional[_Union[TokenColumns, _Mapping]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., status: _Optional[_Union[SampleStatus, str]] = ..., provenance: _Optional[_Union[Provenance, _Mapping]] = ..., seed: _Optional[int] = ..., error: _Optional[str] = ..., nonfinite_logprobs: _Optional[_Iterable[int]] = ..., stop_string: _Optional[str] = ..., prompt_logprobs: _Optional[_Union[TokenColumns, _Mapping]] = ..., environment_spans: _Optional[_Iterable[_Union[EnvironmentSpan, _Mapping]]] = ..., calls: _Optional[_Iterable[int]] = ..., failure: _Optional[_Union[SampleFailure, _Mapping]] = ...) -> None: ...

class SampleFailure(_message.Message):
    __slots__ = ("code", "field", "reason")
    CODE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    code: int
    field: str
    reason: str
    def __init__(self, code: _Optional[int] = ..., field: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...
