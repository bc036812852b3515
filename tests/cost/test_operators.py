"""The table of operators against torch's own counter."""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from llm_perf_opt.cost.operators import flops_of  # noqa: E402


class _Table(TorchDispatchMode):  # type: ignore[misc,unused-ignore]
    """Sum what the table says."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._schema.name.partition("::")[2]
        shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else () for value in args]
        first = output[0] if isinstance(output, tuple) else output
        transposed = "convolution" in name and bool(args[6])
        found = flops_of(name, shapes, tuple(first.shape), transposed)
        assert found is not None, name
        if found:
            self.flops += found
            self.names.add(name)
        return output


def _r(*shape: int) -> Any:
    return torch.randn(*shape)


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("mm", lambda: _r(3, 5) @ _r(5, 7)),
        ("bmm", lambda: torch.bmm(_r(2, 3, 5), _r(2, 5, 7))),
        ("addmm", lambda: torch.addmm(_r(7), _r(3, 5), _r(5, 7))),
        ("baddbmm", lambda: torch.baddbmm(_r(2, 3, 7), _r(2, 3, 5), _r(2, 5, 7))),
        ("convolution", lambda: torch.nn.functional.conv1d(_r(2, 4, 9), _r(6, 4, 3), padding=1)),
        ("convolution", lambda: torch.nn.functional.conv1d(_r(2, 4, 9), _r(4, 1, 3), groups=4)),
        ("convolution", lambda: torch.nn.functional.conv2d(_r(2, 4, 9, 8), _r(6, 4, 3, 2), stride=2)),
        ("convolution", lambda: torch.nn.functional.conv3d(_r(1, 2, 4, 5, 6), _r(3, 2, 2, 2, 2))),
        ("convolution", lambda: torch.nn.functional.conv_transpose1d(_r(2, 4, 9), _r(4, 6, 3), stride=2)),
    ],
)  # fmt: skip
def test_an_operator_counts_as_in_torch(name: str, run: Callable[[], Any]) -> None:
    with torch.no_grad():
        with FlopCounterMode(display=False) as counter:
            run()
        with _Table() as table:
            run()

    assert table.names == {name}
    assert table.flops == counter.get_total_flops() > 0


@pytest.mark.parametrize(
    ("name", "shapes", "flops"),
    [
        ("mv", [(3, 5), (5,)], 30),
        ("dot", [(5,), (5,)], 10),
        ("addmv", [(3,), (3, 5), (5,)], 30),
        ("addr", [(3, 5), (3,), (5,)], 30),
        ("linear", [(2, 3, 5), (7, 5)], 420),
        ("_grouped_mm", [(6, 5), (4, 5, 7)], 420),
        ("_scaled_dot_product_flash_attention_for_cpu", [(1, 2, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8)], 2240),
        ("relu", [(3, 5)], 0),
    ],
)
def test_operators_that_torch_does_not_count_follow_the_same_rule(name: str, shapes: list[tuple[int, ...]], flops: int) -> None:
    assert flops_of(name, shapes) == flops


def test_an_operator_that_may_multiply_and_is_not_in_the_table_has_no_figure() -> None:
    assert flops_of("fancy_matmul", [(3, 5), (5, 7)]) is None
