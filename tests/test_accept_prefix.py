import pytest
import torch
from op_checks import same

from dflash import ops

pytestmark = pytest.mark.op

RUNNING, STOP, LIMIT, INVALID = range(4)
STALE = -7


def slow_accept(block_ids, posterior, stop_token_ids, limits, tokens, length, num_context, done):
    """The definition, on lists of one row; returns tokens, length, num_context, done."""
    if done:
        return tokens, length, 0, done
    rows, room = len(block_ids), max(min(limits, len(tokens)) - 1 - length, 0)
    n = 0
    while n < rows - 1 and block_ids[n + 1] == posterior[n] and posterior[n] >= 0:
        n += 1
    emitted = posterior[: n + 1]
    stops = [j for j, token in enumerate(emitted) if token in stop_token_ids and token >= 0]
    emitted = emitted[: stops[0] + 1] if stops else emitted
    emitted = emitted[:room]
    if any(token < 0 for token in emitted):
        emitted = emitted[: [token < 0 for token in emitted].index(True)]
        done = INVALID
    elif emitted and emitted[-1] in stop_token_ids:
        done = STOP
    elif len(emitted) == room:
        done = LIMIT
    count = len(emitted)
    return tokens[: length + 1] + emitted + tokens[length + 1 + count :], length + count, count, done


def state(batch, rows, block_ids, posterior, stops=(), limits=1000, capacity=50, length=3, done=0):
    """The op's eight arguments; tokens are stale except the anchor."""

    def whole(value, *shape):
        return torch.as_tensor(value, dtype=torch.int64).expand(*shape).contiguous()

    stops = torch.as_tensor(stops, dtype=torch.int64)
    tokens = torch.full((batch, capacity), STALE)
    length = whole(length, batch)
    block_ids = whole(block_ids, batch, rows)
    tokens.scatter_(1, length[:, None].clamp(max=capacity - 1), block_ids[:, :1])
    return (
        block_ids, whole(posterior, batch, rows), stops.expand(batch, -1).contiguous(), whole(limits, batch),
        tokens, length, torch.full((batch,), STALE), whole(done, batch),
    )  # fmt: skip


def draw_case(seed, batch, rows):
    """Mostly matching proposals, few ids, tight limits, capacities that end early, rows done and rows invalid."""
    g = torch.Generator().manual_seed(seed)

    def whole(low, high, *shape):
        return torch.randint(low, high, shape, generator=g)

    posterior = whole(0, 40, batch, rows)
    posterior[torch.rand(batch, rows, generator=g) < 0.3 / rows] = -1
    block_ids = torch.cat([whole(0, 40, batch, 1), posterior[:, :-1]], 1)
    wrong = torch.rand(batch, rows, generator=g) < whole(0, 3, batch, 1) / rows
    block_ids = torch.where(wrong, whole(-1, 40, batch, rows), block_ids)
    stops = torch.cat([whole(0, 40, batch, seed % 3), whole(-1, 0, batch, seed % 2)], 1)
    capacity = rows + 20
    length = whole(0, capacity, batch)
    limits = length + whole(0, rows + 6, batch)
    done = whole(0, 4, batch) * (torch.rand(batch, generator=g) < 0.2)
    return state(batch, rows, block_ids, posterior, stops, limits, capacity, length, done)


def expected(case):
    block_ids, posterior, stops, limits, tokens, length, num_context, done = (x.tolist() for x in case)
    rows = [
        slow_accept(*row)
        for row in zip(block_ids, posterior, stops, limits, tokens, length, num_context, done, strict=True)
    ]
    return [torch.tensor(column) for column in zip(*rows, strict=True)]


def check(accept, case):
    before = [x.clone() for x in case[:4]]
    wanted = expected(case)
    case = [x.clone() for x in case]
    assert accept(*case) is None
    assert same(case[4:], wanted)
    for have, want in zip(case[:4], before, strict=True):
        assert torch.equal(have.cpu(), want)


@pytest.mark.parametrize("rows", [1, 2, 7, 16, 31, 32, 33, 64, 113])
def test_against_the_definition(implementation, rows):
    accept = implementation.accept_prefix_
    for seed in range(20):
        check(accept, draw_case(seed, 17, rows))


