"""Fake tensors that know their values where that costs next to nothing.

A step that is captured without memory still makes decisions: whether an attention mask is all ones,
how long the longest sentence is, whether a layer is dropped. What they depend on is almost always
small: token numbers and masks of the batch, counters, constants, one random number. Each operator
that reads only such tensors is computed for real beside its fake run, so whoever asks for a value
(`.item()`, `if mask.all()`, `x[mask]`, `nonzero`) gets the answer that plain training would get.

1. A tensor is known if it comes from the batch, from a factory function, from a constant or from
   known tensors, and is small: `MOST_NUMBERS` of integers or booleans, `MOST_FLOATS` of others.
   Parameters are not: what they decide changes as they are trained.
2. A known tensor's views share memory with it, so changes in place reach all of them. Where a known
   tensor is written from an unknown one, it and all of its views are unknown from then on.
3. Random numbers come from a generator of our own, so the user's goes on as if nothing had run.
   Single ones between 0 and 1 may all be the lowest or the highest instead: a step that drops
   layers at random then goes the way that keeps all of them (`go_fullest_way`).
4. A step that decides by what parameters compute is captured with `knows_all`: then every tensor of
   the forward is known, and the forward is computed for real beside its fake run.
5. Of an optimizer's update only single numbers are known, its counters: however often a step runs,
   its parameters decide what they decide in the step that is about to run.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bayplan import torch_answers, torch_compat
from bayplan.devices.device import device_of
from bayplan.devices.meters import leave_out

__all__ = ["MOST_FLOATS", "MOST_NUMBERS", "KnownValues", "forget", "is_small", "learn", "value_of"]

MOST_NUMBERS = 4_194_304
MOST_FLOATS = 4_096

aten = torch.ops.aten
_SEED = 0
_BETWEEN_0_AND_1 = {aten.rand, aten.rand_like, aten.bernoulli, aten.bernoulli_}
_EXTREMES = (1 - 2**-24, 0.0)


@dataclass(eq=False)
class _Memory:
    """What all views of one known storage share."""

    is_known: bool = True


@dataclass(frozen=True, eq=False)
class _Known:
    value: torch.Tensor
    memory: _Memory


_MARK = torch_answers.KNOWN  # the attribute of a fake tensor that holds its `_Known`


def value_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values of a tensor, on the CPU and not to be changed; None if they are not known."""
    known = _known(tensor)
    return None if known is None else known.value


def learn(tensor: torch.Tensor, value: torch.Tensor, *, of_any_size: bool = False) -> None:
    """Let a fake tensor know its values, which from now on belong to it."""
    is_alike = tensor.shape == value.shape and tensor.dtype == value.dtype
    if is_alike and (of_any_size or is_small(tensor)):
        setattr(tensor, _MARK, _Known(leave_out(value), _Memory()))


def forget(tensor: torch.Tensor) -> None:
    """Let a fake tensor and all its views not know their values any more."""
    known = getattr(tensor, _MARK, None)
    if known is not None:
        known.memory.is_known = False


def is_small(tensor: torch.Tensor) -> bool:
    is_float = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.numel() <= (MOST_FLOATS if is_float else MOST_NUMBERS)


def _known(tensor: torch.Tensor, *, of_any_size: bool = False) -> _Known | None:
    if isinstance(tensor, torch_compat.FakeTensor):
        known = getattr(tensor, _MARK, None)
        # `tensor.data = …` leaves the mark of what was there before.
        if known is None or not known.memory.is_known or known.value.shape != tensor.shape:
            return None
        return known
    is_plain = device_of(tensor.device).has_host_memory and tensor.layout is torch.strided
    if not is_plain or not (of_any_size or _is_cheap(tensor)):
        return None
    return _Known(tensor.detach(), _Memory())


def _is_cheap(tensor: torch.Tensor) -> bool:
    """Whether a real tensor is small, and so is the storage that it is a part of."""
    num_stored = tensor.untyped_storage().nbytes() // tensor.element_size()
    return is_small(tensor) and num_stored <= MOST_NUMBERS


class _Copies:
    """Stands in for real tensors, which are the user's: what is written to them stays here."""

    def __init__(self) -> None:
        self._of_storage: dict[int, tuple[torch.UntypedStorage, torch.Tensor, _Memory]] = {}

    def known(self, tensor: torch.Tensor, *, of_any_size: bool) -> _Known | None:
        """What is known of a tensor, by the copy of a real one."""
        known = _known(tensor, of_any_size=of_any_size)
        if known is None or isinstance(tensor, torch_compat.FakeTensor):
            return known
        storage = tensor.untyped_storage()
        key = torch_compat.storage_key(storage)
        if key not in self._of_storage:
            whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            copy = leave_out(whole.clone())
            # With the storage itself, so that its key is nobody else's.
            self._of_storage[key] = (storage, copy, _Memory())
        _, copy, memory = self._of_storage[key]
        flat = copy.view(tensor.dtype)
        value = flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        return _Known(value, memory) if memory.is_known else None


