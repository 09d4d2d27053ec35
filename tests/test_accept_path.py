import pytest
import torch
from op_checks import same
from test_accept_prefix import INVALID, LIMIT, RUNNING, STALE, STOP, slow_accept, state
from trees import SlowTree, choices_along, from_parents, random_tree

pytestmark = pytest.mark.op


def slow_walk(ids, parents, choices, path_rows):
    """Return the rows that the choices of one tree lead to."""
    rows = [0]
    while len(rows) < path_rows:
        at, choice = rows[-1], choices[rows[-1]]
        child = [row for row in range(at + 1, len(ids)) if parents[row] == at and ids[row] == choice >= 0]
        if not child:
            break
        rows.append(child[0])
    return rows


def expected(case):
    """Return tokens, length, num_context, done, path and chain after the op: the definition, row by row."""
    ids, parents, choices, stops, limits, tokens, length, num_context, done, path, *_ = (x.tolist() for x in case)
    results = []
    for b in range(len(ids)):
        walked = slow_walk(ids[b], parents[b], choices[b], len(path[b]))
        chained = [[of[b][row] for row in walked] for of in (ids, choices)]
        row = slow_accept(*chained, stops[b], limits[b], tokens[b], length[b], num_context[b], done[b])
        count, columns = row[2], len(path[b])
        kept = [choices[b][at] for at in walked[:count]]
        drafts = [ids[b][at] for at in walked[: count + 1]]  # the last emitted token may have been drafted too
        padded = [x + [-1] * (columns - len(x)) for x in (kept, drafts)]
        results.append([*row, [*walked[:count], *range(count, columns)], *padded])
    return [torch.tensor(column) for column in zip(*results, strict=True)]


def arguments(tree: SlowTree, choices, path_rows, *args, **options):
    """The op's arguments, with the state of `state`."""
    ids, choices, *rest = state(*tree.ids.shape, tree.ids, choices, *args, **options)
    return ids, tree.parents, choices, *rest, *(torch.full((len(ids), path_rows), STALE) for _ in range(3))


def draw(seed, batch, rows, path_rows):
    """Trees whose choices follow random paths; tight limits, stop tokens, rows done, invalid choices."""
    g = torch.Generator().manual_seed(seed)
    tree = random_tree(
        g, batch, rows, max(1, path_rows + seed % 3 - 1), missing=seed % 4 * 2, wide=0.2 + seed % 2 * 0.3
    )
    choices, paths = choices_along(g, tree)
    for b in range(batch):
        if torch.rand((), generator=g) < 0.2:
            choices[b, paths[b][int(torch.randint(0, len(paths[b]), (), generator=g))]] = -1
    stops = torch.cat([torch.randint(0, 40, (batch, seed % 3), generator=g), torch.full((batch, seed % 2), -1)], 1)
    capacity = rows + 20
    length = torch.randint(0, capacity, (batch,), generator=g)
    limits = length + torch.randint(0, path_rows + 6, (batch,), generator=g)
    done = torch.randint(0, 4, (batch,), generator=g) * (torch.rand(batch, generator=g) < 0.2)
    return arguments(tree, choices, path_rows, stops, limits, capacity, length, done)


def check(accept, case):
    wanted, before = expected(case), [x.clone() for x in case[:5]]
    case = [x.clone() for x in case]
    assert accept(*case) is None
    assert same(case, before + wanted)


# Rows, path_rows
SIZES = [(1, 1), (2, 1), (2, 2), (4, 16), (16, 16), (33, 8), (64, 16), (65, 5), (128, 16), (128, 200)]


@pytest.mark.parametrize(("rows", "path_rows"), SIZES)
def test_random_trees_against_the_definition(rows, path_rows, implementation):
    for seed in range(6):
        check(implementation.accept_path_, draw(seed, 9, rows, path_rows))


#        9
#    1       2        rows 1 and 2
#  3   4   3   5      rows 3, 5, 4, 6
#  6                  row 7
IDS, PARENTS = [9, 1, 2, 3, 3, 4, 5, 6], [-1, 0, 0, 1, 2, 1, 2, 3]


