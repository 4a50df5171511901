"""What the recorder says of programs of a few lines, right ones and wrong ones."""

import pytest
import torch

from tandem.kernels.layers.activation import silu_mul
from tests.stream_order.gpu import Gpus


@pytest.mark.parametrize("kept", ["nothing", "a wait"])
def test_memory_that_is_freed_while_another_stream_uses_it(gpus: Gpus, kept: str) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    numbers = torch.zeros(8, device="cuda:0")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        numbers.add_(1)
    if kept == "a wait":
        main.wait_stream(side)
    del numbers
    kinds = [each.kind for each in gpus.order.verdicts]
    assert kinds == (["freed in use"] if kept == "nothing" else [])


@pytest.mark.parametrize("index", [0, 1])
def test_a_kernel_launched_on_another_device_than_its_tensors(gpus: Gpus, index: int) -> None:
    rows = torch.ones(2, 32, device="cuda:1")
    with torch.cuda.device(index):
        silu_mul(rows, torch.empty(2, 16, device="cuda:1"))
    kinds = {each.kind for each in gpus.order.verdicts}
    assert kinds == ({"launch on another device"} if index == 0 else set())
