"""Test the training of DFlash 2 drafters: their gradients, where they start, and what is written."""

import dataclasses
import json
from types import SimpleNamespace

import datasets
import pytest
import torch
from accelerate.state import AcceleratorState
from draft_variants import DFLASH2_VARIANTS, VARIANTS, random_drafter
from draft_variants import VOCAB as DRAFT_VOCAB
from families import VOCAB, make_target
from test_train_model import ANCHORS, inputs

import dflash
from dflash.drafter import DFlash2Config
from dflash_tools.train import TargetFeatures, TrainConfig, Trainer, add_dflash2, draft_config, new_drafter, save_draft
from dflash_tools.train import model as module
from dflash_tools.train.batches import make_blocks
from dflash_tools.train.model import TrainableDrafter, block_loss, candidate_scores, convolve

MASK, BLOCK, TOP_K = 1, 6, 5
PARTS = DFlash2Config(2, 16, 12, TOP_K)


# ---------------------------------------------------------------------------------------------- gradients


def convolved(x, dynamic, base):
    """Convolve one sequence's rows ``x [rows, hidden]`` row by row; ``dynamic [rows, taps, groups]``."""
    taps, groups = dynamic.shape[1:]
    group = torch.arange(x.shape[1]) // (x.shape[1] // groups)
    out = torch.zeros_like(x)
    for row in range(len(x)):
        for tap in range(min(taps, row + 1)):
            out[row] += (base[tap] + dynamic[row, tap, group]) * x[row - tap]
    return out


@pytest.mark.parametrize("is_identity", [True, False])
@pytest.mark.parametrize("taps", [1, 2, 7])
def test_a_convolution_and_its_gradient_are_right(taps, is_identity):
    """In float64, by finite differences: also where every weight but the first tap's is zero, as training starts."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (2, 5, 6), "base": (taps, 6), "dynamic": (2, 5, taps, 3)}
    x, base, dynamic = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes.values())
    if is_identity:
        base, dynamic = torch.zeros_like(base), torch.zeros_like(dynamic)
        base[0] = 1
        assert torch.equal(convolve(x, base, dynamic), x)
    for block in range(2):
        expected = convolved(x[block], dynamic[block], base)
        torch.testing.assert_close(convolve(x[block], base, dynamic[block]), expected)
    given = [tensor.requires_grad_() for tensor in (x, base, dynamic)]
    assert torch.autograd.gradcheck(convolve, given)
    gradients = torch.autograd.grad(convolve(*given).square().sum(), given[1:])
    rows = [min(taps, 5), min(taps, 5)]
    assert all(bool(g.any()) for g, n in zip(gradients, rows, strict=True) for g in g.movedim(-2, 0)[:n])


@pytest.fixture
def batch():
    """Return ``(hidden, blocks, head, selector)``. Some labels are among the best candidates, others are not."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(DRAFT_VOCAB, (2, 20), generator=generator)
    loss_mask = torch.ones(2, 20, dtype=torch.long)
    loss_mask[1, 15:] = 0
    anchors = torch.tensor([[0, 4, 9], [2, 11, 0]])
    blocks = make_blocks(ids, loss_mask, anchors, torch.tensor([[1, 1, 1], [1, 1, 0]]).bool(), BLOCK, MASK, 3.0)
    selector = random_drafter(DFLASH2_VARIANTS["DFlash2"]).candidate_selector
    head = torch.randn(DRAFT_VOCAB, 64, generator=generator) / 8
    hidden = torch.randn(*blocks.labels.shape, 64, generator=generator) + 2 * head[blocks.labels]
    return hidden.requires_grad_(), blocks, head, selector.requires_grad_(True)


