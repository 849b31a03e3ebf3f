"""The native judge of tensor arguments: the words of each refusal, and what it takes, keeps and leaves alone."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from hybrid_ep import ConfigError
from hybrid_ep.core.checks import (
    are_packed,
    packed,
    require_no_grad,
    require_plain,
    require_tensor,
    require_traceable,
)

CPU = torch.device("cpu")
ROWS = torch.zeros(4, 6)
FITS: dict[str, Any] = {"dtypes": (torch.float32,), "shape": (None, 6), "device": CPU}
LAZY = (
    "x is a tensor without memory of its own, as transforms of torch.func pass it, or a lazy one; allowed: a plain "
    "torch.Tensor, so no transform around this call"
)
TRACED = (
    "x is passed while the program is traced, which would record this call's result as a constant; allowed: no trace, "
    "or the modules of hybrid_ep.nn"
)


class Named(Tensor):
    """A subclass with memory."""


class Local(Tensor):
    """A subclass that gives the plain tensor behind it."""

    def to_local(self) -> Tensor:
        raise NotImplementedError


class Counter(TorchFunctionMode):
    """Counts what it intercepts."""

    def __init__(self) -> None:
        super().__init__()
        self.intercepted: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.intercepted.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


def fake(**options: Any) -> Tensor:
    with FakeTensorMode():
        return torch.zeros(4, 6, **options)


def symbolic() -> Tensor:
    return FakeTensorMode(shape_env=ShapeEnv()).from_tensor(ROWS, static_shapes=False)


REFUSALS: dict[str, tuple[object, dict[str, Any], str]] = {
    "a list": ([1], {}, "x is list; allowed: a torch.Tensor"),
    "None": (None, {}, "x is NoneType; allowed: a torch.Tensor"),
    "a subclass": (
        ROWS.as_subclass(Named),
        {},
        "x is Named; allowed: a plain torch.Tensor or torch.nn.Parameter, and no subclass",
    ),
    "a shard": (ROWS.as_subclass(Local), {}, "x is Local; allowed: a plain torch.Tensor: pass `.to_local()`"),
    "fake": (fake(), {}, "x is FakeTensor; allowed: a plain torch.Tensor or torch.nn.Parameter, and no subclass"),
    "sparse": (ROWS.to_sparse(), {}, "x.layout is torch.sparse_coo; allowed: torch.strided"),
    "negative": (torch._neg_view(ROWS), {}, LAZY),
    "part of a conjugate": (torch.ones(4, 6, dtype=torch.complex64).conj().imag, {}, LAZY),
    "zeros": (torch._efficientzerotensor(4, 6), {}, LAZY),
    "no zeros": (torch._efficientzerotensor(0, 6), {}, LAZY),
    "dtype": (ROWS.half(), {}, "x.dtype is torch.float16; allowed: torch.float32"),
    "dtypes": (
        ROWS.to(torch.uint16),
        {"dtypes": [torch.int32, torch.uint8]},
        "x.dtype is torch.uint16; allowed: torch.int32 or torch.uint8",
    ),
    "another width": (ROWS.long(), {"dtypes": (torch.int32,)}, "x.dtype is torch.int64; allowed: torch.int32"),
    "size": (torch.zeros(4, 5), {}, "x.shape is [4, 5]; allowed: [any, 6]"),
    "a huge size": (ROWS, {"shape": (2**70, None)}, f"x.shape is [4, 6]; allowed: [{2**70}, any]"),
    "fewer dimensions": (torch.zeros(6), {}, "x.shape is [6]; allowed: [any, 6]"),
    "more dimensions": (torch.zeros(2, 4, 6), {}, "x.shape is [2, 4, 6]; allowed: [any, 6]"),
    "no dimensions": (ROWS, {"shape": ()}, "x.shape is [4, 6]; allowed: []"),
    "device": (ROWS, {"device": torch.device("cuda", 1)}, "x.device is cpu; allowed: cuda:1"),
    "a far device": (ROWS, {"device": torch.device("cuda", 99)}, "x.device is cpu; allowed: cuda:99"),
    "meta": (ROWS.to("meta"), {"device": None}, "x.device is meta; allowed: a device that holds values"),
    "meta elsewhere": (ROWS.to("meta"), {}, "x.device is meta; allowed: cpu"),
    "strides": (
        torch.zeros(6, 4).t(),
        {"contiguous": True},
        "x.stride() is (1, 4); allowed: a contiguous (row-major) tensor",
    ),
    "gaps": (
        torch.zeros(4, 12)[:, :6],
        {"contiguous": True},
        "x.stride() is (12, 1); allowed: a contiguous (row-major) tensor",
    ),
    "dtype of a tracer's": (
        fake(),
        {"dtypes": (torch.int64,), "traced": True},
        "x.dtype is torch.float32; allowed: torch.int64",
    ),
    "shape of a tracer's": (fake(), {"shape": (None, 5), "traced": True}, "x.shape is [4, 6]; allowed: [any, 5]"),
    "device of a tracer's": (fake(device="meta"), {"traced": True}, "x.device is meta; allowed: cpu"),
    "a subclass beside a tracer's": (
        ROWS.as_subclass(Named),
        {"traced": True},
        "x is Named; allowed: a plain torch.Tensor or torch.nn.Parameter, and no subclass",
    ),
    # What is wrong first is told, in the order of the cases.
    "all": (
        torch.zeros(5).half(),
        {"device": torch.device("cuda", 0)},
        "x.dtype is torch.float16; allowed: torch.float32",
    ),
    "shape and device": (torch.zeros(5), {"device": torch.device("cuda", 0)}, "x.shape is [5]; allowed: [any, 6]"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_words_of_a_refusal(case: str) -> None:
    tensor, options, words = REFUSALS[case]
    for mode in (None, Counter()):
        with mode or torch.enable_grad(), pytest.raises(ConfigError) as raised:
            require_tensor("x", tensor, **(FITS | options))
        assert type(raised.value) is ConfigError
        assert str(raised.value) == words
        assert mode is None or mode.intercepted == []


TAKEN: dict[str, tuple[Tensor, dict[str, Any]]] = {
    "rows": (ROWS, {}),
    "a parameter": (torch.nn.Parameter(ROWS.clone()), {"contiguous": True}),
    "columns": (torch.zeros(6, 4).t(), {}),
    "no rows": (torch.zeros(6, 0).t(), {"contiguous": True}),
    "one row": (torch.zeros(6, 1).t(), {"contiguous": True}),
    "a scalar": (torch.zeros(()), {"shape": (), "contiguous": True}),
    "sizes of a tensor": (ROWS, {"shape": ROWS.shape}),
    "a list of sizes": (ROWS, {"shape": [4, None]}),
    "bf16": (ROWS.bfloat16(), {"dtypes": (torch.float32, torch.bfloat16)}),
    "uncommon dtype": (ROWS.to(torch.complex64), {"dtypes": [torch.complex64]}),
    "any device": (ROWS, {"device": None}),
    "a tracer's": (fake(), {"traced": True, "contiguous": True}),
    "a tracer's sizes": (symbolic(), {"traced": True}),
    "a tracer's without values": (fake(device="meta"), {"traced": True, "device": torch.device("meta")}),
    "without values": (ROWS.to("meta"), {"traced": True, "device": None}),
}
for name in ("float16", "float64", "bfloat16", "float8_e4m3fn", "int8", "uint8", "int32", "int64", "bool"):
    TAKEN[name] = ROWS.to(getattr(torch, name)), {"dtypes": (getattr(torch, name),)}


@pytest.mark.parametrize("case", TAKEN)
def test_what_fits_is_returned(case: str) -> None:
    tensor, options = TAKEN[case]
    assert require_tensor("x", tensor, **(FITS | options)) is tensor
    assert require_plain("x", tensor, traced=options.get("traced", False)) is None  # type: ignore[func-returns-value]


def test_a_gradient_is_refused_where_it_would_be_lost() -> None:
    learnt = torch.zeros(4, 6, requires_grad=True)
    for tensor in (learnt, learnt * 2, torch.nn.Parameter(ROWS.clone())):
        with pytest.raises(ConfigError) as raised:
            require_no_grad("x", tensor)
        assert str(raised.value) == (
            "x.requires_grad is True, and this call has no backward pass; allowed: hybrid_ep.nn.MoEDispatch and "
            "MoECombine, an autograd.Function around it, torch.no_grad(), or detach()"
        )
        require_no_grad("x", tensor.detach())
        with torch.no_grad():
            require_no_grad("x", tensor)


def test_packed_copies_only_what_has_gaps() -> None:
    for tensor in (ROWS, torch.nn.Parameter(ROWS.clone()), ROWS[:0], torch.zeros(6, 1).t()):
        assert are_packed(tensor, None)
        assert packed(tensor) is tensor
    for tensor in (torch.rand(6, 4).t(), torch.rand(4, 12)[:, ::2], torch.rand(6).expand(4, 6)):
        assert not are_packed(None, ROWS, tensor)
        copy = packed(tensor)
        assert copy.is_contiguous()
        assert torch.equal(copy, tensor)
    assert packed(None) is None
    assert are_packed()


def test_function_modes_intercept_nothing() -> None:
    learnt, gaps = torch.zeros(4, 6, requires_grad=True), torch.zeros(6, 4).t()
    with Counter() as counter:
        for tensor, options in TAKEN.values():
            require_tensor("x", tensor, **(FITS | options))
        for tensor in (ROWS, gaps):
            packed(tensor)
            are_packed(tensor)
        with pytest.raises(ConfigError):
            require_no_grad("x", learnt)
    assert counter.intercepted == []
    with Counter() as counter:
        _ = ROWS.dtype
    assert counter.intercepted  # the modes are on again


def test_a_plain_tensor_is_refused_in_the_mode_of_a_tracer() -> None:
    with FakeTensorMode(), pytest.raises(ConfigError) as raised:
        require_tensor("x", ROWS, **FITS)
    assert str(raised.value) == TRACED
    with FakeTensorMode():
        assert require_tensor("x", ROWS, **FITS, traced=True) is ROWS


@pytest.mark.parametrize(
    ("function", "arguments", "options", "words"),
    [
        (require_tensor, ("x", ROWS), {"dtypes": ()}, "missing the argument 'shape'"),
        (require_tensor, ("x", ROWS, (), ()), {}, "takes 2 positional arguments but 4 were given"),
        (require_plain, ("x", ROWS), {"is_traced": True}, "unexpected keyword argument 'is_traced'"),
        (require_plain, ("x", ROWS), {"tensor": ROWS}, "multiple values for argument 'tensor'"),
        (require_no_grad, ("x",), {}, "missing the argument 'tensor'"),
    ],
)
def test_a_wrong_call_is_a_type_error(
    function: Callable[..., object], arguments: tuple[object, ...], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        function(*arguments, **options)


def test_names_of_arguments_need_not_be_interned() -> None:
    options: dict[str, Any] = {"".join(["dty", "pes"]): (torch.float32,), "".join(["sha", "pe"]): (4, 6)}
    assert require_tensor("x", ROWS, **options) is ROWS


def _calls(tensor: Tensor, others: list[Tensor], options: dict[str, Any], num: int) -> None:
    for _ in range(num):
        require_tensor("x", tensor, **options, contiguous=True)
        require_no_grad("x", tensor)
        packed(tensor)
        are_packed(tensor, None)
        for other in others:
            try:
                require_tensor("x", other, **options, contiguous=True)
            except ConfigError:
                continue
            raise AssertionError


def test_no_reference_is_kept() -> None:
    tensor = torch.zeros(4, 6)
    others = [tensor[:, :3], tensor.half(), torch.zeros(6, 4).t(), tensor.to("meta"), torch._neg_view(tensor)]
    options: dict[str, Any] = {"dtypes": (torch.float32, torch.int16), "shape": (4, 6), "device": torch.device("cpu")}
    held = [tensor, *others, *options.values(), torch.float32, torch.float16, ConfigError]

    def state() -> tuple[list[int], int]:
        gc.collect()
        return [sys.getrefcount(each) for each in held], sys.getallocatedblocks()

    _calls(tensor, others, options, 100)
    counts, blocks = state()
    _calls(tensor, [], options, 100_000)
    _calls(tensor, others, options, 2_000)
    counts_after, blocks_after = state()
    assert counts_after == counts
    assert blocks_after - blocks < 500


def _in_a_new_process(program: str) -> None:
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_checks_too() -> None:
    _in_a_new_process("""
