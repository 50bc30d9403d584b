import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from paceline.v1 import sample_pb2 as _sample_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_PHASE_UNSPECIFIED: _ClassVar[RunPhase]
    RUN_PHASE_ROLLOUT: _ClassVar[RunPhase]
    RUN_PHASE_UPDATE: _ClassVar[RunPhase]
    RUN_PHASE_APPLYING: _ClassVar[RunPhase]
RUN_PHASE_UNSPECIFIED: RunPhase
RUN_PHASE_ROLLOUT: RunPhase
RUN_PHASE_UPDATE: RunPhase
RUN_PHASE_APPLYING: RunPhase

class SetRunRequest(_message.Message):
    __slots__ = ("run_id", "phase", "policy_version", "step", "unfinished", "waiting", "hint_ids", "closed")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    UNFINISHED_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    HINT_IDS_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    phase: RunPhase
    policy_version: int
    step: int
    unfinished: int
    waiting: int
    hint_ids: _containers.RepeatedScalarFieldContainer[str]
    closed: bool
    def __init__(self, run_id: _Optional[str] = ..., phase: _Optional[_Union[RunPhase, str]] = ..., policy_version: _Optional[int] = ..., step: _Optional[int] = ..., unfinished: _Optional[int] = ..., waiting: _Optional[int] = ..., hint_ids: _Optional[_Iterable[str]] = ..., closed: bool = ...) -> None: ...

class SetRunResponse(_message.Message):
    __slots__ = ("missing_hint_ids",)
    MISSING_HINT_IDS_FIELD_NUMBER: _ClassVar[int]
    missing_hint_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, missing_hint_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class HintedGroup(_message.Message):
    __slots__ = ("prompt_id", "prompt_token_ids", "sampling", "seeds", "expected_tokens")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sample_pb2.SamplingParams
    seeds: _containers.RepeatedScalarFieldContainer[int]
    expected_tokens: float
    def __init__(self, prompt_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sample_pb2.SamplingParams, _Mapping]] = ..., seeds: _Optional[_Iterable[int]] = ..., expected_tokens: _Optional[float] = ...) -> None: ...

class PutHintRequest(_message.Message):
    __slots__ = ("run_id", "hint_id", "step", "exactness", "groups")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    HINT_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    hint_id: str
    step: int
    exactness: _sample_pb2.Exactness
    groups: _containers.RepeatedCompositeFieldContainer[HintedGroup]
    def __init__(self, run_id: _Optional[str] = ..., hint_id: _Optional[str] = ..., step: _Optional[int] = ..., exactness: _Optional[_Union[_sample_pb2.Exactness, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[HintedGroup, _Mapping]]] = ...) -> None: ...

class PutHintResponse(_message.Message):
    __slots__ = ("samples",)
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    samples: int
    def __init__(self, samples: _Optional[int] = ...) -> None: ...

class GetCoverageRequest(_message.Message):
    __slots__ = ("run_id", "step")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    step: int
    def __init__(self, run_id: _Optional[str] = ..., step: _Optional[int] = ...) -> None: ...

class SlotCoverage(_message.Message):
    __slots__ = ("prompt_id", "slot", "tokens", "finished")
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    prompt_id: str
    slot: int
    tokens: int
    finished: bool
    def __init__(self, prompt_id: _Optional[str] = ..., slot: _Optional[int] = ..., tokens: _Optional[int] = ..., finished: bool = ...) -> None: ...

class GetCoverageResponse(_message.Message):
    __slots__ = ("slots",)
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    slots: _containers.RepeatedCompositeFieldContainer[SlotCoverage]
    def __init__(self, slots: _Optional[_Iterable[_Union[SlotCoverage, _Mapping]]] = ...) -> None: ...

class PregenerationTask(_message.Message):
    __slots__ = ("lease", "run_id", "prompt_id", "slot", "step", "seed", "prompt_token_ids", "sampling", "exactness")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    EXACTNESS_FIELD_NUMBER: _ClassVar[int]
    lease: int
    run_id: str
    prompt_id: str
    slot: int
    step: int
    seed: int
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sample_pb2.SamplingParams
    exactness: _sample_pb2.Exactness
    def __init__(self, lease: _Optional[int] = ..., run_id: _Optional[str] = ..., prompt_id: _Optional[str] = ..., slot: _Optional[int] = ..., step: _Optional[int] = ..., seed: _Optional[int] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sample_pb2.SamplingParams, _Mapping]] = ..., exactness: _Optional[_Union[_sample_pb2.Exactness, _Mapping]] = ...) -> None: ...

class PregenerationProgress(_message.Message):
    __slots__ = ("lease", "tokens", "finished", "returned")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    lease: int
    tokens: int
    finished: bool
    returned: bool
    def __init__(self, lease: _Optional[int] = ..., tokens: _Optional[int] = ..., finished: bool = ..., returned: bool = ...) -> None: ...

class PollWorkRequest(_message.Message):
    __slots__ = ("instance_id", "epoch", "policy_version", "room", "progress", "coordinator_epoch", "serving")
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROOM_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    instance_id: str
    epoch: int
    policy_version: int
    room: int
    progress: _containers.RepeatedCompositeFieldContainer[PregenerationProgress]
    coordinator_epoch: int
    serving: bool
    def __init__(self, instance_id: _Optional[str] = ..., epoch: _Optional[int] = ..., policy_version: _Optional[int] = ..., room: _Optional[int] = ..., progress: _Optional[_Iterable[_Union[PregenerationProgress, _Mapping]]] = ..., coordinator_epoch: _Optional[int] = ..., serving: bool = ...) -> None: ...

class PollWorkResponse(_message.Message):
    __slots__ = ("coordinator_epoch", "tasks", "halt", "revoked", "sleep", "poll_steps", "halted_at")
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    HALT_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    SLEEP_FIELD_NUMBER: _ClassVar[int]
    POLL_STEPS_FIELD_NUMBER: _ClassVar[int]
    HALTED_AT_FIELD_NUMBER: _ClassVar[int]
    coordinator_epoch: int
    tasks: _containers.RepeatedCompositeFieldContainer[PregenerationTask]
    halt: bool
    revoked: _containers.RepeatedScalarFieldContainer[int]
    sleep: bool
    poll_steps: int
    halted_at: _timestamp_pb2.Timestamp
    def __init__(self, coordinator_epoch: _Optional[int] = ..., tasks: _Optional[_Iterable[_Union[PregenerationTask, _Mapping]]] = ..., halt: bool = ..., revoked: _Optional[_Iterable[int]] = ..., sleep: bool = ..., poll_steps: _Optional[int] = ..., halted_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...