def slow(hidden, blocks, head, selector):
    """Return the selector's loss by a loop over slots, and the right tokens and found labels per slot."""
    loss, right, found = 0.0, torch.zeros(BLOCK - 1), 0
    for row, number, slot in torch.cartesian_prod(*map(torch.arange, blocks.labels.shape)).tolist():
        share = float(blocks.weights[row, number, slot])
        if not share:
            continue
        before, label = (int(blocks.labels[row, number, k]) for k in (slot - 1, slot))
        h = hidden[row, number, slot]
        logits = head @ h
        ids = logits.argsort(descending=True)[:TOP_K].tolist()
        is_found = label in ids
        ids = ids if is_found else [*ids[:-1], label]
        pair = selector.predecessor_codebook[before] * (selector.hidden_projection.weight @ h)
        scores = torch.stack([logits[c] + pair @ selector.successor_codebook[c] for c in ids])
        loss = loss - share * scores.log_softmax(0)[ids.index(label)]
        right[slot - 1] += is_found and ids[int(scores.argmax())] == label
        found += is_found
    return loss, right, found


@pytest.mark.parametrize("chunk", [None, DRAFT_VOCAB * 4])
def test_the_selectors_loss_and_its_gradient_equal_a_slow_loop(batch, chunk, monkeypatch):
    hidden, blocks, head, selector = batch
    if chunk:
        monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk)
    given = [hidden, *selector.parameters()]

    def logits(rows):
        return rows @ head.T

    without = block_loss(hidden, blocks, logits)
    out = block_loss(hidden, blocks, logits, selector=selector, selector_weight=0.5, statistics=True)
    loss, right, found = slow(hidden, blocks, head, selector)
    assert float(out.selector_loss) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert float(out.loss.detach()) == pytest.approx(float((without.loss + 0.5 * loss).detach()), rel=1e-5)
    assert float(out.cross_entropy) == pytest.approx(float(without.cross_entropy), rel=1e-6)
    ours = torch.autograd.grad(out.loss, given)
    theirs = torch.autograd.grad(without.loss + 0.5 * loss, given)
    for one, other in zip(ours, theirs, strict=True):
        assert other.any()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert out.correct.tolist() == right.tolist()
    assert 0 < found < int(out.counted.sum()), "some labels should be candidates, and some not"
    assert int(out.found) == found


# ---------------------------------------------------------------------------------------------- the start


@pytest.mark.parametrize("name", ["Qwen3-4B", "gpt-oss-20b"])
def test_a_new_dflash_2_drafter_has_the_states_of_the_one_it_starts_from(name):
    first = random_drafter(VARIANTS[name])
    second = add_dflash2(first, dataclasses.replace(PARTS, conv_group_size=8))
    context, embeds = inputs(first.config)
    with torch.no_grad():
        before, after = (TrainableDrafter(d)(context, embeds, ANCHORS) for d in (first, second))
        assert torch.equal(before, after)
        hidden = before.flatten(0, 2)
        logits = torch.randn(len(hidden), 101)
        ids = logits.topk(TOP_K).indices
        scores = candidate_scores(second.candidate_selector, hidden, logits, ids[:, 0], ids)
    assert torch.equal(scores, logits.gather(1, ids))
    assert all(torch.equal(second.state_dict()[n], tensor) for n, tensor in first.state_dict().items())


@pytest.mark.parametrize(("parts", "message"), [
    ({"conv_kernel_size": 0}, "conv_kernel_size must be an integer >= 1, got 0"),
    ({"conv_kernel_size": 17}, "the drafter: conv_kernel_size must be at most block_size 16, got 17"),
    ({"conv_group_size": 48}, "conv_group_size must divide hidden_size 64, got 48"),
    ({"selector_rank": 0}, "selector_rank must be an integer >= 1, got 0"),
    ({"selector_top_k": 102}, "selector_top_k must be at most vocab_size 101, got 102"),
])  # fmt: skip
def test_parts_that_do_not_fit_are_named(parts, message):
    with pytest.raises(ValueError, match=message):
        add_dflash2(random_drafter(), dataclasses.replace(PARTS, **parts))


