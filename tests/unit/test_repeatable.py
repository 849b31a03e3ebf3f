"""Methods whose repeated calls enter no function of Python."""

from __future__ import annotations

import functools
import gc
import inspect
import os
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from hybrid_ep.core.repeatable import Memo, Repeat, first, repeatable


class Handle(NamedTuple):
    num_rows: int
    grid: object = None
    other: int = 0


class Event:
    is_set = False

    def __init__(self) -> None:
        raise AssertionError("a repeated call makes it without this")


class Sender:
    """Notes what its method in Python, and what repeats it, are called with."""

    num_sms: int | None = None

    def __init__(self) -> None:
        self._repeats = Memo()
        self.in_python: list[Any] = []
        self.repeated: list[tuple[Any, ...]] = []
        self.can_repeat = True

    def again(self, *taken: Any) -> tuple[Any, ...] | None:
        self.repeated.append(taken)
        return ("rows", "scales", self) if self.can_repeat else None

    @repeatable(
        reads={"self": ("num_sms",), "handle": ("num_rows", "grid")}, rows=("handle", "num_rows", "x", "weights")
    )
    def send(
        self,
        x: Any,
        handle: Handle | None = None,
        bound: int = 0,
        *,
        weights: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Any:
        """Sends."""
        self.in_python.append((x, handle, bound, weights, bias))
        takes = "self", ("x", 1) if isinstance(x, tuple) else "x", None, "bound"
        # What repeats holds no `self`: the memo would keep it.
        return first("in Python", Repeat(lambda me, *taken: me.again(*taken), takes, ((0, 1), "fixed", None, Event)))


X = torch.zeros(4, 6)


def _is_repeated(sender: Sender, *args: Any, **kwargs: Any) -> bool:
    before = len(sender.in_python)
    result = sender.send(*args, **kwargs)
    assert (result == "in Python") == (len(sender.in_python) > before)
    return len(sender.in_python) == before


def test_the_second_of_like_calls_is_repeated() -> None:
    sender = Sender()
    assert sender.send(X, None, 3) == "in Python"
    other = torch.ones(4, 6)
    rows, fixed, nothing, event = sender.send(other, bound=3)
    assert (rows, fixed, nothing) == (("rows", "scales"), "fixed", None)
    assert isinstance(event, Event)
    assert not event.is_set
    ((taken, none, bound),) = sender.repeated
    assert taken is other
    assert (none, bound) == (None, 3)
    assert len(sender.in_python) == 1


def test_arguments_by_position_by_name_and_left_out_are_alike() -> None:
    sender = Sender()
    assert not _is_repeated(sender, X)
    name = "".join(["bou", "nd"])  # not the same object as the parameter's
    for kwargs in ({}, {name: 0}, {"handle": None, "weights": None}):
        assert _is_repeated(sender, X, **kwargs)
    assert _is_repeated(sender, bias=None, bound=0, x=X)
    assert _is_repeated(sender, X, None, 0)


def test_calls_that_differ_are_not_repeated() -> None:
    sender = Sender()
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((X,), {}),
        ((X.double(),), {}),
        ((X[:3],), {}),
        ((X.t().contiguous().t(),), {}),
        ((X, None, 1), {}),
        ((X, None, True), {}),
        ((X,), {"bias": X}),
        ((X,), {"weights": X}),
        (((X, X),), {}),
        (((X, X, X),), {}),
        (((X, X[:3]),), {}),
        ((X, Handle(7)), {}),
        ((X, Handle(8)), {}),
        ((X, Handle(7, grid=sender)), {}),
    ]
    for args, kwargs in calls:
        assert not _is_repeated(sender, *args, **kwargs)
    for args, kwargs in calls:
        assert _is_repeated(sender, *args, **kwargs)
    assert _is_repeated(sender, X, Handle(7, other=1)), "this is not read"
    sender.num_sms = 4
    assert not _is_repeated(sender, X)
    assert _is_repeated(sender, X)


@pytest.mark.parametrize("args", [([X],), (X, object()), (X, None, 2**63), (((X,),),), (X, None, 0.5)])
def test_calls_with_other_arguments_are_never_repeated(args: tuple[Any, ...]) -> None:
    sender = Sender()
    for _ in range(3):
        assert not _is_repeated(sender, *args)
    assert len(sender._repeats) == 0


def test_the_number_of_rows_makes_no_difference() -> None:
    @repeatable(reads={"handle": ()}, rows=("handle", "num_rows", "x"))
    def send(self: Sender, x: Tensor, handle: Handle, bias: Tensor | None = None) -> Any:
        return first("in Python", Repeat(lambda: ("repeated",), (), 0))

    sender = Sender()
    assert send(sender, X, Handle(4), X) == "in Python"
    assert send(sender, X[:3], Handle(3), X) == "repeated"
    assert send(sender, X[:3], Handle(4), X) == "in Python", "not the number of rows"
    assert send(sender, X[:3], Handle(3), X[:3]) == "in Python", "the bias is not counted by rows"


