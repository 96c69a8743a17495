import torch

from kernels.attention.paged_rows import SLACK_TOKENS, group_rows, split_rows
from tests.kernels.attention_case import PAGE_TOKENS, make_case


def test_rows_in_order_without_idle_ones() -> None:
    case, _ = make_case("rows", ((2, 9), (0, 3), (1, 8)), 4)
    first, second = split_rows(*case.ragged())
    assert (first.start, first.stop, first.kv_length) == (0, 2, 9)
    assert (second.start, second.stop, second.kv_length) == (2, 3, 8)
    assert torch.equal(first.pages, case.block_table[0, :2])
    assert torch.equal(second.pages, case.block_table[2, :1])


def test_like_rows_are_one_group_in_batch_order() -> None:
    case, _ = make_case("one group", ((1, 9), (1, 30), (1, 1)), 4)
    (group,) = group_rows(*case.ragged())
    assert group.tokens is None
    assert group.mask.shape == (3, 1, 32)
    visible = (group.mask == 0).sum(-1).flatten().tolist()
    assert visible == [9, 30, 1]
    assert torch.equal(group.pages.view(3, -1), case.block_table)


def test_unlike_lengths_and_counts_are_apart() -> None:
    longest = 8 * SLACK_TOKENS
    case, _ = make_case("apart", ((1, 5), (1, longest), (3, 9), (0, 2), (1, longest - 1)), 4)
    groups = group_rows(*case.ragged())
    tokens = [group.tokens.tolist() for group in groups if group.tokens is not None]
    assert sorted(tokens) == [[0], [1, 5], [2, 3, 4]]
    for group in groups:
        assert group.mask.shape[0] == group.num_rows
        assert len(group.pages) * PAGE_TOKENS == group.num_rows * group.mask.shape[2]
    of_three = next(group for group in groups if group.mask.shape[1] == 3)
    assert (of_three.mask[0] == 0).sum(-1).tolist() == [7, 8, 9]


def test_no_rows() -> None:
    nothing = torch.empty(0, dtype=torch.int32)
    ragged = (torch.zeros(1, dtype=torch.int32), nothing, nothing.view(0, 0), PAGE_TOKENS)
    assert split_rows(*ragged) == ()
    assert group_rows(*ragged) == ()
