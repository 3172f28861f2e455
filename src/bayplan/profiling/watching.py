"""Following a step on fake tensors and looking at some of its operators, by their node's number."""

from collections.abc import Collection
from typing import Any

from bayplan import torch_private

__all__ = ["NodeWatch"]


class NodeWatch(torch_private.TorchDispatchMode):
    """Counts operators as a captured graph does; to be given to `follow_step`."""

    def __init__(self, nodes: Collection[int]) -> None:
        super().__init__()
        self._nodes, self._index = nodes, 0

    def look_at(self, index: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called for each of the nodes, before it runs."""
        raise NotImplementedError

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not torch_private.is_bookkeeping(func):
            if self._index in self._nodes:
                self.look_at(self._index, func, args, kwargs)
            self._index += 1
        return func(*args, **kwargs)
