"""Packing: values that a joint graph hands from forward to backward, in a smaller lossless form.

A value can be packed where the graph proves that its readers in backward get the same bits:

- A boolean mask (dropout) becomes bits.
- The output of a ReLU becomes bits if backward only asks which elements passed.
- If backward first needs such an output for something else (the next convolution's weight
  gradient), it is packed *late*, behind that. Forward then keeps as much as before, but the output
  is gone while the gradient of the ReLU's output is computed, which is where steps tend to peak.
- The indices of a max-pool become the smallest integers that hold a position in its input's plane.

Packing costs time, so each is an option: `find_packs` lists them and `apply_packs` applies those
chosen. A value is packed right behind its maker (or last other reader) and unpacked before each
reader.
"""

import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import fx

from bayplan import torch_compat
from bayplan.rewriting import packed
from bayplan.rewriting.free import (
    gradient_by_sample,
    gradient_by_shape,
    has_known_geometry,
    is_view,
    nodes_after_tangents,
)

__all__ = ["Pack", "PackKind", "apply_packs", "find_packs"]

aten = torch.ops.aten

# By pooling operator, over how many of the last dimensions its indices count.
_POOL_DIMENSIONS: dict[Any, int] = {
    aten.max_pool2d_with_indices.default: 2,
    aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool2d.default: 2,
    aten.adaptive_max_pool3d.default: 3,
}
_INDICES = 1  # the position of indices among a pooling operator's outputs
_VALUES, _THRESHOLD = 1, 2  # positions among the arguments of `threshold_backward`


class PackKind(StrEnum):
    MASK = "mask"
    SIGN = "sign"
    LATE_SIGN = "late-sign"
    INDICES = "indices"


@dataclass(frozen=True, kw_only=True)
class Pack:
    """One value that could be packed; its name is the same whenever the same step is traced."""

    name: str
    kind: PackKind
    value_bytes: int
    packed_bytes: int

    @property
    def saved_bytes(self) -> int:
        """How much less is kept from forward to backward."""
        return 0 if self.kind is PackKind.LATE_SIGN else self.value_bytes - self.packed_bytes


def find_packs(graph: fx.Graph, *, min_bytes: int = 2**12) -> list[Pack]:
    """All values that can be packed, in the order forward makes them.

    Args:
        graph: a joint graph; best after the free rewrites, which take readers away.
    """
    return [site.pack for site in _sites(graph) if site.pack.value_bytes >= min_bytes]


def apply_packs(graph: fx.Graph, names: Collection[str]) -> None:
    """Rewrite a joint graph so that some values are packed."""
    sites = {site.pack.name: site for site in _sites(graph)}
    unknown = set(names) - set(sites)
    assert not unknown, f"no such packs in this graph: {sorted(unknown)}"
    for name in names:
        with graph.inserting_after(sites[name].after):
            _APPLY[sites[name].pack.kind](graph, sites[name])


@dataclass(frozen=True)
class _Read:
    """A reader, and the name under which it reads a value: the value itself or a view of it."""

    reader: fx.Node
    alias: fx.Node


@dataclass(frozen=True)
class _Site:
    """A pack and where it is in the graph.

    Attributes:
        value: the node to pack.
        after: the node behind which the pack goes.
        reads: those in backward that will read the packed form.
    """

    pack: Pack
    value: fx.Node
    after: fx.Node
    reads: tuple[_Read, ...]


def _sites(graph: fx.Graph) -> list[_Site]:
    order = {node: position for position, node in enumerate(graph.nodes)}
    # The first operator that depends on the gradient of an output.
    computed = (node for node in nodes_after_tangents(graph.nodes) if node.op == "call_function")
    first_backward = next((node for node in computed if not is_view(node)), None)
    if first_backward is None:
        return []
    sites = []
    for value in graph.nodes:
        if value is first_backward:
            break
        reads = sorted(_reads_of(value), key=lambda read: order[read.reader])
        late = [read for read in reads if order[read.reader] >= order[first_backward]]
        if not late or not _is_packable(value) or reads[-1].reader.op == "output":
            continue  # not handed on, or held by the caller all the time
        site = _site_of(value, tuple(late), first_backward)
        if site is not None:
            sites.append(site)
    return sites


def _is_packable(node: fx.Node) -> bool:
    """Whether a node makes a single tensor that fills its memory, of a size known by now."""
    value = node.meta.get("val")
    if node.op != "call_function" or is_view(node) or not isinstance(value, torch.Tensor):
        return False
    return has_known_geometry(value) and packed.is_dense(value.shape, value.stride())


def _reads_of(value: fx.Node) -> list[_Read]:
    """Who reads a value or a view of it."""
    reads, aliases = [], [value]
    for alias in aliases:  # grows on the way
        for user in alias.users:
            if is_view(user):
                aliases.append(user)
            else:
                reads.append(_Read(user, alias))
    return reads


def _site_of(value: fx.Node, reads: tuple[_Read, ...], first_backward: fx.Node) -> _Site | None:
    """How a value could be packed for its readers in backward, given in order."""
    tensor, num_positions = value.meta["val"], _num_positions(value)
    if tensor.dtype is torch.bool:
        pack = _pack(value, PackKind.MASK)
    elif num_positions is not None:
        pack = _pack(value, PackKind.INDICES, 8 * packed.index_dtype(num_positions).itemsize)
    else:
        return _sign_site(value, reads)
    # What backward reads first would be unpacked at the end of forward: nothing to gain.
    is_worth_it = pack.saved_bytes > 0 and reads[0].reader is not first_backward
    return _Site(pack, value, value, reads) if is_worth_it else None