def run(accept, *args, **options):
    case = state(1, len(args[0]), *args, **options)
    accept(*case)
    tokens, length, num_context, done = (x[0] for x in case[4:])
    fresh = tokens[tokens != STALE].tolist()
    return fresh, length.item(), num_context.item(), done.item()


def test_cases_by_hand(implementation):
    accept = implementation.accept_prefix_
    block = [9, 1, 2, 3]
    assert run(accept, block, [1, 2, 3, 4]) == ([9, 1, 2, 3, 4], 7, 4, RUNNING)
    assert run(accept, block, [1, 2, 8, 4]) == ([9, 1, 2, 8], 6, 3, RUNNING)
    assert run(accept, block, [7, 2, 3, 4]) == ([9, 7], 4, 1, RUNNING)
    assert run(accept, [9], [5]) == ([9, 5], 4, 1, RUNNING)
    # a stop token that matches, one that is the bonus, one past the prefix
    assert run(accept, block, [1, 2, 3, 4], stops=[2, 3]) == ([9, 1, 2], 5, 2, STOP)
    assert run(accept, block, [1, 2, 8, 4], stops=[8]) == ([9, 1, 2, 8], 6, 3, STOP)
    assert run(accept, block, [1, 7, 3, 4], stops=[3, 4]) == ([9, 1, 7], 5, 2, RUNNING)
    # limits: room for 2, for exactly all, for none; a stop token at the limit, and behind it
    assert run(accept, block, [1, 2, 3, 4], limits=6) == ([9, 1, 2], 5, 2, LIMIT)
    assert run(accept, block, [1, 2, 3, 4], limits=8) == ([9, 1, 2, 3, 4], 7, 4, LIMIT)
    assert run(accept, block, [1, 2, 3, 4], limits=9) == ([9, 1, 2, 3, 4], 7, 4, RUNNING)
    assert run(accept, block, [1, 2, 3, 4], limits=4) == ([9], 3, 0, LIMIT)
    assert run(accept, block, [1, 2, 3, 4], limits=0) == ([9], 3, 0, LIMIT)
    assert run(accept, block, [1, 2, 3, 4], stops=[2], limits=6) == ([9, 1, 2], 5, 2, STOP)
    assert run(accept, block, [1, 2, 3, 4], stops=[3], limits=6) == ([9, 1, 2], 5, 2, LIMIT)
    assert run(accept, block, [1, 2, 3, 4], capacity=6) == ([9, 1, 2], 5, 2, LIMIT)
    # NaN logits: at once, after a match, behind a mismatch, behind a stop token, behind the limit
    assert run(accept, block, [-1, 2, 3, 4]) == ([9], 3, 0, INVALID)
    assert run(accept, block, [1, 2, -1, 4]) == ([9, 1, 2], 5, 2, INVALID)
    assert run(accept, block, [1, 7, -1, 4]) == ([9, 1, 7], 5, 2, RUNNING)
    assert run(accept, block, [1, 2, -1, 4], stops=[2]) == ([9, 1, 2], 5, 2, STOP)
    assert run(accept, block, [1, 2, -1, 4], limits=6) == ([9, 1, 2], 5, 2, LIMIT)
    # -1 is no proposal and no stop token, even against an invalid choice
    assert run(accept, [9, -1, -1, -1], [-1, -1, -1, -1], stops=[-1]) == ([9], 3, 0, INVALID)
    assert run(accept, [9, -1, -1, -1], [4, 5, 6, 7]) == ([9, 4], 4, 1, RUNNING)


@pytest.mark.cuda
def test_runs_on_the_current_stream_and_inside_a_graph():
    assert ops.cuda_status(torch.cuda.current_device()) == ""
    case = draw_case(6, 17, 16)
    device = [x.cuda() for x in case]
    initial = [x.clone() for x in device[4:]]
    graph = torch.cuda.CUDAGraph()
    ops.accept_prefix_(*device)
    with torch.cuda.graph(graph):
        ops.accept_prefix_(*device)
    for x, value in zip(device[4:], initial, strict=True):
        x.copy_(value)
    graph.replay()
    for have, want in zip(device[4:], expected(case), strict=True):
        assert torch.equal(have.cpu(), want)