import os, torch
from hybrid_ep.core.checks import require_tensor
options = {"dtypes": (torch.float32,), "shape": (2,), "device": torch.device("cpu")}
require_tensor("x", torch.zeros(2), **options)
child = os.fork()
if child == 0:
    tensor = torch.zeros(2)
    os._exit(0 if require_tensor("x", tensor, **options) is tensor else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""")


def test_first_calls_may_come_from_several_threads() -> None:
    _in_a_new_process("""
import sys, threading, torch
from hybrid_ep._C import require_tensor
sys.setswitchinterval(1e-6)
start, passed = threading.Barrier(4), []
def check():
    start.wait()
    require_tensor("x", torch.zeros(2), dtypes=(torch.float32,), shape=(2,))
    passed.append(1)
threads = [threading.Thread(target=check) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(passed) == 4
""")


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_a_compiled_call_is_checked_without_a_break() -> None:
    def call(x: Tensor) -> Tensor:
        require_traceable("x", x, **FITS)
        return x + 1

    assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(ROWS), ROWS + 1)
    for tensor, options, words in REFUSALS.values():
        if isinstance(tensor, Tensor) and type(tensor) is Tensor and not options and tensor.layout is torch.strided:
            if words == LAZY:
                continue
            torch._dynamo.reset()
            with pytest.raises(ConfigError) as raised:
                torch.compile(call, backend="eager")(tensor)
            assert str(raised.value) == words