class KnownValues(torch_compat.FakeTensorMode):
    """Fakes tensors, and computes what is known of them on the side."""

    def __init__(self, *, knows_all: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.knows_all = knows_all
        self._is_inside = False  # an operator that is faked by way of others
        self._is_updating = False
        self._copies = _Copies()
        self._single: float | None = None  # what every single random number is; None as it comes
        self._num_singles = self._made_bytes = 0
        self._num_writes = Counter[int]()  # by storage, `parameter.data` included
        own = torch.Generator().manual_seed(_SEED).get_state()
        # What depends on random numbers is to go the way of the step that is about to run.
        self._first_state = torch.get_rng_state() if knows_all else own
        self.draw_again()

    def draw_again(self) -> None:
        """Let the next random numbers be those that came first."""
        self._random_state = self._first_state

    def num_writes(self, tensor: torch.Tensor) -> int:
        """How often a tensor's memory was written to in place, also where torch does not count."""
        return self._num_writes[torch_compat.storage_key(tensor.untyped_storage())]

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Tell the updates of an optimizer from the rest of its step."""

        def updating(is_updating: bool, *_: object) -> None:
            self._is_updating = is_updating

        optimizer.register_step_pre_hook(partial(updating, True))
        optimizer.register_step_post_hook(partial(updating, False))

    def go_fullest_way(self, run: Callable[[], object]) -> None:
        """Run a step, and let it later go the way that makes most.

        Whether a layer is dropped is decided by one random number between 0 and 1. Where a step
        draws such numbers it is run with each as it comes, then with all at their lowest and all at
        their highest. What they do not decide stays as it comes.
        """
        as_drawn = self._made_by(run)
        if not self._num_singles:
            return
        made_bytes: dict[float, int] = {}
        for self._single in _EXTREMES:
            try:
                made_bytes[self._single] = self._made_by(run)
            except Exception:  # a way that the step cannot go
                made_bytes[self._single] = 0
        largest = max(made_bytes, key=lambda single: made_bytes[single])
        decides = {*made_bytes.values()} != {as_drawn}
        self._single = largest if decides and made_bytes[largest] >= as_drawn else None

    def go_as_drawn(self, run: Callable[[], object]) -> None:
        """Run a step, and let it later go the way that its random numbers lead."""
        self._made_by(run)

    def _made_by(self, run: Callable[[], object]) -> int:
        self._num_singles = self._made_bytes = 0
        self.draw_again()
        run()
        return self._made_bytes

    def __torch_dispatch__(  # pyrefly: ignore[bad-override] - as all modes of ours
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._is_inside or torch_compat.is_bookkeeping(func):
            return super().__torch_dispatch__(func, types, args, kwargs)
        self._is_inside = True
        try:
            return self._run(func, types, args, kwargs)
        finally:
            self._is_inside = False

    def _run(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        taken = torch_compat.tensors_in((args, kwargs))
        # What backward computes decides nothing, so only the small is known there.
        takes_all = self.knows_all and torch_compat.current_backward_sequence() is None
        known_of = {
            id(tensor): self._copies.known(tensor, of_any_size=takes_all) for tensor in taken
        }
        knows_all = None not in known_of.values()
        try:
            output = super().__torch_dispatch__(func, types, args, kwargs)
        except torch_compat.VALUE_DEPENDENT_ERRORS:
            if knows_all:
                return self._with_values(self._compute(func, args, kwargs, known_of))
            if func is aten.index.Tensor or func is aten.masked_select.default:
                return self._chosen(types, *args)
            raise
        changed = torch_compat.mutated_arguments(func, args, kwargs)
        for tensor in torch_compat.tensors_in(changed):
            if tensor.layout is torch.strided:
                self._num_writes[torch_compat.storage_key(tensor.untyped_storage())] += 1
        if not changed and not func.is_view:
            made_bytes = (
                each.numel() * each.element_size() for each in torch_compat.tensors_in(output)
            )
            self._made_bytes += sum(made_bytes)
        if self._is_updating and any(tensor.dim() for tensor in torch_compat.tensors_in(changed)):
            return output
        if not knows_all:
            for tensor in torch_compat.tensors_in(changed):
                known = known_of[id(tensor)]
                # An update of parameters is not known: they decide as they did before it.
                if known is not None and not self.knows_all:
                    known.memory.is_known = False
            return output
        made = torch_compat.tensors_in(output)
        is_dense = all(tensor.layout is torch.strided for tensor in made)
        is_cheap = changed or func.is_view or all(map(is_small, made))
        if made and is_dense and (is_cheap or takes_all):
            self._remember(made, func, args, kwargs, known_of)
        return output

    def _remember(
        self,
        made: Iterable[torch.Tensor],
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known_of: dict[int, _Known | None],
    ) -> None:
        try:
            values = torch_compat.tensors_in(self._compute(func, args, kwargs, known_of))
        except Exception:  # whatever it is, plain training meets it where it belongs
            for tensor in torch_compat.tensors_in((args, kwargs)):
                known = known_of[id(tensor)]
                if known is not None and not func.is_view:
                    known.memory.is_known = False
            return
        memories = {
            torch_compat.storage_key(known.value.untyped_storage()): known.memory
            for known in known_of.values()
            if known is not None
        }
        for tensor, value in zip(made, values, strict=True):
            if isinstance(tensor, torch_compat.FakeTensor):
                key = torch_compat.storage_key(value.untyped_storage())
                known = _Known(leave_out(value), memories.get(key) or _Memory())
                setattr(tensor, _MARK, known)

    def _compute(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known_of: dict[int, _Known | None],
    ) -> Any:
        """Run an operator on known values, on the CPU."""

        def real(tensor: torch.Tensor) -> torch.Tensor:
            known = known_of[id(tensor)]
            assert known is not None, "only what is known can be computed with"
            return known.value

        def here(_: torch.device) -> torch.device:
            return torch.device("cpu")

        args, kwargs = torch_compat.tree_map_only(torch.Tensor, real, (args, kwargs))
        args, kwargs = torch_compat.tree_map_only(torch.device, here, (args, kwargs))
        kwargs = {name: given for name, given in kwargs.items() if name != "pin_memory"}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            made = func(*args, **kwargs)
            if "empty" in func.overloadpacket.__name__:  # what lay in memory is no value
                for tensor in torch_compat.tensors_in(made):
                    tensor.zero_()
            return made
        generator = torch.Generator()
        generator.set_state(self._random_state)
        before = torch.get_rng_state()
        if kwargs.get("generator") is not None:
            kwargs["generator"] = generator
        torch.set_rng_state(self._random_state)
        try:
            return self._at_an_end(func, func(*args, **kwargs))
        finally:
            is_own = kwargs.get("generator") is not None
            self._random_state = generator.get_state() if is_own else torch.get_rng_state()
            torch.set_rng_state(before)

    def _at_an_end(self, func: Any, drawn: Any) -> Any:
        """What was drawn; where it is one number between 0 and 1, as `go_fullest_way` has it."""
        if func.overloadpacket in _BETWEEN_0_AND_1 and drawn.numel() == 1:
            self._num_singles += 1
            if self._single is not None:
                drawn.fill_(self._single)
        return drawn

    def _with_values(self, answer: Any) -> Any:
        """What an operator returns whose result's form hangs on values: fakes that know them."""

        def fake(value: torch.Tensor) -> torch.Tensor:
            with self:
                tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
            learn(tensor, value, of_any_size=self.knows_all)
            return tensor

        return torch_compat.tree_map_only(torch.Tensor, fake, answer)

    def _chosen(self, types: Any, tensor: torch.Tensor, choice: Any) -> Any:
        """`x[mask]` of an unknown tensor by a known mask: as many rows as the mask has."""
        if isinstance(choice, torch.Tensor):  # masked_select broadcasts both
            shape = torch.broadcast_shapes(tensor.shape, choice.shape)
            value = value_of(choice)
            with self:
                tensor, choice = tensor.expand(shape), choice.expand(shape)
            if value is not None:
                learn(choice, value.expand(shape), of_any_size=self.knows_all)
        choices = [choice] if isinstance(choice, torch.Tensor) else choice
        indices: list[torch.Tensor | None] = []
        for part in choices:
            if part is None or part.dtype not in (torch.bool, torch.uint8):
                indices.append(part)
                continue
            value = value_of(part)
            if value is None:
                raise torch_compat.VALUE_DEPENDENT_ERRORS[1](aten.index.Tensor)
            indices += [self._with_values(rows) for rows in value.nonzero().unbind(1)]
        return super().__torch_dispatch__(aten.index.Tensor, types, (tensor, indices), {})
