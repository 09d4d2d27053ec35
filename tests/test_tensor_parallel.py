"""A target that transformers spreads over two processes writes the text of one, or is refused by name on both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import make_draft
from filelock import FileLock
from ranks import FAMILIES, IDS, MASK, NEW, SPREADS_EMBEDDINGS, SPREADS_EXPERTS, TURN, make, rank_0_decides, texts

import dflash
from dflash.targets import transformers_version

TESTS = Path(__file__).parent
pytestmark = pytest.mark.skipif(transformers_version() < (5, 17), reason="transformers spreads as plain tensors")


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(TESTS), *sys.path])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "USE_LIBUV": "0"},
    )  # fmt: skip


@pytest.fixture(scope="session")
def ranks(tmp_path_factory) -> list[dict]:
    """Return what each of two ranks wrote down. One process of `pytest -n` runs them for all."""
    base = tmp_path_factory.getbasetemp()
    out = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ranks"
    with FileLock(f"{out}.lock"):
        if not (out / "done").exists():
            run_ranks(tmp_path_factory.mktemp("models"), out)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(2)]


def run_ranks(models: Path, out: Path) -> None:
    out.mkdir(exist_ok=True)
    for name in ("qwen3", *FAMILIES):
        make(name).save_pretrained(models / name)
    make("qwen3", num_attention_heads=3, num_key_value_heads=1).save_pretrained(models / "3 heads")
    make("qwen3", num_key_value_heads=1).save_pretrained(models / "1 key head")
    other = make("qwen3")
    with torch.no_grad():
        other.model.layers[2].input_layernorm.weight.mul_(1.01)
    other.save_pretrained(models / "other")
    done = torchrun(TESTS / "ranks.py", models, out)
    assert done.returncode == 0, (done.stdout[-3000:], done.stderr[-6000:])
    (out / "done").touch()


@pytest.fixture(scope="module")
def pair():
    target = make("qwen3")
    return target, make_draft(target)


def test_every_text_is_that_of_one_process(ranks, pair):
    expected = json.loads(json.dumps(texts(*pair)))
    assert len(expected) == 14
    assert not [text for text in expected.values() if isinstance(text, str)]
    for rank in ranks:
        assert {name: rank["texts"][name] == text for name, text in expected.items()} == dict.fromkeys(expected, True)


def test_greedy_text_is_the_targets_own(ranks, pair):
    greedy = pair[0].generate(IDS, attention_mask=MASK, max_new_tokens=NEW, do_sample=False, pad_token_id=0).tolist()
    for rank in ranks:
        assert rank["texts"]["greedy"] == rank["door"] == greedy


@pytest.mark.parametrize("family", FAMILIES)
def test_other_families_write_the_text_of_one_process(ranks, family):
    target = make(family)
    draft = make_draft(target)
    expected = dflash.generate(target, draft, IDS, attention_mask=MASK, max_new_tokens=NEW).tolist()
    assert [rank[family] for rank in ranks] == [expected, expected]


def test_rank_0_decides_what_is_drafted_and_chosen(ranks, pair):
    expected = json.loads(json.dumps(rank_0_decides(*pair)))
    for rank in ranks:
        decided = rank["decided"]
        assert decided["no seed"] == ranks[0]["decided"]["no seed"]
        assert decided["no seed"] == expected["no seed"]  # rank 0 had this process's seed
        assert decided["other drafts"] == expected["other drafts"]
        assert max(decided["other drafts"][1][0]) == 7
        assert decided["processors"] == expected["processors"]
        assert decided["other choices"] == expected["other choices"]


def test_16_bit_ranks_write_one_text(ranks):
    assert ranks[0]["bfloat16"] == ranks[1]["bfloat16"]
    assert len(ranks[0]["bfloat16"][0]) == IDS.shape[1] + 60


@pytest.mark.parametrize("what", ["own copy", "unchanged"])  # runs its own modules; the model is as it was
def test_a_spread_model_is_copied_and_left_alone(ranks, what):
    assert [rank[what] for rank in ranks] == [True, True]


@pytest.mark.skipif(not SPREADS_EMBEDDINGS, reason="this transformers leaves the embeddings whole")
@pytest.mark.parametrize("what", ["kept", "changed", "replaced"])
def test_the_embeddings_are_gathered_once_and_again_when_they_change(ranks, what):
    assert [rank["embeddings"][what] for rank in ranks] == [True, True]


REFUSED = {
    "3 heads": "its 3 attention heads do not divide by 2 processes: start as many as divide 3 attention heads and 1 ",
    "1 key head": "its 1 key/value heads do not divide by 2 processes",
    "fused": "ValueError: fused=True needs a target in one process, this one is spread over 2",
    "compile": "ValueError: compile=True needs a target in one process",
    "graph": "ValueError: graph=True needs a target in one process",
    "experts": "expert_parallel: only tensor parallelism can be run",
    "cut head": 'a rank has only its part of the logits: plan the head as "colwise_gather_output"',
    "training": "the whole target is needed in each process, this one is spread over 2",
    "other weights": "rank 1 differs from rank 0 in its weights or config",
    "other prompts": "rank 1 differs from rank 0 in its prompts or arguments",
    "other seeds": "rank 1 differs from rank 0 in its prompts or arguments",
    "other target": "rank 1 differs from rank 0 in its prompts or arguments",
    "other calls": "rank 1 differs from rank 0 in its",
}


@pytest.mark.parametrize("what", [what for what in REFUSED if what != "experts" or SPREADS_EXPERTS])
def test_what_cannot_be_run_is_refused_by_name_on_both_ranks(ranks, what):
    assert all(REFUSED[what] in rank["refusals"][what] for rank in ranks)


def test_a_refused_call_leaves_the_ranks_ready(ranks, pair):
    expected = dflash.generate(*pair, TURN[None], max_new_tokens=NEW).tolist()
    assert [rank["refusals"]["after them"] for rank in ranks] == [expected, expected]


FAILING = """
import os, sys
from pathlib import Path
import torch.distributed as dist
import ranks
from families import make_draft
import dflash

class Broken(ranks.Keeper):
    def put(self, ids):
        super().put(ids)
        if len(self.tokens) > 25:
            raise OSError("the disk of rank 1 is full")

dist.init_process_group("gloo")
whole, model = ranks.make("qwen3"), ranks.spread(Path(sys.argv[1]))
streamer = Broken() if ranks.RANK else None
dflash.generate(model, make_draft(whole), ranks.TURN[None], max_new_tokens=400, streamer=streamer)
print("rank", ranks.RANK, "finished")
"""


def test_a_rank_that_fails_ends_the_other(tmp_path, pair):
    pair[0].save_pretrained(tmp_path / "qwen3")
    (tmp_path / "failing.py").write_text(FAILING)
    done = torchrun(tmp_path / "failing.py", tmp_path / "qwen3")
    assert done.returncode == 1
    assert "OSError: the disk of rank 1 is full" in done.stderr
    assert "finished" not in done.stdout
