"""The executor: the graph's numbers, and nothing in memory after its last use."""

import operator
import weakref

import pytest
import torch
from torch import fx

from bayplan.running.executor import compile_graph
from bayplan.tracing.joint import OVERWRITES

aten = torch.ops.aten


def module_of(graph: fx.Graph, **constants: torch.Tensor) -> fx.GraphModule:
    return fx.GraphModule(dict(constants), graph)


def chain(length: int) -> tuple[fx.Graph, list[fx.Node]]:
    """Negations one after the other, that return the last."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    for _ in range(length):
        nodes.append(graph.call_function(aten.neg.default, (nodes[-1],)))
    graph.output((nodes[-1],))
    return graph, nodes


class Watch:
    """Counts how many of the tensors it was shown are alive."""

    def __init__(self) -> None:
        self.storages: list[weakref.ref] = []
        self.alive_at_calls: list[int] = []

    def see(self, tensor: torch.Tensor) -> torch.Tensor:
        made = tensor + 1
        self.storages.append(weakref.ref(made.untyped_storage()))
        self.alive_at_calls.append(sum(one() is not None for one in self.storages))
        return made


def test_outputs_are_those_of_the_graph():
    graph, _ = chain(3)
    (y,) = compile_graph(module_of(graph))([torch.arange(3.0)])
    assert torch.equal(y, -torch.arange(3.0))


def test_list_of_inputs_is_emptied_and_torch_is_told_so():
    graph, _ = chain(1)
    run = compile_graph(module_of(graph))
    inputs = [torch.ones(2)]
    run(inputs)
    assert inputs == []
    assert run._boxed_call


def test_wrong_number_of_inputs_is_refused():
    graph, _ = chain(1)
    with pytest.raises(ValueError, match="unpack"):
        compile_graph(module_of(graph))([torch.ones(1), torch.ones(1)])


def test_values_are_released_right_after_their_last_use():
    watch, graph = Watch(), fx.Graph()
    value = graph.placeholder("x")
    for _ in range(5):
        value = graph.call_function(watch.see, (value,))
    graph.output((value,))
    compile_graph(module_of(graph))([torch.zeros(3)])
    # While each runs, what it reads and what it makes are there, and no more.
    assert watch.alive_at_calls == [1, 2, 2, 2, 2]


def test_inputs_are_released_after_their_last_use():
    graph, seen = fx.Graph(), []
    first, second = graph.placeholder("first"), graph.placeholder("second")
    total = graph.call_function(aten.add.Tensor, (first, second))
    look = graph.call_function(
        lambda y: seen.append([ref() is None for ref in references]) or y, (total,)
    )
    graph.output((look, second))
    inputs = [torch.ones(3), torch.ones(3)]
    references = [weakref.ref(one.untyped_storage()) for one in inputs]
    outputs = compile_graph(module_of(graph))(inputs)
    assert seen == [[True, False]]  # the second is an output, too
    assert torch.equal(outputs[0], torch.full((3,), 2.0))


def test_value_that_nobody_reads_is_released_at_once():
    watch, graph = Watch(), fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(watch.see, (x,))
    last = graph.call_function(watch.see, (x,))
    graph.output((last,))
    compile_graph(module_of(graph))([torch.zeros(3)])
    assert watch.alive_at_calls == [1, 1]


def test_parts_of_a_tuple_do_not_keep_each_other_alive():
    storages: list[weakref.ref] = []
    alive: list[list[bool]] = []

    def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pair = (x + 1, x + 2)
        storages.extend(weakref.ref(one.untyped_storage()) for one in pair)
        return pair

    def look(x: torch.Tensor) -> torch.Tensor:
        alive.append([one() is not None for one in storages])
        return x * 2

    graph = fx.Graph()
    pair = graph.call_function(split, (graph.placeholder("x"),))
    first = graph.call_function(operator.getitem, (pair, 0))
    second = graph.call_function(operator.getitem, (pair, 1))
    doubled = graph.call_function(look, (first,))
    later = graph.call_function(look, (doubled,))
    graph.output((later, second))
    outputs = compile_graph(module_of(graph))([torch.zeros(2)])
    assert alive == [[True, True], [False, True]]
    assert [one.tolist() for one in outputs] == [[4.0, 4.0], [2.0, 2.0]]


def test_part_that_is_not_asked_for_is_gone_at_once():
    graph, storages = fx.Graph(), []

    def split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pair = (x + 1, x + 2)
        storages.append(weakref.ref(pair[1].untyped_storage()))
        return pair

    def look(x: torch.Tensor) -> torch.Tensor:
        assert storages[0]() is None
        return x * 2

    pair = graph.call_function(split, (graph.placeholder("x"),))
    first = graph.call_function(operator.getitem, (pair, 0))
    graph.output((graph.call_function(look, (first,)),))
    (y,) = compile_graph(module_of(graph))([torch.zeros(2)])
    assert y.tolist() == [2.0, 2.0]


def test_a_tuple_that_is_read_whole_stays_whole():
    graph = fx.Graph()
    pair = graph.call_function(lambda x: (x + 1, x + 2), (graph.placeholder("x"),))
    first = graph.call_function(operator.getitem, (pair, 0))
    total = graph.call_function(lambda pair, first: pair[1] + first, (pair, first))
    graph.output((total,))
    (y,) = compile_graph(module_of(graph))([torch.zeros(2)])
    assert y.tolist() == [3.0, 3.0]


def test_nested_arguments_options_and_constants():
    graph = fx.Graph()
    x = graph.placeholder("x")
    constant = graph.get_attr("weight")
    joined = graph.call_function(aten.cat.default, ([x, constant], 0))
    scaled = graph.call_function(aten.add.Tensor, (joined, joined), {"alpha": 3})
    graph.output((scaled, None, x))
    module = module_of(graph, weight=torch.tensor([5.0]))
    y, nothing, again = compile_graph(module)([torch.ones(1)])
    assert y.tolist() == [4.0, 20.0]
    assert nothing is None
    assert again.tolist() == [1.0]


def test_arguments_that_cannot_be_written_as_text():
    graph = fx.Graph()
    x = graph.placeholder("x")
    limits = graph.call_function(aten.clamp.default, (x, -float("inf"), float("inf")))
    whole = graph.call_function(aten._to_copy.default, (limits,), {"dtype": torch.float64})
    drawn = graph.call_function(lambda x, *, by: x * by[0]["two"], (whole,), {"by": [{"two": x}]})
    graph.output((drawn, [drawn, {"x": x}]))
    y, (same, nested) = compile_graph(module_of(graph))([torch.full((2,), 2.0)])
    assert y is same
    assert y.dtype is torch.float64
    assert (y.tolist(), nested["x"].tolist()) == ([4.0, 4.0], [2.0, 2.0])


def test_input_that_nobody_reads_is_released_at_once():
    graph, alive = fx.Graph(), []
    x, unread = graph.placeholder("x"), torch.ones(3)
    graph.placeholder("unread")
    look = graph.call_function(lambda x: alive.append(reference() is not None) or x, (x,))
    graph.output((look,))
    reference = weakref.ref(unread.untyped_storage())
    inputs = [torch.ones(3), unread]
    del unread
    compile_graph(module_of(graph))(inputs)
    assert alive == [False]


@pytest.mark.parametrize("is_planned", [False, True])
def test_result_takes_over_the_memory_of_an_argument(is_planned):
    graph, nodes = chain(2)
    if is_planned:
        nodes[2].meta[OVERWRITES] = 0
    made: list[int] = []
    between = graph.call_function(lambda y: made.append(y.data_ptr()) or y, (nodes[1],))
    nodes[2].prepend(between)
    nodes[2].args = (between,)
    (y,) = compile_graph(module_of(graph))([torch.arange(1000.0)])
    assert torch.equal(y, torch.arange(1000.0))
    assert (y.data_ptr() == made[0]) == is_planned


def test_a_run_leaves_nothing_for_the_next():
    graph, _ = chain(2)
    run = compile_graph(module_of(graph))
    x = torch.ones(2)
    reference = weakref.ref(x.untyped_storage())
    inputs = [x]
    del x
    outputs = run(inputs)
    assert reference() is None
    assert torch.equal(run([torch.zeros(2)])[0], torch.zeros(2))
    assert torch.equal(outputs[0], torch.ones(2))


def _counter(readers: int) -> fx.Graph:
    """An input is counted up by a copy at the end; so many others read its old value."""
    graph = fx.Graph()
    count = graph.placeholder("count")
    count.meta["val"] = torch.zeros(3)
    more = graph.call_function(aten.add.Tensor, (count, 1))
    more.meta["val"] = torch.zeros(3)
    others = [graph.call_function(aten.neg.default, (count,)) for _ in range(readers)]
    graph.call_function(aten.copy_.default, (count, more))
    graph.output(tuple(others))
    return graph


@pytest.mark.parametrize("readers", [0, 1])
def test_inputs_are_changed_in_place_where_nobody_reads_their_old_values(readers):
    graph = _counter(readers)
    run = compile_graph(module_of(graph))
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    assert len(copies) == readers
    count = torch.arange(3.0)
    others = run([count])
    assert count.tolist() == [1.0, 2.0, 3.0]
    assert [other.tolist() for other in others] == readers * [[-0.0, -1.0, -2.0]]


@pytest.mark.parametrize("is_read", [False, True])
def test_running_statistics_are_changed_in_place_where_nobody_reads_their_new_values(is_read):
    graph = fx.Graph()
    x, mean, variance = (graph.placeholder(name) for name in ("x", "mean", "variance"))
    arguments = (x, None, None, mean, variance, True, 0.1, 1e-5)
    functional = aten._native_batch_norm_legit_functional.default
    norm = graph.call_function(functional, arguments)
    y, *new = (graph.call_function(operator.getitem, (norm, place)) for place in (0, 3, 4))
    for node in (mean, variance, *new):
        node.meta["val"] = torch.zeros(2)
    read = [graph.call_function(aten.neg.default, (new[0],))] if is_read else []
    for old, changed in zip((mean, variance), new, strict=True):
        graph.call_function(aten.copy_.default, (old, changed))
    graph.output((y, *read))
    run = compile_graph(module_of(graph))
    assert (norm.target is functional) == is_read

    images, module = torch.randn(4, 2, 3, 3), torch.nn.BatchNorm2d(2, affine=False)
    statistics = torch.zeros(2), torch.ones(2)
    assert torch.equal(run([images, *statistics])[0], module(images))
    assert torch.equal(statistics[0], module.running_mean)
    assert torch.equal(statistics[1], module.running_var)


def test_views_of_what_is_there_are_not_made():
    # Each took as long as a small kernel, and a traced backward has some for every weight.
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.neg.default, (x,))
    turned = graph.call_function(aten.t.default, (graph.call_function(aten.t.default, (y,)),))
    same = graph.call_function(aten.detach.default, (y,))
    moved = graph.call_function(aten.transpose.int, (y, 0, 1))
    back = graph.call_function(aten.transpose.int, (moved, 0, 1))
    total = graph.call_function(aten.add.Tensor, (same, back))
    graph.output((total, turned, moved))
    run = compile_graph(module_of(graph))
    views = [node for node in graph.nodes if node.target in (aten.detach.default, aten.t.default)]
    assert views == []
    assert len(graph.find_nodes(op="call_function", target=aten.transpose.int)) == 1
    value = torch.arange(6.0).reshape(2, 3)
    total, turned, moved = run([value])
    assert torch.equal(total, -2 * value)
    assert torch.equal(turned, -value)
    assert torch.equal(moved, -value.t())


def test_what_is_returned_is_neither_an_input_nor_returned_twice():
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.neg.default, (x,))
    seen = [graph.call_function(aten.detach.default, (source,)) for source in (x, y, y)]
    graph.output((*seen, y))
    value = torch.ones(2)
    outputs = compile_graph(module_of(graph))([value])
    assert len({id(tensor) for tensor in (value, *outputs)}) == 5


def test_an_input_that_gets_other_memory_shows_its_old_values_through_a_view():
    graph = fx.Graph()
    x, new = graph.placeholder("x"), graph.placeholder("new")
    seen = graph.call_function(aten.detach.default, (x,))
    graph.call_function(aten.set_.source_Tensor, (x, new))
    graph.output((graph.call_function(aten.neg.default, (seen,)),))
    (old,) = compile_graph(module_of(graph))([torch.ones(2), torch.zeros(2)])
    assert old.tolist() == [-1.0, -1.0]


@pytest.mark.parametrize("place", [0, 1])
def test_either_operand_of_a_sum_can_take_the_result(place):
    graph = fx.Graph()
    operands = [graph.placeholder(name) for name in "xy"]
    total = graph.call_function(aten.add.Tensor, tuple(operands))
    total.meta[OVERWRITES] = place
    graph.output((total,))
    values = [torch.ones(2), torch.full((2,), 2.0)]
    (made,) = compile_graph(module_of(graph))([*values])
    assert made.data_ptr() == values[place].data_ptr()
    assert made.tolist() == [3.0, 3.0]
