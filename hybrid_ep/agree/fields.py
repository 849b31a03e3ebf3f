"""The fields that the ranks of a call must agree on, their encoding in a header, and the error if they differ.

Ranks exchange one header per call, together with its counts where it has any. A header has one int64 per field; a field
that a call does not have is `ABSENT` in it. Every engine takes the names and the wording from here, so the same
mistake gives the same message on every engine.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from hybrid_ep.errors import ConfigError
from hybrid_ep.quantize import Nvfp4Format, RowFormat

ABSENT = -1

# Kinds of calls, by the names that users know. A header holds the index.
CALLS = (
    "dispatch",
    "dispatch along a handle",
    "combine",
    "dispatch_with_permute",
    "counts of experts",
    "low_latency_dispatch",
    "low_latency_combine",
    "barrier",
    "sum over ranks",
    "copy of experts",
)
# Formats of low-latency rows, as csrc/layout/low_latency_layout.h numbers them (ScaleFormat).
_FORMATS = (
    "bf16",
    "use_fp8",
    "use_fp8 with round_scale",
    "use_fp8 with use_ue8m0",
    "use_nvfp4",
    "use_nvfp4 with use_ue8m0_for_sf",
)
DTYPES = (torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int32, torch.uint8)


def _as_call(value: int) -> str:
    return repr(CALLS[value]) if 0 <= value < len(CALLS) else f"unknown ({value})"


def _as_dtype(value: int) -> str:
    return "none" if value == ABSENT else str(DTYPES[value]) if value < len(DTYPES) else f"unknown ({value})"


def _as_number(value: int) -> str:
    return "none" if value == ABSENT else str(value)


def _as_bool(value: int) -> str:
    return "none" if value == ABSENT else str(bool(value))


def _as_format(value: int) -> str:
    return "none" if value == ABSENT else _FORMATS[value] if value < len(_FORMATS) else f"unknown ({value})"


def _as_scale(value: int) -> str:
    if value == ABSENT:
        return "none"
    bits = struct.pack("I", value << 16 & 0xFFFFFFFF)
    return f"about {struct.unpack('f', bits)[0]:.3g}"


class Field(NamedTuple):
    """One field of a header.

    Attributes:
        name: the field's name in messages.
        spell: returns a value of the field as messages give it.
    """

    name: str
    spell: Callable[[int], str]


# In the order of a header, and of comparison: the first field that differs is named. So fields that explain others come
# first.
FIELDS: dict[str, Field] = {
    "buffer": Field("number of the buffer on its group", _as_number),
    "call": Field("call", _as_call),
    "call_number": Field("number of the call", _as_number),
    "num_experts": Field("num_experts", _as_number),
    "num_topk": Field("top-k (columns of topk_idx)", _as_number),
    "has_topk": Field("whether topk_idx is given", _as_bool),
    "has_weights": Field("whether topk_weights are given", _as_bool),
    "num_slots": Field("spare slots of a rank", _as_number),
    "replica_mapping": Field("checksum of redundancy_mapping", _as_number),
    "hidden": Field("hidden", _as_number),
    "dtype": Field("dtype of the rows", _as_dtype),
    "scale_dtype": Field("dtype of the scales", _as_dtype),
    "num_scales": Field("scales of a row", _as_number),
    "num_weights": Field("weights of a row", _as_number),
    "most_tokens": Field("num_max_tokens_per_rank", _as_number),
    "num_worst_tokens": Field("num_worst_tokens", _as_number),
    "is_bounded": Field("whether the number of rows is given", _as_bool),
    "drops_rows": Field("whether rows beyond that number are dropped", _as_bool),
    "arena": Field("number of the memory for rows (a CUDA graph keeps that of its capture)", _as_number),
    "common_bound": Field("rows that each rank's slots must hold", _as_number),
    "pad_multiple": Field("pad_multiple", _as_number),
    "max_tokens": Field("num_max_dispatch_tokens_per_rank", _as_number),
    "scale_format": Field("format of the rows", _as_format),
    "global_scale": Field("x_global_scale", _as_scale),  # the upper half of its bits
    "use_logfmt": Field("use_logfmt", _as_bool),
    "handle": Field("number of the handle's dispatch", _as_number),
    "masked": Field("bits of the masked ranks", _as_number),
    "numel": Field("elements of the tensor", _as_number),
    "expert_sizes": Field("checksum of the sizes of experts and spare slots, and of where the slots are", _as_number),
    # Not compared. A rank with too many tokens has (their number << 32 | the most allowed) in the first of these.
    "too_many_tokens": Field("tokens of a rank", _as_number),
    "refusal": Field("number of a refusal", _as_number),
}
_PLACE = {key: place for place, key in enumerate(FIELDS)}
_TOO_MANY, _REFUSAL = "too_many_tokens", "refusal"


def dtype_code(dtype: torch.dtype) -> int:
    """Returns the number by which ranks compare a dtype of rows or scales."""
    return DTYPES.index(dtype)


def format_code(fmt: RowFormat | None) -> int:
    """Returns the number by which ranks compare the format of low-latency rows, the same in every engine."""
    if fmt is None:
        return 0
    if isinstance(fmt, Nvfp4Format):
        return 4 + fmt.ue8m0
    return 1 + fmt.round_scale + fmt.ue8m0


def encode(values: Mapping[str, int]) -> list[int]:
    """Returns a header: the value of every field in the order of `FIELDS`, `ABSENT` where none is given."""
    header = [ABSENT] * len(FIELDS)
    for key, value in values.items():
        header[_PLACE[key]] = value
    return header


def first_difference(mine: Sequence[int], theirs: Sequence[int]) -> str | None:
    """Returns the key of the first field in which two headers differ, or None."""
    pairs = zip(FIELDS, mine, theirs, strict=True)
    return next((key for key, a, b in pairs if a != b and key not in (_TOO_MANY, _REFUSAL)), None)


def disagreement(key: str, mine: int, rank: int, theirs: int, peer: int) -> ConfigError:
    """Returns the error for a field of `FIELDS` that differs between this rank and a peer.

    Args:
        key: of the field.
        mine: its value at this rank.
        rank: this rank.
        theirs: its value at the peer.
        peer: the other rank.
    """
    name, spell = FIELDS[key]
    return ConfigError(
        f"{name} is {spell(mine)} at rank {rank} and {spell(theirs)} at rank {peer}; allowed: the same on every rank"
    )


def too_many_tokens(rank: int, num_tokens: int, most: int) -> str:
    """Says that a rank has more tokens than its buffer allows, in the same words at every rank."""
    return f"rows of x is {num_tokens} at rank {rank}; allowed: ≤ {FIELDS['most_tokens'].name} = {most}"


def first_refusal(headers: Mapping[int, Sequence[int]]) -> tuple[int, int] | None:
    """Returns the lowest rank that has refused its call, and the number of its refusal; None where none has."""
    refusals = ((peer, header[_PLACE[_REFUSAL]]) for peer, header in sorted(headers.items()))
    return next(((peer, number) for peer, number in refusals if number != ABSENT), None)


def require_agreement(mine: Sequence[int], rank: int, headers: Mapping[int, Sequence[int]]) -> None:
    """Raises where a header differs from this rank's.

    Args:
        mine: this rank's header.
        rank: this rank.
        headers: by rank.

    Raises:
        ConfigError: the first field that differs, of the lowest rank with which any does; or a rank has too many
            tokens.
    """
    for peer, theirs in sorted(headers.items()):
        key = first_difference(mine, theirs)
        if key is not None:
            raise disagreement(key, mine[_PLACE[key]], rank, theirs[_PLACE[key]], peer)
    for peer, theirs in sorted(headers.items()):
        if theirs[_PLACE[_TOO_MANY]] != ABSENT:
            num_tokens, most = divmod(theirs[_PLACE[_TOO_MANY]], 1 << 32)
            raise ConfigError(too_many_tokens(peer, num_tokens, most))
