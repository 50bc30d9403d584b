import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RolloutKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLLOUT_KIND_UNSPECIFIED: _ClassVar[RolloutKind]
    ROLLOUT_KIND_PREGENERATED: _ClassVar[RolloutKind]
    ROLLOUT_KIND_HISTORY: _ClassVar[RolloutKind]
ROLLOUT_KIND_UNSPECIFIED: RolloutKind
ROLLOUT_KIND_PREGENERATED: RolloutKind
ROLLOUT_KIND_HISTORY: RolloutKind

class Rollout(_message.Message):
    __slots__ = ("run_id", "prompt_id", "slot", "policy_version", "kind", "step", "seed", "token_ids", "logprobs", "finished", "fork")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    prompt_id: str
    slot: int
    policy_version: int
    kind: RolloutKind
    step: int
    seed: int
    token_ids: bytes
    logprobs: bytes
    finished: bool
    fork: int
    def __init__(self, run_id: _Optional[str] = ..., prompt_id: _Optional[str] = ..., slot: _Optional[int] = ..., policy_version: _Optional[int] = ..., kind: _Optional[_Union[RolloutKind, str]] = ..., step: _Optional[int] = ..., seed: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., finished: bool = ..., fork: _Optional[int] = ...) -> None: ...

class PutRolloutsRequest(_message.Message):
    __slots__ = ("rollouts",)
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[Rollout]
    def __init__(self, rollouts: _Optional[_Iterable[_Union[Rollout, _Mapping]]] = ...) -> None: ...

class PutRolloutsResponse(_message.Message):
    __slots__ = ("stored", "refused")
    STORED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    stored: int
    refused: int
    def __init__(self, stored: _Optional[int] = ..., refused: _Optional[int] = ...) -> None: ...

class FetchRolloutsRequest(_message.Message):
    __slots__ = ("run_id", "prompt_ids", "omit_covered_history")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OMIT_COVERED_HISTORY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[str]
    omit_covered_history: bool
    def __init__(self, run_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[str]] = ..., omit_covered_history: bool = ...) -> None: ...

class FetchRolloutsResponse(_message.Message):
    __slots__ = ("rollouts",)
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[Rollout]
    def __init__(self, rollouts: _Optional[_Iterable[_Union[Rollout, _Mapping]]] = ...) -> None: ...

class EvictRolloutsRequest(_message.Message):
    __slots__ = ("run_id", "prompt_ids", "before_policy_version", "kind")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    BEFORE_POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[str]
    before_policy_version: int
    kind: RolloutKind
    def __init__(self, run_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[str]] = ..., before_policy_version: _Optional[int] = ..., kind: _Optional[_Union[RolloutKind, str]] = ...) -> None: ...

class EvictRolloutsResponse(_message.Message):
    __slots__ = ("removed",)
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    removed: int
    def __init__(self, removed: _Optional[int] = ...) -> None: ...

class GetDraftStatsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDraftStatsResponse(_message.Message):
    __slots__ = ("prompts", "rollouts", "tokens", "bytes", "budget_bytes", "evicted", "snapshot_at")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    BUDGET_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_AT_FIELD_NUMBER: _ClassVar[int]
    prompts: int
    rollouts: int
    tokens: int
    bytes: int
    budget_bytes: int
    evicted: int
    snapshot_at: _timestamp_pb2.Timestamp
    def __init__(self, prompts: _Optional[int] = ..., rollouts: _Optional[int] = ..., tokens: _Optional[int] = ..., bytes: _Optional[int] = ..., budget_bytes: _Optional[int] = ..., evicted: _Optional[int] = ..., snapshot_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...
