"""Methods whose repeated calls enter no function of Python: csrc/bindings/repeatable.cpp.

    @repeatable()
    def send(self, x, bound=0):
        …                                                   # checks x and bound, and makes the call
        return first((rows, event), Repeat(native, takes=("self", "x"), gives=(0, EventOverlap)))

A later call with like arguments is `native(self, x)`. If that returns ``(rows,)``, the call returns the rows and a new
event. If it returns None, it has done nothing, and the method in Python makes the call.
"""

from __future__ import annotations

import functools
import inspect
import os
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from hybrid_ep import _C
from hybrid_ep.core.checks import Passed

__all__ = ["Memo", "Repeat", "Taken", "first", "repeatable"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


Taken = str | tuple[str, int | str] | None


class Repeat(NamedTuple):
    """How to repeat a call of a method.

    Attributes:
        call: makes it, and returns a tuple; or returns None and has done nothing.
        takes: the arguments of `call`: names of parameters of the method, ``(name, i)`` for an entry of a tuple,
            ``(name, attribute)`` for an attribute, or None.
        gives: the result of the method: numbers of entries of what `call` returns; tuples of these; classes, of which
            it has a new object whose `__init__` has not run; and anything else as it is.
    """

    call: Callable[..., Any]
    takes: tuple[Taken, ...]
    gives: Any


class Memo(Passed):
    """What calls of one object can be repeated. It is the attribute `_repeats` of the object. A forked child has none.

    Args:
        is_usable: returns whether calls of the object may still be made; None: they may. It is called each time, so
            it is best no function of Python.
    """

    def __init__(self, is_usable: Callable[[], bool] | None = None) -> None:
        super().__init__()
        self.is_usable = is_usable
        _memos[id(self)] = self


_memos: weakref.WeakValueDictionary[int, Memo] = weakref.WeakValueDictionary()


def _forget() -> None:
    for memo in list(_memos.values()):
        memo.clear()


os.register_at_fork(after_in_child=_forget)


class _First(NamedTuple):
    result: Any
    repeat: Repeat


def first(result: _R, repeat: Repeat | None) -> _R:
    """What a repeatable method returns from a call that can be repeated. None: it cannot."""
    return result if repeat is None else cast(_R, _First(result, repeat))


def repeatable(
    *, reads: Mapping[str, tuple[str, ...]] | None = None, rows: tuple[str, ...] | None = None
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a method repeatable. Inside it, tensors are read without torch's function modes, as by `plain_tensors`.

    Calls are alike where tensors have the same dtype, device, shape and contiguity, and other arguments are equal. A
    call with an argument that is no tensor, None, bool, int or tuple of these is never repeated, unless `reads` has it.

    Args:
        reads: for an argument of any class, or `self`: the attributes that must be the same. Integers are compared by
            value, others by identity.
        rows: an argument, an attribute of it, and the tensors whose first size need not be the same if it equals the
            attribute.
    """

    def decorate(method: Callable[_P, _R]) -> Callable[_P, _R]:
        parameters = inspect.signature(method).parameters.values()
        names = tuple(each.name for each in parameters)
        num_positional = sum(each.kind is each.POSITIONAL_OR_KEYWORD for each in parameters)
        values = tuple(each.default for each in parameters if each.default is not each.empty)
        made = _C.repeatable_method(method, names, num_positional, values, dict(reads or {}), rows, _First)
        return cast(Callable[_P, _R], functools.update_wrapper(made, method))

    return decorate
