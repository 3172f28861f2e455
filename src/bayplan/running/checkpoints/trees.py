"""Nested state as JSON with named tensors, and back, exactly: what `state_dict()` returns.

Numbers, words, None and lists are themselves. What JSON does not have is an object with one key:
`{"tensor": name}` (with `"expand"` where it repeats itself), `{"tuple": […]}`, `{"dict": [[key,
value], …]}`, `{"counter": …}`, `{"float": "nan"}`, `{"bytes": "00ff"}`. Anything else is refused:
it could only be pickled, and whoever unpickles a file lets it run code.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bayplan.data.errors import FileFault, UsageError

__all__ = ["decoded", "encoded", "named_in"]

_MOST_DEPTH = 100
_LARGEST = 1 << 63  # numbers beyond are written as words, because JSON readers round them


def encoded(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """A nested value as JSON; `tensors` gets what it holds of them, by names below `name`.

    A tensor that is there several times is saved once, and once restored.
    """
    return _Encoder(tensors).encode(value, name)


class _Encoder:
    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._known: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value.detach(), name)
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            return int(value) if -_LARGEST <= value < _LARGEST else {"int": str(int(value))}
        if isinstance(value, float):
            return float(value) if math.isfinite(value) else {"float": repr(float(value))}
        if isinstance(value, bytes):
            return {"bytes": value.hex()}
        if isinstance(value, list | tuple):
            items = [self.encode(item, f"{name}.{index}") for index, item in enumerate(value)]
            return items if isinstance(value, list) else {"tuple": items}
        if isinstance(value, Mapping):
            pairs = [
                [self.encode(key, name), self.encode(item, f"{name}.{key}")]
                for key, item in value.items()
            ]
            return {"counter" if isinstance(value, Counter) else "dict": pairs}
        if type(value).__module__ == "numpy" and hasattr(value, "item") and not value.shape:
            return self.encode(value.item(), name)
        raise UsageError(
            f"{name} is a {type(value).__qualname__}, which a checkpoint cannot hold without"
            " pickling it; keep numbers, words, lists, dicts and tensors in the state"
        )

    def _tensor(self, value: torch.Tensor, name: str) -> dict[str, Any]:
        key = (value.data_ptr(), value.dtype, value.device, *value.shape, None, *value.stride())
        repeated = [
            size > 1 and step == 0 for size, step in zip(value.shape, value.stride(), strict=True)
        ]
        if not value.numel() or key not in self._known:
            self._known[key] = name
            kept = value
            for dimension in (index for index, again in enumerate(repeated) if again):
                kept = kept.narrow(dimension, 0, 1)
            self._tensors[name] = kept
        found: dict[str, Any] = {"tensor": self._known[key]}
        return found | {"expand": list(value.shape)} if any(repeated) else found


def named_in(tree: Any) -> set[str]:
    """The names of all tensors of a tree."""
    if isinstance(tree, list):
        return {name for item in tree for name in named_in(item)}
    if isinstance(tree, dict):
        if isinstance(tree.get("tensor"), str):
            return {tree["tensor"]}
        return {name for item in tree.values() for name in named_in(item)}
    return set()


def decoded(tree: Any, tensor: Callable[[str], torch.Tensor], depth: int = 0) -> Any:
    """The value again; `tensor` finds a tensor by its name.

    Raises:
        FileFault: it was not written by `encoded`.
    """
    if depth > _MOST_DEPTH:
        raise FileFault("a checkpoint's state is nested too deeply")

    def inner(value: Any) -> Any:
        return decoded(value, tensor, depth + 1)

    if isinstance(tree, list):
        return [*map(inner, tree)]
    if not isinstance(tree, dict):
        return tree
    try:
        kind = next(iter(tree))
        content = tree[kind]
        if kind == "tensor":
            found = tensor(content)
            return found.expand(tree["expand"]) if "expand" in tree else found
        if len(tree) == 1:
            if kind == "tuple":
                return tuple(map(inner, content))
            if kind in ("dict", "counter"):
                pairs = {inner(key): inner(value) for key, value in content}
                return pairs if kind == "dict" else Counter(pairs)
            if kind in ("float", "int", "bytes"):
                return {"float": float, "int": int, "bytes": bytes.fromhex}[kind](content)
    except FileFault:
        raise
    except (KeyError, ValueError, TypeError, RuntimeError, StopIteration) as fault:
        raise FileFault(
            f"a checkpoint's state has {str(tree)[:80]}, which is none: {fault}"
        ) from None
    raise FileFault(f"a checkpoint's state has {str(tree)[:80]}, which is not a form of it")
