"""Plant faults in the package one by one, and run the tests that should fail: `python tests/planted_faults.py`.

Works on a copy of the package. Prints for each fault whether a test caught it, and exits with 1 if one was missed.
"""

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 400  # a fault that hangs is caught
MARKS = "not emulated and not cuda"


class Fault(NamedTuple):
    """Replace the only place of ``old`` in a file by ``new``; one of ``tests`` should fail.

    The file is relative to the package ``dflash``.
    """

    name: str
    file: str
    old: str
    new: str
    tests: list[str]


GENERATE, STREAM, TREES, DENOISE = "test_generate.py", "test_streaming.py", "test_trees.py", "test_denoise.py"
STOPS = "test_losslessness.py::test_stop_tokens_end_a_row_in_the_middle_of_a_block"
SAMPLED = "test_losslessness.py::test_sampled_output_equals_the_independent_baseline"
BLOCKS = "test_rules.py::test_a_block_equals_the_processors_called_token_by_token"
STATES = f"{TREES}::test_after_every_step_the_state_is_that_of_a_prompt"
HEADS = "test_mtp.py::test_drafts_are_those_of_transformers_head_after_any_rollbacks"
TURNS = f"{STREAM}::TestConversation::test_only_new_tokens_are_run"
LEFT = f"{STREAM}::TestStopStrings::test_a_conversation_continues_after_a_stop_string"
RECURRENT = "test_recurrent.py::test_every_kind_of_call_equals_one_token_decoding"
LAYERS = "test_target.py::test_logits_and_taps_equal_the_model_in_two_chunks"
TREE_ROWS, DRAFTER, PARTS, SAMPLING = (f"test_{n}.py" for n in ("tree_target", "drafter", "own_parts", "sampling"))
SERVE, TEXT, CALLS = "serve/test_serve.py", "serve/test_serve_text.py", "serve/test_serve_structured.py"
RUN, STEP, PREFILL = "engine/run.py", "engine/step.py", "engine/prefill.py"
STATE, CACHE = "state.py", "cache.py"
RULES, CHOICE, ATTENTION = "sampling/rules.py", "sampling/sampling.py", "targets/copies.py"
CHAIN, MODEL, GGUF = "proposers/chain.py", "drafter/drafter.py", "loading/gguf_draft.py"
PACKED, FOLDER = "test_packed_targets.py", "loading/quantized.py"
VALUES = "test_values_of_a_folder_are_those_that_were_written"
SERVICE, WRITER = "../dflash_serve/service.py", "../dflash_tools/train/export.py"

