"""Where forward is narrow: the buffers that gradient-checkpointing's 'memory' mode keeps.

That package (Salimans and Bulatov, 2018) looks for tensors through which everything flows and
keeps about sqrt(N) of them, N being the number of tensors that backward reads. It counts tensors,
not bytes. Its rules, in terms of a program:

1. Candidates are what forward ops make for other forward ops on the way to backward, larger than
   1024 elements and not made by normalization, dropout, casts or the loss.
2. An op's output is a bottleneck if the candidates read by the op and all before it, and those
   read by all after it, are disjoint and together all candidates. (It looks at op inputs only, so
   a path around a bottleneck that reads no candidate on its own goes unnoticed.)
3. Bottlenecks that backward reads come first; if they are fewer than sqrt(N), all count.
4. Of more than ceil(sqrt(N)), every step-th is kept and the first `step` are skipped.
"""

import math
import re

from bayplan.data.errors import UsageError
from bayplan.data.program import Program

__all__ = ["LEAST_BYTES", "memory_checkpoints"]

LEAST_BYTES = 4097  # more than 1024 elements of 4 bytes
_NEVER = re.compile(r"batch_norm|dropout|entropy|nll_loss|log_softmax|_to_copy|convert_element")


def memory_checkpoints(program: Program, *, least_bytes: int = LEAST_BYTES) -> tuple[int, ...]:
    """The buffers to keep, in the order they are made.

    Args:
        program: the step.
        least_bytes: smaller buffers are no candidates.

    Raises:
        UsageError: there is no bottleneck, which that package refuses as well.
    """
    path = _ops_before_backward(program)
    candidates = _candidates(program, path, least_bytes)
    narrow = _bottlenecks(program, path, candidates)
    read = [b for b in candidates if program.readers[b][-1] >= program.first_backward]
    root = math.sqrt(len(read))
    chosen = [buffer for buffer in narrow if buffer in {*read}]
    if len(chosen) < root:
        chosen = narrow
    if not chosen:
        raise UsageError(
            f"none of {len(candidates)} forward buffers of {least_bytes} bytes or more is a "
            "bottleneck; choose checkpoints by name, or use mode 'speed'"
        )
    if len(chosen) <= math.ceil(root):
        return tuple(chosen)
    step = math.ceil(len(chosen) / root)
    return tuple(chosen[step::step])


def _ops_before_backward(program: Program) -> list[int]:
    """The forward ops whose results reach backward, in order."""
    backward = program.ops[program.first_backward :]
    wanted = {buffer for op in backward for buffer in op.reads}
    path: list[int] = []
    for index in range(program.first_backward - 1, -1, -1):
        op = program.ops[index]
        if not wanted.isdisjoint(op.writes):
            wanted.update(op.reads)
            path.append(index)
    return path[::-1]


def _candidates(program: Program, path: list[int], least_bytes: int) -> list[int]:
    on_path = {*path}
    return [
        buffer
        for index in path
        if not _NEVER.search(program.ops[index].name)
        for buffer in program.ops[index].writes
        if program.buffers[buffer] >= least_bytes
        and not on_path.isdisjoint(program.readers[buffer])
    ]


def _bottlenecks(program: Program, path: list[int], candidates: list[int]) -> list[int]:
    """Rule 2, with sets of buffers as the bits of integers, so that it is fast on deep networks."""
    bits = {buffer: 1 << place for place, buffer in enumerate(candidates)}
    on_path = {*path}
    read_by = {index: 0 for index in path}
    for index in path:
        for buffer in program.ops[index].reads:
            read_by[index] |= bits.get(buffer, 0)
    before, after = dict(read_by), {index: 0 for index in path}
    for index in path:
        for buffer in program.ops[index].reads:
            before[index] |= before.get(program.producers[buffer], 0)
    for index in reversed(path):
        for buffer in program.ops[index].writes:
            for reader in on_path.intersection(program.readers[buffer]):
                after[index] |= after[reader] | read_by[reader]
    every = (1 << len(candidates)) - 1
    return [
        buffer
        for buffer in candidates
        if not before[(maker := program.producers[buffer])] & after[maker]
        and before[maker] | after[maker] == every
    ]
