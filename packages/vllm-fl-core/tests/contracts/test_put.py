"""Where an operator's results are written: `put`."""

from __future__ import annotations

import torch

from vllm_fl.contracts.binding import put


def test_results_are_copied_and_what_lies_between_and_absent_ones_are_left_out() -> None:
    buffer, query = torch.zeros(2, 8), torch.zeros(3)
    put((buffer[:, :4], query, None), (torch.ones(2, 4), torch.full((3,), 2.0), None))
    assert buffer.sum(dim=1).tolist() == [4.0, 4.0] and query.tolist() == [2.0, 2.0, 2.0]


def test_what_is_there_already_is_not_written_again() -> None:
    target = torch.randn(2, 3)
    version = target._version
    put(target, target)
    put((target, None), (target.view(2, 3), None))
    assert target._version == version


def test_results_that_lie_in_each_others_targets_are_swapped() -> None:
    one, other = torch.full((4,), 1.0), torch.full((4,), 2.0)
    put((one, other), (other, one))
    assert one[0] == 2.0 and other[0] == 1.0


def test_a_result_that_overlaps_its_target_elsewhere_is_copied_first() -> None:
    buffer = torch.arange(6.0)
    put(buffer[1:], buffer[:-1])
    assert buffer.tolist() == [0.0, 0.0, 1.0, 2.0, 3.0, 4.0]
