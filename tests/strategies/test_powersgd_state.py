"""PowerSGD's memory at a resume with other options: the config's count, and factors of another rank begin anew."""

from __future__ import annotations

import pytest
import torch

from trainer.strategies.comm_hooks import PowerSgd


@pytest.mark.parametrize("rank", [1, 2])
def test_options_of_the_config_count_and_factors_of_another_rank_are_dropped(rank: int) -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 3))
    before, now = PowerSgd([weight], 1, 5), PowerSgd([weight], rank, 9)
    before.torch.p_memory_dict[0] = before.torch.q_memory_dict[0] = torch.ones(4)
    before.torch.error_dict[0], before.torch.iter = torch.ones(12), 7
    now.load(**before.state())
    assert (now.torch.matrix_approximation_rank, now.torch.start_powerSGD_iter, now.torch.iter) == (rank, 9, 7)
    assert bool(now.torch.p_memory_dict) == bool(now.torch.q_memory_dict) == (rank == 1)
    assert torch.equal(now.torch.error_dict[0], torch.ones(12)), "what was left out is added later all the same"