# ---------------------------------------------------------------------------------------------- a trained drafter


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return ``(target, prompts, metrics, folder)`` of a short run whose answers depend on the token before."""
    target = make_target("qwen3")
    prompts = torch.randint(2, VOCAB, (8, 6), generator=torch.Generator().manual_seed(0))
    answers = dflash.generate(target, None, prompts, max_new_tokens=30, temperature=1.0, top_k=4, seed=5)
    rows = [{"input_ids": ids, "loss_mask": [0] * 6 + [1] * 30} for ids in answers.tolist() if MASK not in ids]
    shape = draft_config(target, mask_token_id=MASK, num_layers=1, block_size=BLOCK, target_layer_ids=(0, 2))
    config = TrainConfig(
        steps=40, batch_tokens=400, anchors=16, learning_rate=1e-2, mixed_precision="no", eval_rows=0, log_every=1,
        save_every=0,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("trained")
    drafter = new_drafter(dataclasses.replace(shape, dflash2=PARTS))
    AcceleratorState._reset_state(reset_partial_state=True)  # as the fixture another_run, which lives for a test only
    Trainer(target, drafter, datasets.Dataset.from_list(rows), config, folder, quiet=True).train()
    AcceleratorState._reset_state(reset_partial_state=True)
    save_draft(drafter, folder, dtype=torch.float32)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return SimpleNamespace(target=target, prompts=prompts, metrics=metrics, folder=folder, rows=rows, drafter=drafter)


def test_the_selector_learns(trained):
    """It starts at the plain cross-entropy over the candidates, and its pair scores lower that."""
    first, last = trained.metrics[0], trained.metrics[-1]
    assert last["selector_loss"] < 0.7 * first["selector_loss"]
    assert first["loss"] == pytest.approx(first["cross_entropy"] + first["selector_loss"], rel=1e-5)
    assert 0 < first["candidate_recall"] < last["candidate_recall"] <= 1
    selector = trained.drafter.candidate_selector
    for factor in (selector.predecessor_codebook, selector.hidden_projection.weight):
        fresh = new_drafter(trained.drafter.config).state_dict()
        name = next(n for n, p in trained.drafter.named_parameters() if p is factor)
        assert not torch.equal(fresh[name], factor), name


@torch.no_grad()
def test_the_written_drafter_drafts_what_the_training_pass_says(trained):
    """Every block of a greedy generation, against the forward pass with gradients and a walk in Python."""
    draft = dflash.load_draft(trained.folder)
    generator = dflash.Generator(trained.target, draft, max_length=60)
    propose, steps = generator.engine.proposer.propose, []

    def record(state):
        length, block = int(state.length), propose(state)
        steps.append((length, block.ids[0].clone()))
        return block

    generator.engine.proposer.propose = record
    text = generator.generate(trained.prompts[:1], max_new_tokens=40)
    assert len(steps) > 5
    features = TargetFeatures(trained.target, draft.config.target_layer_ids)
    anchors = torch.tensor([[length for length, _ in steps]])
    ids = torch.full((1, len(steps), BLOCK), MASK)
    ids[..., 0] = text.gather(1, anchors)
    embeds = torch.nn.functional.embedding(ids, features.embedding_weight)
    hidden = TrainableDrafter(trained.drafter)(features(text), embeds, anchors)[0]
    previous, selector, differ = ids[0, :, 0], trained.drafter.candidate_selector, False
    for slot in range(1, BLOCK):
        logits = trained.drafter.logits(hidden[:, slot], features.head)
        candidates = logits.topk(TOP_K).indices
        scores = candidate_scores(selector, hidden[:, slot], logits, previous, candidates)
        previous = candidates.gather(1, scores.argmax(1, keepdim=True))[:, 0]
        assert previous.tolist() == [int(block[slot]) for _, block in steps]
        differ |= bool((previous != logits.argmax(1)).any())
    assert differ, "the selector should change some tokens"
