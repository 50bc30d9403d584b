import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from paceline.internal.v1 import draft_pb2 as _draft_pb2
from paceline.internal.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class MoveOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MOVE_OUTCOME_UNSPECIFIED: _ClassVar[MoveOutcome]
    MOVE_OUTCOME_MOVED: _ClassVar[MoveOutcome]
    MOVE_OUTCOME_REFUSED: _ClassVar[MoveOutcome]
    MOVE_OUTCOME_FAILED: _ClassVar[MoveOutcome]

class MoveBy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MOVE_BY_UNSPECIFIED: _ClassVar[MoveBy]
    MOVE_BY_KV: _ClassVar[MoveBy]
    MOVE_BY_PREFIX: _ClassVar[MoveBy]

class MoveReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MOVE_REASON_UNSPECIFIED: _ClassVar[MoveReason]
    MOVE_REASON_UNKNOWN_SAMPLE: _ClassVar[MoveReason]
    MOVE_REASON_NOT_DECODING: _ClassVar[MoveReason]
    MOVE_REASON_REUSING: _ClassVar[MoveReason]
    MOVE_REASON_IN_TRANSIT: _ClassVar[MoveReason]
    MOVE_REASON_DONOR_BUSY: _ClassVar[MoveReason]
    MOVE_REASON_UNSUPPORTED: _ClassVar[MoveReason]
    MOVE_REASON_CLOSED: _ClassVar[MoveReason]
    MOVE_REASON_VERSION: _ClassVar[MoveReason]
    MOVE_REASON_GEOMETRY: _ClassVar[MoveReason]
    MOVE_REASON_NO_KV: _ClassVar[MoveReason]
    MOVE_REASON_FULL: _ClassVar[MoveReason]
    MOVE_REASON_RECEIVER_BUSY: _ClassVar[MoveReason]
    MOVE_REASON_INVALID: _ClassVar[MoveReason]
    MOVE_REASON_SELF: _ClassVar[MoveReason]
    MOVE_REASON_FINISHED: _ClassVar[MoveReason]
    MOVE_REASON_ABORTED: _ClassVar[MoveReason]
    MOVE_REASON_PREEMPTED: _ClassVar[MoveReason]
    MOVE_REASON_OUTGROWN: _ClassVar[MoveReason]
    MOVE_REASON_RECEIVER_LOST: _ClassVar[MoveReason]
    MOVE_REASON_CONNECTION: _ClassVar[MoveReason]
    MOVE_REASON_DEADLINE: _ClassVar[MoveReason]
    MOVE_REASON_CHECKSUM: _ClassVar[MoveReason]
    MOVE_REASON_WITHDRAWN: _ClassVar[MoveReason]
    MOVE_REASON_INTERNAL: _ClassVar[MoveReason]

class MigrationState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MIGRATION_STATE_UNSPECIFIED: _ClassVar[MigrationState]
    MIGRATION_STATE_OPEN: _ClassVar[MigrationState]
    MIGRATION_STATE_COMMITTED: _ClassVar[MigrationState]
    MIGRATION_STATE_CLAIMED: _ClassVar[MigrationState]
    MIGRATION_STATE_CANCELLED: _ClassVar[MigrationState]
    MIGRATION_STATE_EXPIRED: _ClassVar[MigrationState]
MOVE_OUTCOME_UNSPECIFIED: MoveOutcome
MOVE_OUTCOME_MOVED: MoveOutcome
MOVE_OUTCOME_REFUSED: MoveOutcome
MOVE_OUTCOME_FAILED: MoveOutcome
MOVE_BY_UNSPECIFIED: MoveBy
MOVE_BY_KV: MoveBy
MOVE_BY_PREFIX: MoveBy
MOVE_REASON_UNSPECIFIED: MoveReason
MOVE_REASON_UNKNOWN_SAMPLE: MoveReason
MOVE_REASON_NOT_DECODING: MoveReason
MOVE_REASON_REUSING: MoveReason
MOVE_REASON_IN_TRANSIT: MoveReason
MOVE_REASON_DONOR_BUSY: MoveReason
MOVE_REASON_UNSUPPORTED: MoveReason
MOVE_REASON_CLOSED: MoveReason
MOVE_REASON_VERSION: MoveReason
MOVE_REASON_GEOMETRY: MoveReason
MOVE_REASON_NO_KV: MoveReason
MOVE_REASON_FULL: MoveReason
MOVE_REASON_RECEIVER_BUSY: MoveReason
MOVE_REASON_INVALID: MoveReason
MOVE_REASON_SELF: MoveReason
MOVE_REASON_FINISHED: MoveReason
MOVE_REASON_ABORTED: MoveReason
MOVE_REASON_PREEMPTED: MoveReason
MOVE_REASON_OUTGROWN: MoveReason
MOVE_REASON_RECEIVER_LOST: MoveReason
MOVE_REASON_CONNECTION: MoveReason
MOVE_REASON_DEADLINE: MoveReason
MOVE_REASON_CHECKSUM: MoveReason
MOVE_REASON_WITHDRAWN: MoveReason
MOVE_REASON_INTERNAL: MoveReason
MIGRATION_STATE_UNSPECIFIED: MigrationState
MIGRATION_STATE_OPEN: MigrationState
MIGRATION_STATE_COMMITTED: MigrationState
MIGRATION_STATE_CLAIMED: MigrationState
MIGRATION_STATE_CANCELLED: MigrationState
MIGRATION_STATE_EXPIRED: MigrationState

class ListSamplesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListedSample(_message.Message):
    __slots__ = ("key", "handle", "prompt_tokens", "response_tokens", "max_tokens", "acceptance", "kv_blocks", "immovable", "run_id", "prompt_id", "slot", "step", "migrations")
    KEY_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    IMMOVABLE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    key: str
    handle: int
    prompt_tokens: int
    response_tokens: int
    max_tokens: int
    acceptance: float
    kv_blocks: int
    immovable: MoveReason
    run_id: str
    prompt_id: str
    slot: int
    step: int
    migrations: int
    def __init__(self, key: _Optional[str] = ..., handle: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., response_tokens: _Optional[int] = ..., max_tokens: _Optional[int] = ..., acceptance: _Optional[float] = ..., kv_blocks: _Optional[int] = ..., immovable: _Optional[_Union[MoveReason, str]] = ..., run_id: _Optional[str] = ..., prompt_id: _Optional[str] = ..., slot: _Optional[int] = ..., step: _Optional[int] = ..., migrations: _Optional[int] = ...) -> None: ...

class ListSamplesResponse(_message.Message):
    __slots__ = ("samples", "block_size", "free_blocks", "total_blocks", "max_running", "free_capacity", "policy_version", "steps", "step_time")
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    FREE_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_FIELD_NUMBER: _ClassVar[int]
    samples: _containers.RepeatedCompositeFieldContainer[ListedSample]
    block_size: int
    free_blocks: int
    total_blocks: int
    max_running: int
    free_capacity: int
    policy_version: int
    steps: int
    step_time: _duration_pb2.Duration
    def __init__(self, samples: _Optional[_Iterable[_Union[ListedSample, _Mapping]]] = ..., block_size: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., max_running: _Optional[int] = ..., free_capacity: _Optional[int] = ..., policy_version: _Optional[int] = ..., steps: _Optional[int] = ..., step_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class MoveRequest(_message.Message):
    __slots__ = ("key", "receiver_id", "receiver_address", "migration_id", "timeout", "by")
    KEY_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_ID_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MIGRATION_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    key: str
    receiver_id: str
    receiver_address: str
    migration_id: str
    timeout: _duration_pb2.Duration
    by: MoveBy
    def __init__(self, key: _Optional[str] = ..., receiver_id: _Optional[str] = ..., receiver_address: _Optional[str] = ..., migration_id: _Optional[str] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., by: _Optional[_Union[MoveBy, str]] = ...) -> None: ...

class MoveResponse(_message.Message):
    __slots__ = ("migration",)
    MIGRATION_FIELD_NUMBER: _ClassVar[int]
    migration: Migration
    def __init__(self, migration: _Optional[_Union[Migration, _Mapping]] = ...) -> None: ...

class Migration(_message.Message):
    __slots__ = ("migration_id", "state", "outcome", "reason", "message", "key", "receiver_id", "response_tokens", "copied_bytes", "delta_bytes", "shared_blocks", "reserve_time", "copy_time", "stall_time", "stall_steps", "resume_time", "total_time", "by")
    MIGRATION_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    RECEIVER_ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COPIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DELTA_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVE_TIME_FIELD_NUMBER: _ClassVar[int]
    COPY_TIME_FIELD_NUMBER: _ClassVar[int]
    STALL_TIME_FIELD_NUMBER: _ClassVar[int]
    STALL_STEPS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TIME_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TIME_FIELD_NUMBER: _ClassVar[int]
    BY_FIELD_NUMBER: _ClassVar[int]
    migration_id: str
    state: MigrationState
    outcome: MoveOutcome
    reason: MoveReason
    message: str
    key: str
    receiver_id: str
    response_tokens: int
    copied_bytes: int
    delta_bytes: int
    shared_blocks: int
    reserve_time: _duration_pb2.Duration
    copy_time: _duration_pb2.Duration
    stall_time: _duration_pb2.Duration
    stall_steps: float
    resume_time: _duration_pb2.Duration
    total_time: _duration_pb2.Duration
    by: MoveBy
    def __init__(self, migration_id: _Optional[str] = ..., state: _Optional[_Union[MigrationState, str]] = ..., outcome: _Optional[_Union[MoveOutcome, str]] = ..., reason: _Optional[_Union[MoveReason, str]] = ..., message: _Optional[str] = ..., key: _Optional[str] = ..., receiver_id: _Optional[str] = ..., response_tokens: _Optional[int] = ..., copied_bytes: _Optional[int] = ..., delta_bytes: _Optional[int] = ..., shared_blocks: _Optional[int] = ..., reserve_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., copy_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., stall_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., stall_steps: _Optional[float] = ..., resume_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., total_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., by: _Optional[_Union[MoveBy, str]] = ...) -> None: ...

class KvGeometry(_message.Message):
    __slots__ = ("model", "vocab_size", "block_size", "dtype", "layers", "layout", "block_bytes", "tensor_parallel", "transport")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    model: str
    vocab_size: int
    block_size: int
    dtype: str
    layers: int
    layout: str
    block_bytes: int
    tensor_parallel: int
    transport: str
    def __init__(self, model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., layers: _Optional[int] = ..., layout: _Optional[str] = ..., block_bytes: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("migration_id", "donor_id", "geometry", "item", "rollout", "cached_token_ids", "capacity_tokens", "timeout", "migrations", "mixed_kv")
    MIGRATION_ID_FIELD_NUMBER: _ClassVar[int]
    DONOR_ID_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    ITEM_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    MIXED_KV_FIELD_NUMBER: _ClassVar[int]
    migration_id: str
    donor_id: str
    geometry: KvGeometry
    item: _generation_pb2.WorkItem
    rollout: _draft_pb2.Rollout
    cached_token_ids: _containers.RepeatedScalarFieldContainer[int]
    capacity_tokens: int
    timeout: _duration_pb2.Duration
    migrations: int
    mixed_kv: bool
    def __init__(self, migration_id: _Optional[str] = ..., donor_id: _Optional[str] = ..., geometry: _Optional[_Union[KvGeometry, _Mapping]] = ..., item: _Optional[_Union[_generation_pb2.WorkItem, _Mapping]] = ..., rollout: _Optional[_Union[_draft_pb2.Rollout, _Mapping]] = ..., cached_token_ids: _Optional[_Iterable[int]] = ..., capacity_tokens: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., migrations: _Optional[int] = ..., mixed_kv: bool = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("reserved", "refused")
    RESERVED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    reserved: Reservation
    refused: Refusal
    def __init__(self, reserved: _Optional[_Union[Reservation, _Mapping]] = ..., refused: _Optional[_Union[Refusal, _Mapping]] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: MoveReason
    message: str
    def __init__(self, reason: _Optional[_Union[MoveReason, str]] = ..., message: _Optional[str] = ...) -> None: ...

class Reservation(_message.Message):
    __slots__ = ("data_addresses", "token", "shared_blocks", "mixed_kv")
    DATA_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SHARED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MIXED_KV_FIELD_NUMBER: _ClassVar[int]
    data_addresses: _containers.RepeatedScalarFieldContainer[str]
    token: bytes
    shared_blocks: int
    mixed_kv: bool
    def __init__(self, data_addresses: _Optional[_Iterable[str]] = ..., token: _Optional[bytes] = ..., shared_blocks: _Optional[int] = ..., mixed_kv: bool = ...) -> None: ...

class DrafterState(_message.Message):
    __slots__ = ("drafter", "state")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    state: bytes
    def __init__(self, drafter: _Optional[str] = ..., state: _Optional[bytes] = ...) -> None: ...

class DrafterStates(_message.Message):
    __slots__ = ("states",)
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedCompositeFieldContainer[DrafterState]
    def __init__(self, states: _Optional[_Iterable[_Union[DrafterState, _Mapping]]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("migration_id", "new_token_ids", "counters", "drafters", "acceptance", "tokens_crc", "data_crcs")
    MIGRATION_ID_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_CRC_FIELD_NUMBER: _ClassVar[int]
    DATA_CRCS_FIELD_NUMBER: _ClassVar[int]
    migration_id: str
    new_token_ids: _containers.RepeatedScalarFieldContainer[int]
    counters: _generation_pb2.Finished
    drafters: DrafterStates
    acceptance: float
    tokens_crc: int
    data_crcs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, migration_id: _Optional[str] = ..., new_token_ids: _Optional[_Iterable[int]] = ..., counters: _Optional[_Union[_generation_pb2.Finished, _Mapping]] = ..., drafters: _Optional[_Union[DrafterStates, _Mapping]] = ..., acceptance: _Optional[float] = ..., tokens_crc: _Optional[int] = ..., data_crcs: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("state", "reason", "message")
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    state: MigrationState
    reason: MoveReason
    message: str
    def __init__(self, state: _Optional[_Union[MigrationState, str]] = ..., reason: _Optional[_Union[MoveReason, str]] = ..., message: _Optional[str] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ("migration_id", "disown")
    MIGRATION_ID_FIELD_NUMBER: _ClassVar[int]
    DISOWN_FIELD_NUMBER: _ClassVar[int]
    migration_id: str
    disown: bool
    def __init__(self, migration_id: _Optional[str] = ..., disown: bool = ...) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: MigrationState
    def __init__(self, state: _Optional[_Union[MigrationState, str]] = ...) -> None: ...

class GetMigrationRequest(_message.Message):
    __slots__ = ("migration_id",)
    MIGRATION_ID_FIELD_NUMBER: _ClassVar[int]
    migration_id: str
    def __init__(self, migration_id: _Optional[str] = ...) -> None: ...

class GetMigrationResponse(_message.Message):
    __slots__ = ("migration",)
    MIGRATION_FIELD_NUMBER: _ClassVar[int]
    migration: Migration
    def __init__(self, migration: _Optional[_Union[Migration, _Mapping]] = ...) -> None: ...