def test_what_is_not_repeated_after_all_is_left_to_python() -> None:
    sender = Sender()
    sender.can_repeat = False
    for num_tries in range(3):
        assert not _is_repeated(sender, X)
        assert len(sender.repeated) == num_tries


def test_errors_are_those_of_the_method() -> None:
    sender = Sender()
    sender.send(X)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((), {}, "missing 1 required positional argument: 'x'"),
        ((X,), {"rows": 1}, "unexpected keyword argument 'rows'"),
        ((X,), {"x": X}, "multiple values for argument 'x'"),
        ((X, None, 0, None), {}, "takes from 2 to 4 positional arguments but 5 were given"),
    ]
    for args, kwargs, message in wrong:
        with pytest.raises(TypeError, match=message):
            sender.send(*args, **kwargs)

    def fail(*_: Any) -> None:
        raise OverflowError("too many rows")

    sender.again = fail  # type: ignore[method-assign]
    with pytest.raises(OverflowError, match="too many rows"):
        sender.send(X)


def test_what_may_not_be_used_is_left_to_python() -> None:
    sender = Sender()
    sender.send(X)
    answers = [True, False, True]
    sender._repeats.is_usable = functools.partial(answers.pop, 0)
    assert [_is_repeated(sender, X) for _ in range(3)] == [True, False, True]

    def fail() -> bool:
        raise OSError("no answer")

    sender._repeats.is_usable = fail
    with pytest.raises(OSError, match="no answer"):
        sender.send(X)
    del sender._repeats
    assert not _is_repeated(sender, X)


def test_a_forked_child_repeats_nothing() -> None:
    sender = Sender()
    sender.send(X)
    child = os.fork()
    if child == 0:
        os._exit(0 if sender.send(X) == "in Python" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert _is_repeated(sender, X)


def test_tensors_are_read_without_function_modes() -> None:
    found: list[torch.device] = []

    @repeatable()
    def make(_: Sender, x: Tensor) -> Any:
        found.append(torch.empty(0).device)
        return first("in Python", Repeat(lambda: (found.append(torch.empty(0).device),), (), 0))

    sender = Sender()
    with torch.device("meta"):
        make(sender, X)
        make(sender, X)
        assert torch.empty(0).device.type == "meta", "it is on again"
        with pytest.raises(TypeError):
            make(sender)  # type: ignore[call-arg]
        assert torch.empty(0).device.type == "meta"
    assert [device.type for device in found] == ["cpu", "cpu"]


def test_it_looks_like_the_method() -> None:
    assert Sender.send.__doc__ == "Sends."
    assert Sender.send.__name__ == "send"
    assert list(inspect.signature(Sender.send).parameters) == ["self", "x", "handle", "bound", "weights", "bias"]
    assert inspect.ismethod(Sender().send)
    assert inspect.isroutine(Sender.send)


def test_methods_of_one_object_are_apart_and_it_is_not_kept() -> None:
    @repeatable()
    def one(_: Sender, x: Tensor) -> Any:
        return first("in Python", Repeat(lambda: ("one",), (), 0))

    @repeatable()
    def other(_: Sender, x: Tensor) -> Any:
        return first("in Python", Repeat(lambda: ("other",), (), 0))

    sender = Sender()
    assert [one(sender, X), other(sender, X)] == ["in Python"] * 2
    assert [one(sender, X), other(sender, X)] == ["one", "other"]
    sender.send(X)
    seen = weakref.ref(sender)
    del sender
    gc.collect()
    assert seen() is None


class Part:
    """Of a handle whose attribute is made when it is read."""

    def __init__(self, number: int) -> None:
        self.number = number


class Parted:
    num_rows = 4

    def __init__(self) -> None:
        self.num_read = 0

    @property
    def part(self) -> Part:
        self.num_read += 1
        return Part(self.num_read)


class PartSender:
    def __init__(self) -> None:
        self._repeats = Memo()

    @repeatable(reads={"handle": ("num_rows",)})
    def send(self, handle: Parted) -> Any:
        return first("in Python", Repeat(lambda *taken: taken, (("handle", "part"), ("handle", "part")), (0, 1)))


def test_a_repeat_takes_attributes_and_keeps_what_they_return() -> None:
    sender, handle = PartSender(), Parted()
    assert sender.send(handle) == "in Python"
    assert [part.number for part in sender.send(handle)] == [1, 2]
    without = Parted()
    sender.send(without)
    del Parted.part
    with pytest.raises(AttributeError, match="part"):
        sender.send(without)
