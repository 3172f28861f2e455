"""Which tensors of a model a rank holds: those that its stages read, and no others.

Every rank starts with the whole model. What only other ranks read is released, and comes back when
somebody asks for the model's state: then all ranks must ask, as each has what others lack.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import distributed, nn

__all__ = ["Holdings"]


class Holdings:
    """The tensors of one rank's model.

    Args:
        model: whose `state_dict` is to be whole; on all ranks at once.
        holders: by name of a parameter or buffer, the ranks that hold it. What nobody holds stays
            where it is.
        rank: this one.
    """

    def __init__(self, model: nn.Module, holders: Mapping[str, tuple[int, ...]], rank: int) -> None:
        named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self._holders = {name: ranks for name, ranks in holders.items() if name in named}
        self._tensors = named
        self._foreign = {
            name: torch.empty_like(named[name], device="meta")
            for name, ranks in self._holders.items()
            if rank not in ranks
        }
        self._is_whole = True
        model.register_state_dict_pre_hook(self._before_state)
        model.register_load_state_dict_pre_hook(self._before_state)

    def release(self) -> None:
        """Give the memory of what others hold back."""
        if self._is_whole:
            for name in self._foreign:
                tensor = self._tensors[name]
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self._is_whole = False

    def collect(self) -> None:
        """Bring everything up to date, from the first rank that holds it; on all ranks at once."""
        for name, like in self._foreign.items():
            tensor = self._tensors[name]
            if not self._is_whole:
                tensor.data = torch.empty_like(like, device=tensor.device)
        for name, ranks in self._holders.items():
            if len(ranks) < distributed.get_world_size():
                tensor = self._tensors[name].data
                whole = tensor.contiguous()  # gloo takes no other
                distributed.broadcast(whole, ranks[0])
                if whole is not tensor:
                    tensor.copy_(whole)
        self._is_whole = True

    def _before_state(self, *_: Any) -> None:
        self.collect()