FAULTS = [
    Fault("the first token ignores the logit rules", PREFILL, "logits = engine.rules.apply(logits, block, prompt)",
          "engine.rules.apply(logits, block, prompt)", ["test_rules.py::test_greedy_equals_transformers_generate"]),
    Fault("the first token's position is off by one", PREFILL, "select(logits, state.length[:, None])",
          "select(logits, state.length[:, None] + 1)", [SAMPLED]),
    Fault("a row may write one token past its limit", PREFILL, "self._lengths + call.max_new_tokens",
          "self._lengths + call.max_new_tokens + 1", [GENERATE]),
    Fault("a reused prefix keeps one token too many", PREFILL, "cached = [min(have, n - 1) for",
          "cached = [min(have + 1, n - 1) for", [TURNS]),
    Fault("waiting features are dropped when a prefix is reused", PREFILL,
          "engine.chain.follow_(state.context[rows], state, rows)", "pass", [TURNS, LEFT]),
    Fault("a block of a prompt is found by its own tokens alone", "engine/prefix.py", "sha256(keys[-1] + flat",
          "sha256(flat", ["test_session.py::test_a_block_is_found_by_all_tokens_up_to_its_end"]),
    Fault("the drafter forgets what steps without drafts write", "proposers/chain.py",
          "self.follow_(state.waiting_features(), state, slice(0, len(state.length)))", "pass",
          ["test_auto_width.py::test_the_drafter_takes_up_what_was_written_without_drafts"]),
    Fault("a head pairs states with the tokens at their positions", "proposers/mtp.py",
          "_places(start + 1, count, tokens)", "_places(start, count, tokens)", [HEADS]),
    Fault("a prompt leaves no state for a head's first pair", "proposers/mtp.py",
          "torch.where(ends, 1, state.num_context[rows])", "state.num_context[rows]", [HEADS]),
    Fault("features that wait overwrite each other", "state.py", "self.context[self._rows, waiting]",
          "self.context[self._rows, 0]",
          ["test_auto_width.py::test_the_drafter_takes_up_what_was_written_without_drafts"]),
    Fault("a commit forgets the tree's path", STEP, "commit_(state.length, state.num_context, path)",
          "commit_(state.length, state.num_context, None)", [STATES]),
    Fault("a tree ignores the selector", "proposers/tree.py", "links, order = predictions.link(ids, scores)",
          "links, order = scores, None",
          ["test_dflash2_drafting.py::test_a_tree_holds_the_best_prefixes_by_the_selectors_probabilities"]),
    Fault("a tree's features stay where they were", STEP,
          "ops.gather_rows_(state.features(block), path, state.context)", "pass", [STATES]),
    Fault("only a call's first row has its stop tokens", STEP, "set_stop_token_ids(row, call.stop_token_ids)",
          "set_stop_token_ids(rows.start, call.stop_token_ids)", [STOPS]),
    Fault("log probabilities are written one position late", STEP, "state.positions(choices.shape[1]))\n        if",
          "state.positions(choices.shape[1]) + 1)\n        if", ["test_logprobs.py"]),
    Fault("features are kept one position late", STEP, "write_(slice(None), state.length - state.num_context,",
          "write_(slice(None), state.length - state.num_context + 1,",
          ["tools/test_learn.py::test_kept_is_what_the_target_computed"]),
    Fault("chunks of prompts come without their features", "engine/prefix.py",
          "state.draft_cache, state.history", "state.draft_cache",
          ["tools/test_learn.py::test_a_replay_has_the_steps_that_serving_had"]),
    Fault("rules of all layouts are those of the first", STEP, "if layout not in self._rules:",
          "layout = next(iter(self._rules), layout)\n        if layout not in self._rules:",
          ["test_rules.py::test_a_generator_forgets_the_rules_of_its_last_call"]),
    Fault("the host walks past a stop token", STEP, "elif token not in stop[row] and emitted < ends[row]",
          "elif emitted < ends[row]",
          ["test_rules.py::test_processors_see_what_one_token_decoding_shows_them"]),
    Fault("rows stay done after costs were measured", STEP,
          "            tensor.copy_(value)\n        return self.costs",
          "            pass\n        return self.costs",
          [f"{TREES}::test_auto_measures_its_costs_once_and_leaves_the_state_as_it_was"]),
    Fault("a stop string's cut leaves the device's length", RUN, "        state.length[row].fill_(self.length)", "",
          [LEFT]),
    Fault("an accepted draft is not counted", RUN, "                self.accepted += 1\n", "                pass\n",
          [f"{STREAM}::TestEvents"]),
    Fault("a step's seconds are not kept", RUN, "answer.step_seconds.append(seconds)", "pass",
          [f"{SERVE}::test_metrics_count_requests_and_tokens"]),
    # Drafts
    Fault("denoising keeps the least confident", CHAIN, "confidence.topk(count, -1)",
          "confidence.topk(count, -1, largest=False)", [DENOISE]),
    Fault("denoising forgets what is known", CHAIN, "confidence = torch.where(known, torch.inf, confidence)", "pass",
          [DENOISE]),
    Fault("known tokens are drawn again", CHAIN, "self.logits.masked_fill(others, -torch.inf)", "self.logits",
          ["test_dflash2_drafting.py", DENOISE]),
    Fault("bans do not reach the drafts", CHAIN,
          "logits if self.rules is None else self.rules.apply_to_drafts(logits, state)", "logits",
          ["test_rules.py::test_banned_tokens_are_not_drafted"]),
    Fault("the drafter's windows are dropped", MODEL, "window=self.config.window[index],", "window=0,",
          [DRAFTER, "test_dflash2.py", "test_reference_package.py"]),
    Fault("the drafter's rotary angles are not scaled", MODEL, "self.inv_freq, self.config.rope.attention_scaling)",
          "self.inv_freq, 1.0)", ["test_reference_package.py"]),
    Fault("the drafter's embeddings are not scaled", MODEL, "mask_embedding, config.input_embedding_scale)",
          "mask_embedding, 1.0)", [PARTS]),
    Fault("the softcap of drafts is dropped", MODEL, "return torch.tanh(logits / cap) * cap if cap else logits",
          "return logits", [f"{PARTS}::test_a_reduced_head_is_scattered_after_multiplier_and_softcap"]),
    Fault("zero points of GPTQ are read as they are stored", FOLDER,
          "zeros = zeros + (0x11111111 if bits == 4 else 0x01010101)", "pass", [f"{PACKED}::{VALUES}"]),
    Fault("tensors of a folder that nobody reads are left out", FOLDER, "check_all_used(model, unused, folder)", "pass",
          [f"{PACKED}::test_a_folder_whose_tensors_do_not_fit_is_refused_by_name"]),
    Fault("gates of gpt-oss alternate with what they gate", FOLDER, "Floats(*map(gate_above_up, weight))", "weight",
          [f"{PACKED}::test_a_folder_stays_packed_and_computes_what_its_values_do"]),
    Fault("a layer that is stored by activations takes its input in order", "decoder.py",
          "x if isinstance(weight, Tensor) or weight.order is None else x.gather(-1, weight.order.expand_as(x))", "x",
          [f"{PACKED}::test_a_folder_stays_packed_and_computes_what_its_values_do"]),
    Fault("taps of llama.cpp's files are not shifted", GGUF, '("target_layers", 1) if',
          '("target_layers", 0) if',
          ["test_gguf_drafters.py::test_a_converted_file_is_the_same_drafter_as_its_safetensors"]),
    Fault("llama.cpp's d2t is read as differences", GGUF, 'if "d2t" in out and not is_fork:', "if False:",
          ["test_gguf_drafters.py::test_parts_of_its_own_are_read"]),
    Fault("a file's tokens are fewer than a drafter's rows", WRITER, "map(pads[key], range(len(value), rows))",
          "()", ["test_gguf_drafters.py::test_an_exported_file_is_the_same_drafter"]),
    # Sampling
    Fault("top_p of one row is every row's", CHOICE, "self.top_p[rows] = arguments.top_p",
          "self.top_p[:] = arguments.top_p", [SAMPLING]),
    Fault("a tiny temperature is not greedy", CHOICE, "0.0 if is_greedy else arguments.temperature",
          "arguments.temperature", [SAMPLING]),
    *(Fault(f"{one} and {other} of rejection share their noise", "sampling/acceptance.py",
            "DRAFT, COIN, RESIDUAL = 1, 2, 3", f"DRAFT, COIN, RESIDUAL = {streams}", ["test_rejection.py"])
      for one, other, streams in (
          ("drafts", "coins", "1, 1, 3"), ("drafts", "residuals", "1, 2, 1"), ("coins", "residuals", "1, 2, 2"))),
    Fault("rows share a drawn seed", CHOICE, "list(map(functools.partial(fold, seed), range(rows)))", "[seed] * rows",
          [SAMPLING]),
    Fault("a negative min_p passes", "settings.py", "lambda x: 0 <= x <= 1)", "lambda x: x <= 1)", [SAMPLING]),
    Fault("penalties divide negative logits", RULES, "torch.where(old < 0, old * penalty, old / penalty)",
          "old / penalty", [BLOCKS]),
    Fault("penalties count the prompt", RULES, "_counts(rows, rows.prompt, logits.shape[-1])",
          "_counts(rows, torch.zeros_like(rows.prompt), logits.shape[-1])", [BLOCKS]),
    Fault("n-grams are one token longer", RULES, "others, sequence = self.size - 1,", "others, sequence = self.size,",
          [BLOCKS]),
    Fault("min_new_tokens lasts one token less", RULES, "rows.positions - rows.prompt < least_new",
          "rows.positions - rows.prompt + 1 < least_new", [BLOCKS]),
    Fault("forced_eos comes a token early", RULES, "rows.positions == rows.limits - 1",
          "rows.positions == rows.limits - 2", [BLOCKS]),
    Fault("rules see drafts of other branches", RULES, "rows.tree.visible[..., 1:].float() @ drafted",
          "torch.ones_like(rows.tree.visible[..., 1:].float()) @ drafted",
          ["test_rules.py::test_a_tree_equals_the_processors_called_along_each_path"]),
    # Targets
    Fault("a window is one wider", ATTENTION, "window_of(module, kwargs) or 0\n",
          "(window_of(module, kwargs) or -1) + 1\n", [LAYERS]),
    Fault("a softcap is dropped", ATTENTION, "softcap or 0.0, s_aux", "0.0, s_aux",
          ["test_losslessness.py::test_a_softcap_of_the_scores_is_applied"]),
    Fault("sinks are dropped", ATTENTION, "0.0, s_aux, block_ancestors", "0.0, None, block_ancestors", [LAYERS]),
    Fault("a family's scale is the default's", ATTENTION,
          "query.shape[-1] ** -0.5 if scaling is None else float(scaling), window_of",
          "query.shape[-1] ** -0.5, window_of",
          [LAYERS]),
    Fault("ancestors are not passed on", ATTENTION, "s_aux, block_ancestors)", "s_aux, None)", [TREE_ROWS]),
    Fault("a tree's positions are its row numbers", STATE, "return (self.length + 1)[:, None] + block.tree.depth",
          "return (self.length + 1)[:, None] + torch.arange(block.ids.shape[1], device=self.length.device)",
          [f"{TREES}::test_sampled_text_equals_the_baseline_whatever_the_tree_holds"]),
    Fault("a cache that slides rotates by its slots", CACHE, "self.origin.add_(shift)", "pass",
          ["test_drafter.py::test_a_sliding_cache_gives_the_bits_of_a_whole_one"]),
    Fault("a row that begins another text keeps the origin of the last", CACHE,
          "torch.minimum(self.origin, first, out=self.origin)", "pass",
          ["test_losslessness.py::test_a_drafter_drafts_the_same_from_a_cache_that_slides"]),
    Fault("recurrent states keep rejected rows", CACHE,
          "self.keep = self._keeps_none if keep is None else self._keeps_rows.copy_(keep)",
          "self.keep = self._keeps_rows.fill_(1) if keep is None else self._keeps_rows.copy_(keep)", [RECURRENT]),
    Fault("recurrent states never catch up", CACHE, "out=self.pending).clamp_(0, self.block_size)",
          "out=self.pending).clamp_(0, 0)", [RECURRENT]),
    Fault("a snapshot is used after other tokens passed it", CACHE,
          "self._snapshot_at[rows].masked_fill_(at < self._snapshot_at[rows], 0)", "pass",
          ["test_recurrent_conversations.py"]),
    # Ops
    Fault("packed queries are read as if they were not", "ops/attention.py", "q_stride_row = stride(q, 1)",
          "q_stride_row = stride(q, 2)", ["test_block_attention.py::test_strided_queries"]),
    Fault("the rows of a tree need not be causal", "ops/attention.py", "causal or not has(ancestors): causal",
          "capacity >= 1: causal", ["faults/test_op_contracts.py"]),
    Fault("rows of a block share one position", "ops/vocab.py", "consecutive = ndim(positions) == 1",
          "consecutive = ndim(positions) == 2", ["test_select_tokens.py"]),
    Fault("packed products share the first bias", "ops/linear.py", "[torch.cat(biases)]",
          "[biases[0].repeat(len(weights))]", ["test_linear.py"]),
    Fault("8 bits stand for the mean magnitude", "ops/formats.py", "wide.abs().amax(1, True)",
          "wide.abs().mean(1, True)", ["test_int8.py"]),
    Fault("chosen channels have the scales of others", "ops/formats.py", "else self.scales[channels]",
          "else self.scales[: len(channels)]", ["test_int8.py"]),
    Fault("weights of two formats share a product", "decoder.py",
          "len(packed) < len(weights) or len(set(formats)) > 1", "len(packed) < len(weights)", ["test_int8.py"]),
    Fault("modules multiply by the weights as they are", "targets/model.py",
          'getattr(linear, "packed", None) or linear.weight', "linear.weight", ["test_int8_weights.py"]),
    # Streams
    Fault("text is not held back for stop strings", "streaming.py",
          "        safe -= open_suffix(text[:safe], self._held_back)\n", "", [f"{STREAM}::TestText"]),
    Fault("half a character is written", "streaming.py", "safe = len(text.rstrip(_REPLACEMENT))", "safe = len(text)",
          [f"{STREAM}::TestText"]),
    Fault("the last of several stops counts", "streaming.py", "for count in range(1, len(new)):",
          "for count in range(len(new) - 1, 0, -1):", [f"{STREAM}::TestStopStrings"]),
    # The server and receipts
    Fault("a request for no tokens passes", SERVICE, "if asked == 0 and not request.echo:", "if False:",
          [f"{SERVE}::test_a_text_request_that_cannot_be_served_is_refused"]),
    Fault("ignore_eos is ignored", SERVICE, 'arguments["stop_token_ids"] = []', "pass",
          [f"{SERVE}::test_an_answer_is_that_of_generate"]),
    Fault("prompts pass the context", SERVICE, "if prompt_length + needed > room:", "if False:",
          [SERVE]),
    Fault("several answers share a seed", SERVICE, "seed=fold(seed, number)", "seed=seed", [SERVE]),
    Fault("any model name is served", SERVICE, "or self.takes_any_name:", "or True:", [SERVE]),
    Fault("the mark of reasoning is shown", "../dflash_serve/answer_text.py", "= text.removeprefix(begin), True, True",
          "= text, True, True", [TEXT]),
    Fault("stop strings are shown", "../dflash_serve/answer_text.py", "return text[old : max(old, at)]", "return piece",
          [TEXT]),
    Fault("brackets in strings end a call", "../dflash_serve/tool_calls.py", 'quote = "" if quote == sign',
          '"" if quote == sign', [f"{CALLS}::test_calls_are_split_off_wherever_pieces_end"]),
    Fault("a call's finish reason is stop", SERVICE,
          'reason = "tool_calls" if reason == "stop" and self.calls.is_whole else reason', "pass", [CALLS]),
    Fault("cached tokens are not counted", SERVICE,
          "self.prompt_tokens - self.statistics.num_prefilled_tokens[0]", "0",
          [f"{SERVE}::test_a_prompt_that_was_run_before_is_not_run_again"]),
    Fault("another target's receipt is checked", "receipts/verification.py", "    if theirs != here:\n",
          "    if False:\n", ["test_receipts.py::TestChangesAreFound"]),
    Fault("wrong ends pass", "receipts/verification.py",
          'end = "" if first is not None else _wrong_end(answer, receipt.settings, self._tokenizer)', 'end = ""',
          ["test_receipts.py::TestEnds"]),
]  # fmt: skip


