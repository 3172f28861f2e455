"""What fills the memory at the peak, to the byte."""

from bayplan.planning.memory.decisions import peak_moment
from bayplan.simulating.schedule import plain_schedule, replay_schedule
from bayplan.simulating.swaps import Arrangement


def total_bytes(moment) -> int:
    values = sum(value.size_bytes for value in moment.values)
    return moment.always_bytes + moment.outputs_bytes + moment.workspace_bytes + values


def test_parts_of_a_chain_add_up_to_its_peak(make_chain):
    program = make_chain(4)
    schedule = plain_schedule(program)
    moment = peak_moment(Arrangement(schedule).apply(program))
    replay = replay_schedule(program, schedule)
    assert moment.op == program.ops[replay.peak_step].name
    assert total_bytes(moment) == replay.peak_bytes
    assert moment.always_bytes == 10


def test_largest_values_come_first_and_inputs_are_not_among_them(make_residual):
    program = make_residual(2)
    moment = peak_moment(Arrangement(plain_schedule(program)).apply(program))
    sizes = [value.size_bytes for value in moment.values]
    assert sizes == sorted(sizes, reverse=True)
    assert 0 < len(sizes) <= 20
    assert moment.always_bytes == program.always_bytes
    makers = {op.name for op in program.ops}
    assert {value.value for value in moment.values} <= makers


def test_repeats_lower_the_moment_with_the_peak(make_chain):
    program = make_chain(6)
    plain = Arrangement(plain_schedule(program)).apply(program)
    # All of forward is made again before each backward op, up to what that op reads.
    schedule = list(range(6))
    for layer in reversed(range(6)):
        schedule += [*range(layer), 6 + (5 - layer)]
    repeated = Arrangement(tuple(schedule)).apply(program)
    assert total_bytes(peak_moment(repeated)) < total_bytes(peak_moment(plain))
