import datetime

from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LoadDraftModelRequest(_message.Message):
    __slots__ = ("drafter_version", "path", "sha256")
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    drafter_version: int
    path: str
    sha256: str
    def __init__(self, drafter_version: _Optional[int] = ..., path: _Optional[str] = ..., sha256: _Optional[str] = ...) -> None: ...

class LoadDraftModelResponse(_message.Message):
    __slots__ = ("previous_drafter_version",)
    PREVIOUS_DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    previous_drafter_version: int
    def __init__(self, previous_drafter_version: _Optional[int] = ...) -> None: ...

class GetDraftModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDraftModelResponse(_message.Message):
    __slots__ = ("drafter_version", "sha256", "drafts", "draft_tokens", "accepted_tokens")
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    drafter_version: int
    sha256: str
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    def __init__(self, drafter_version: _Optional[int] = ..., sha256: _Optional[str] = ..., drafts: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_tokens: _Optional[int] = ...) -> None: ...

class GetLearnerRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetLearnerResponse(_message.Message):
    __slots__ = ("drafter_version", "path", "sha256", "published_at", "policy_version", "updates", "samples_used", "tokens_used", "kd_loss", "candidate_acceptance_length", "current_acceptance_length", "rejected_candidates", "rollbacks")
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_AT_FIELD_NUMBER: _ClassVar[int]
    POLICY_VERSION_FIELD_NUMBER: _ClassVar[int]
    UPDATES_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_USED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_USED_FIELD_NUMBER: _ClassVar[int]
    KD_LOSS_FIELD_NUMBER: _ClassVar[int]
    CANDIDATE_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    CURRENT_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    REJECTED_CANDIDATES_FIELD_NUMBER: _ClassVar[int]
    ROLLBACKS_FIELD_NUMBER: _ClassVar[int]
    drafter_version: int
    path: str
    sha256: str
    published_at: _timestamp_pb2.Timestamp
    policy_version: int
    updates: int
    samples_used: int
    tokens_used: int
    kd_loss: float
    candidate_acceptance_length: float
    current_acceptance_length: float
    rejected_candidates: int
    rollbacks: int
    def __init__(self, drafter_version: _Optional[int] = ..., path: _Optional[str] = ..., sha256: _Optional[str] = ..., published_at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., policy_version: _Optional[int] = ..., updates: _Optional[int] = ..., samples_used: _Optional[int] = ..., tokens_used: _Optional[int] = ..., kd_loss: _Optional[float] = ..., candidate_acceptance_length: _Optional[float] = ..., current_acceptance_length: _Optional[float] = ..., rejected_candidates: _Optional[int] = ..., rollbacks: _Optional[int] = ...) -> None: ...

class RollBackRequest(_message.Message):
    __slots__ = ("reason", "drafter_version")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    reason: str
    drafter_version: int
    def __init__(self, reason: _Optional[str] = ..., drafter_version: _Optional[int] = ...) -> None: ...

class RollBackResponse(_message.Message):
    __slots__ = ("drafter_version",)
    DRAFTER_VERSION_FIELD_NUMBER: _ClassVar[int]
    drafter_version: int
    def __init__(self, drafter_version: _Optional[int] = ...) -> None: ...