def stale(faults: list[Fault], package: Path) -> list[str]:
    """Return the faults that cannot be planted, because their text is not in the file exactly once."""
    return [fault.name for fault in faults if (package / fault.file).read_text().count(fault.old) != 1]


def is_caught(fault: Fault, package: Path, tests: Path) -> tuple[bool, str]:
    """Run the fault's tests on the changed package, in a fork that need not import torch again."""
    file, log = package / fault.file, package.parent / "log"
    text = file.read_text()
    file.write_text(text.replace(fault.old, fault.new))
    child = os.fork()
    if not child:
        with log.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        signal.alarm(SECONDS)
        os.chdir(tests.parent)
        sys.path.insert(0, str(package.parent))
        status = pytest.main(["-qx", "-p", "no:cacheprovider", "-m", MARKS, *(f"tests/{name}" for name in fault.tests)])
        os._exit(int(status))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    file.write_text(text)
    lines = log.read_text().splitlines()
    if status in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise SystemExit("\n".join([f"{fault.name}: no tests were run", *lines[-5:]]))
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return status != 0, (failed or lines[-1:] or [f"exit status {status}"])[0]


def main() -> None:
    """Run the faults that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="faults whose name or file has these words in it")
    parser.add_argument("--list", action="store_true", help="print the faults and whether they can be planted")
    parser.add_argument("--package", type=Path, default=ROOT / "python" / "dflash", help="built, with its _C")
    parser.add_argument("--tests", type=Path, default=ROOT / "tests")
    options = parser.parse_args()
    faults = [fault for fault in FAULTS if options.only in fault.name or options.only in fault.file]
    unplanted = stale(faults, options.package)
    if options.list:
        print(*(f"{fault.file}: {fault.name}{' (stale)' * (fault.name in unplanted)}" for fault in faults), sep="\n")
        return
    if unplanted:
        raise SystemExit(f"not exactly once in its file: {', '.join(unplanted)}")
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "dflash"
        for name in ("dflash", "dflash_serve", "dflash_tools"):
            source = options.package.with_name(name)
            shutil.copytree(source, package.with_name(name), ignore=shutil.ignore_patterns("__pycache__"))
        # What tests start must find the copy, and no bytecode of another fault.
        os.environ |= {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1"}
        sys.dont_write_bytecode = True
        for number, fault in enumerate(faults, 1):
            begin = time.perf_counter()
            caught, line = is_caught(fault, package, options.tests.resolve())
            missed += [] if caught else [fault.name]
            took = time.perf_counter() - begin
            verdict = "caught" if caught else "MISSED"
            print(f"{number}/{len(faults)} {verdict} {fault.name} ({took:.0f} s): {line}", flush=True)
    print(f"{len(faults) - len(missed)} of {len(faults)} faults caught; missed: {', '.join(missed) or 'none'}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: a fork has no other threads of the parent's
    import hypothesis  # noqa: F401
    import pytest
    import torch  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    with contextlib.suppress(KeyboardInterrupt):
        main()