def _sign_site(value: fx.Node, reads: tuple[_Read, ...]) -> _Site | None:
    """How a value could be packed if some of its readers only ask which elements passed a ReLU."""
    signs = tuple(read for read in reads if _asks_for_sign(read))
    others = tuple(read for read in reads if not _asks_for_sign(read))
    if not signs or len({read.reader.args[_THRESHOLD] for read in signs}) > 1:
        return None
    if not others:
        return _Site(_pack(value, PackKind.SIGN), value, value, signs)
    last = others[-1].reader
    if reads != others + signs or last is signs[0].reader:
        return None  # it has to stay until then, or longer
    return _Site(_pack(value, PackKind.LATE_SIGN), value, last, signs)


def _pack(value: fx.Node, kind: PackKind, bits_per_element: int = 1) -> Pack:
    tensor = value.meta["val"]
    packed_bytes = math.ceil(tensor.numel() * bits_per_element / 8)
    value_bytes = tensor.numel() * tensor.element_size()
    name = f"{kind}:{value.name}"
    return Pack(name=name, kind=kind, value_bytes=value_bytes, packed_bytes=packed_bytes)


def _num_positions(node: fx.Node) -> int | None:
    """The number of positions that a pooling's indices count over; None for other nodes."""
    if node.target is not operator.getitem or node.args[1] != _INDICES:
        return None
    pool = node.all_input_nodes[0]
    if pool.target not in _POOL_DIMENSIONS:
        return None
    shape = pool.all_input_nodes[0].meta["val"].shape[-_POOL_DIMENSIONS[pool.target] :]
    return math.prod(shape) if all(isinstance(size, int) for size in shape) else None


def _asks_for_sign(read: _Read) -> bool:
    """Whether a reader only asks which elements passed a ReLU."""
    node, alias = read.reader, read.alias
    if node.target is not aten.threshold_backward.default:
        return False
    if node.args[_VALUES] is not alias or node.args[0] is alias:
        return False
    while alias.target is aten.detach.default:
        alias = alias.all_input_nodes[0]
    return not is_view(alias)  # bits follow the memory of the value, which a view may reorder


def _apply_mask(graph: fx.Graph, site: _Site) -> None:
    shape, stride = tuple(site.value.meta["val"].shape), tuple(site.value.meta["val"].stride())
    bits = _call(graph, packed.pack_bits, (site.value, stride))
    _unpack_for_readers(graph, site.reads, site.value, packed.unpack_bits, (bits, shape, stride))


def _apply_indices(graph: fx.Graph, site: _Site) -> None:
    num_positions = _num_positions(site.value)
    assert num_positions is not None, "indices come from a pooling"
    dtype = packed.index_dtype(num_positions)
    small = _call(graph, packed.as_integers, (site.value, dtype))
    pool = site.value.all_input_nodes[0]
    # A dimension of samples, and one of channels, before those of positions.
    has_batch = site.value.meta["val"].dim() == _POOL_DIMENSIONS[pool.target] + 2
    others = []
    for read in site.reads:
        node = read.reader
        if node.target is gradient_by_shape and node.args[-1] is site.value and has_batch:
            node.target = gradient_by_sample
            node.args = (*node.args[:-1], small)
            node.kwargs = {"stride": tuple(node.meta["val"].stride())}
        else:
            others.append(read)
    _unpack_for_readers(graph, others, site.value, packed.as_integers, (small, torch.int64))


def _apply_sign(graph: fx.Graph, site: _Site) -> None:
    threshold = site.reads[0].reader.args[_THRESHOLD]
    stride = tuple(site.value.meta["val"].stride())
    bits = _call(graph, packed.pack_positive, (site.value, threshold, stride))
    for read in site.reads:
        # Changed where it stands: it gives the same tensor as before, and others may know it.
        read.reader.target = packed.threshold_backward_from_bits
        read.reader.args = (read.reader.args[0], bits, stride)


_APPLY: dict[PackKind, Callable[[fx.Graph, _Site], None]] = {
    PackKind.MASK: _apply_mask,
    PackKind.INDICES: _apply_indices,
    PackKind.SIGN: _apply_sign,
    PackKind.LATE_SIGN: _apply_sign,
}


def _unpack_for_readers(
    graph: fx.Graph,
    reads: Sequence[_Read],
    value: fx.Node,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Let each reader read an unpacked copy of its own, through the same views."""
    copies: dict[fx.Node, dict[fx.Node, fx.Node]] = {}
    for read in reads:
        with graph.inserting_before(read.reader):
            made = copies.setdefault(read.reader, {})
            if value not in made:
                made[value] = _call(graph, function, args)
            read.reader.replace_input_with(read.alias, _seen_through(graph, read.alias, made))


def _seen_through(graph: fx.Graph, alias: fx.Node, made: dict[fx.Node, fx.Node]) -> fx.Node:
    """A view of a value as a view of its copy; what is `made` already is used again."""
    if alias not in made:
        source = alias.args[0]
        assert isinstance(source, fx.Node), "a view is of its first argument"
        copy = _seen_through(graph, source, made)
        made[alias] = graph.node_copy(
            alias, lambda argument: copy if argument is source else argument
        )
    return made[alias]


def _call(graph: fx.Graph, function: Callable[..., Any], args: tuple[Any, ...]) -> fx.Node:
    """A new node at the insertion point, with its fake value."""
    node = graph.call_function(function, args)
    fakes = fx.node.map_arg(args, lambda source: source.meta["val"])
    with torch_compat.fake_mode_of([fake for fake in fakes if isinstance(fake, torch.Tensor)]):
        node.meta["val"] = function(*fakes)
    return node
