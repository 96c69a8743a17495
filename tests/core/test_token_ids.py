import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.token_ids import num_ids, pack_ids, unpack_ids


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_are_little_endian_uint32(token_ids: list[int]) -> None:
    packed = pack_ids(token_ids)
    assert packed == struct.pack(f"<{len(token_ids)}I", *token_ids)
    assert unpack_ids(packed).tolist() == token_ids
    assert num_ids(packed) == len(token_ids)


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_what_is_no_id_cannot_be_packed(token_id: int) -> None:
    with pytest.raises(OverflowError):
        pack_ids([token_id])


def test_half_an_id_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number"):
        unpack_ids(b"12345")