def run(accept, choices, path_rows=8, ids=IDS, parents=PARENTS, **options):
    case = arguments(from_parents([ids], [parents]), choices, path_rows, **options)
    accept(*case)
    tokens, length, num_context, done, path = (x[0] for x in case[5:10])
    assert length.item() == 3 + num_context.item()
    return tokens[tokens != STALE].tolist()[1:], path.tolist()[: num_context.item()], done.item()


def test_missing_rows_are_never_accepted(implementation):
    accept = implementation.accept_path_
    missing = {"ids": [9, 1, -1, -1], "parents": [-1, 0, -1, -1], "path_rows": 4}
    assert run(accept, [1, -1, -1, -1], **missing) == ([1], [0], INVALID)
    assert run(accept, [1, 7, 7, 7], **missing) == ([1, 7], [0, 1], RUNNING)
    # not even below a parent, nor as stop token
    missing["parents"] = [-1, 0, 1, 2]
    assert run(accept, [1, -1, -1, -1], stops=[-1], **missing) == ([1], [0], INVALID)


def test_parents_that_are_no_earlier_row_have_no_children(implementation):
    accept = implementation.accept_path_
    for parent in (-(2**63), -1, 2, 3, 100, 2**31, 2**32, 2**63 - 1):
        case = list(arguments(from_parents([[9, 1, 2]], [[-1, 0, 1]]), [[1, 2, 7]], 3))
        case[1] = torch.tensor([[parent, 0, parent]])
        accept(*case)
        assert case[9].tolist() == [[0, 1, 2]]
        assert case[7].tolist() == [2]


def test_of_siblings_with_one_id_the_first_counts(implementation):
    twins = {"ids": [9, 1, 1, 4, 5], "parents": [-1, 0, 0, 1, 2], "path_rows": 5}
    assert run(implementation.accept_path_, [1, 4, 5, 6, 7], **twins) == ([1, 4, 6], [0, 1, 3], RUNNING)


@pytest.mark.parametrize("done", [STOP, LIMIT, INVALID])
def test_a_row_that_is_done_stays_and_has_no_path(done, implementation):
    ids, parents = torch.tensor([[9, 1, 2], [-5, 2**62, -(2**63)]]), torch.tensor([[-1, 0, 0], [2**62, -9, 1]])
    tree = SlowTree(ids, parents, None, None)
    case = arguments(tree, [[2, 3, 4], [2**62, -1, 7]], 3, [3], done=done)
    tokens = case[5].clone()
    implementation.accept_path_(*case)
    assert torch.equal(case[5], tokens)
    assert [x.tolist() for x in case[6:]] == [
        [3, 3], [0, 0], [done, done], [[0, 1, 2]] * 2, [[-1] * 3] * 2, [[9, -1, -1], [-5, -1, -1]],
    ]  # fmt: skip


@pytest.mark.parametrize("limit", [-(2**63), -1, 0, 50, 2**63 - 1])
def test_a_length_without_room_emits_nothing(limit, implementation):
    for length in (-(2**63), -51, -1, 49, 50, 1000, 2**31, 2**62, 2**63 - 1):
        case = list(arguments(from_parents([IDS] * 2, [PARENTS] * 2), [[2, 0, 5, 0, 0, 0, 7, 0]] * 2, 3, [5]))
        around = torch.full((6, 50), STALE)
        case[4:7] = [torch.tensor([limit, 20]), around[2:4], torch.tensor([length, 3])]
        implementation.accept_path_(*case)
        assert [x.tolist() for x in case[6:10]] == [[length, 5], [0, 2], [LIMIT, STOP], [[0, 1, 2], [0, 2, 2]]]
        assert [x.tolist() for x in case[10:]] == [[[-1] * 3, [2, 5, -1]], [[9, -1, -1], [9, 2, 5]]]
        assert (around != STALE).nonzero().tolist() == [[3, 4], [3, 5]]
