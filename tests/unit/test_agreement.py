"""Headers of calls: what differs is named with both values, and nothing else is."""

from __future__ import annotations

import pytest
import torch

from hybrid_ep import ConfigError
from hybrid_ep.agree.fields import CALLS, DTYPES, FIELDS, dtype_code, encode, require_agreement

CALL = {"buffer": 0, "call": 0, "call_number": 7, "num_experts": 8, "num_topk": 2, "hidden": 128, "has_weights": 1}


def test_equal_headers_pass() -> None:
    header = encode(CALL)
    assert len(header) == len(FIELDS)
    require_agreement(header, 0, {0: header, 1: list(header)})


@pytest.mark.parametrize(
    ("key", "theirs", "message"),
    [
        ("hidden", 256, "hidden is 128 at rank 0 and 256 at rank 1; allowed: the same on every rank"),
        ("num_topk", 4, r"top-k \(columns of topk_idx\) is 2 at rank 0 and 4 at rank 1"),
        ("call", 2, "call is 'dispatch' at rank 0 and 'combine' at rank 1"),
        ("has_weights", 0, "whether topk_weights are given is True at rank 0 and False at rank 1"),
        ("scale_dtype", 3, "dtype of the scales is none at rank 0 and torch.int32 at rank 1"),
        ("buffer", 1, "number of the buffer on its group is 0 at rank 0 and 1 at rank 1"),
    ],
)
def test_a_difference_is_named_with_both_values(key: str, theirs: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        require_agreement(encode(CALL), 0, {1: encode(CALL | {key: theirs})})


def test_the_first_field_of_the_lowest_rank_is_named() -> None:
    headers = {2: encode(CALL | {"hidden": 256}), 1: encode(CALL | {"hidden": 512, "num_experts": 16})}
    with pytest.raises(ConfigError, match="num_experts is 8 at rank 0 and 16 at rank 1"):
        require_agreement(encode(CALL), 0, headers)


def test_every_value_can_be_told() -> None:
    assert [dtype_code(dtype) for dtype in DTYPES] == list(range(len(DTYPES)))
    assert dtype_code(torch.bfloat16) == 0
    for value in (-1, 0, 1, len(CALLS), 1 << 40):
        assert all(field.spell(value) for field in FIELDS.values())
