from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Knobs(_message.Message):
    __slots__ = ("mode", "speculation", "draft_cap", "margin", "latch", "ladder", "drafters")
    MODE_FIELD_NUMBER: _ClassVar[int]
    SPECULATION_FIELD_NUMBER: _ClassVar[int]
    DRAFT_CAP_FIELD_NUMBER: _ClassVar[int]
    MARGIN_FIELD_NUMBER: _ClassVar[int]
    LATCH_FIELD_NUMBER: _ClassVar[int]
    LADDER_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    mode: str
    speculation: bool
    draft_cap: int
    margin: float
    latch: bool
    ladder: LadderKnobs
    drafters: DrafterKnobs
    def __init__(self, mode: _Optional[str] = ..., speculation: bool = ..., draft_cap: _Optional[int] = ..., margin: _Optional[float] = ..., latch: bool = ..., ladder: _Optional[_Union[LadderKnobs, _Mapping]] = ..., drafters: _Optional[_Union[DrafterKnobs, _Mapping]] = ...) -> None: ...

class EffectiveKnobs(_message.Message):
    __slots__ = ("knobs", "instance_ids")
    KNOBS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_IDS_FIELD_NUMBER: _ClassVar[int]
    knobs: Knobs
    instance_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, knobs: _Optional[_Union[Knobs, _Mapping]] = ..., instance_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class LadderKnobs(_message.Message):
    __slots__ = ("on", "lengths", "up", "down", "patience")
    ON_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    DOWN_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_FIELD_NUMBER: _ClassVar[int]
    on: bool
    lengths: _containers.RepeatedScalarFieldContainer[int]
    up: float
    down: float
    patience: int
    def __init__(self, on: bool = ..., lengths: _Optional[_Iterable[int]] = ..., up: _Optional[float] = ..., down: _Optional[float] = ..., patience: _Optional[int] = ...) -> None: ...

class DrafterKnobs(_message.Message):
    __slots__ = ("reference", "suffix", "quantized", "eagle3", "others")
    class OthersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bool
        def __init__(self, key: _Optional[str] = ..., value: bool = ...) -> None: ...
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    SUFFIX_FIELD_NUMBER: _ClassVar[int]
    QUANTIZED_FIELD_NUMBER: _ClassVar[int]
    EAGLE3_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    reference: bool
    suffix: bool
    quantized: bool
    eagle3: bool
    others: _containers.ScalarMap[str, bool]
    def __init__(self, reference: bool = ..., suffix: bool = ..., quantized: bool = ..., eagle3: bool = ..., others: _Optional[_Mapping[str, bool]] = ...) -> None: ...
