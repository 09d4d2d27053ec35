"""Test the command line as a shell user sees it."""

import io
import json
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from families import make_target, save_with_head
from safetensors.torch import load_file, save_file
from tiny_pair import save_pair, word_tokenizer
from tiny_tokenizers import byte_level
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import dflash
from dflash.cli import sources
from dflash_serve.memory import bytes_per_token
from dflash_tools.train import save_draft


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[str, str]:
    """Write a tiny target with a word tokenizer, and a random drafter for it, as checkpoints."""
    root = save_pair(tmp_path_factory.mktemp("pair"))
    make_target("qwen3").save_pretrained(root / "target")  # without stop tokens
    words = word_tokenizer().backend_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w96").save_pretrained(root / "target")
    return str(root / "target"), str(root / "draft")


@pytest.fixture
def nothing_loads(monkeypatch):
    for name in ("load_target", "load_draft"):
        monkeypatch.setattr(sources, name, lambda *_, **__: pytest.fail("a model was loaded"))


QUICK = """
import json, sys
from dflash.cli import main
sys.modules["fastapi"] = sys.modules["datasets"] = None  # extras that are missing
found = []
for sys.argv in json.loads(sys.argv[1]):
    try:
        main()
    except SystemExit as exit:
        slow = {"torch", "transformers", "safetensors", "numpy", *["pydantic"] * (not exit.code)} & sys.modules.keys()
        found.append([exit.code or 0, sorted(slow)])
print(json.dumps(found))
"""


def test_help_and_wrong_options_import_nothing_slow(tmp_path):
    """No timing: importing torch and transformers is what takes seconds."""
    commands = ["generate", "chat", "serve", "verify", "train", "learn", "regenerate", "export", "demo"]
    commands += ["benchmark", "doctor"]
    train = ["train", "--model", "m", "--data", "d", "--output", str(tmp_path / "out")]
    cases = [*([0, name, "--help"] for name in commands), [0, "-h"], [0, "--version"], [0, "--help", "serve"]]
    cases += [[2, "generat"], [2, "chat", "--temprature", "1"], [2, "serve", "--port", "0"], [2, *train]]
    cases += [[2, "chat", "--draft", "d"], [2, "generate", "--temperature", "-1", "text"]]
    cases += [[2, "generate", "--draft", "d", "text"], [2, "generate", "m", "text", "--draft", "/no/such"]]
    cases += [[2, "serve", "/no/such.gguf", "--port", "1"], [2, "benchmark", "m", "--draft", "/no", "--dataset", "d"]]
    arguments = json.dumps([["dflash", *case] for _, *case in cases])
    done = subprocess.run([sys.executable, "-c", QUICK, arguments], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [[code, []] for code, *_ in cases], done.stderr
    assert "pip install '.[serve]'" in done.stderr
    assert "there is no command generat: did you mean generate?" in done.stderr
    assert "dflash: the drafter: there is no file or folder /no/such" in done.stderr
    assert "<bool>" not in re.sub(r".*--(help|install-completion|show-completion).*", "", done.stdout)


@pytest.fixture
def generate(shell, folders):
    """Return a function that runs ``dflash generate`` with the tiny pair; options come before ``models``' own."""
    models = ("--model", folders[0], "--draft", folders[1])
    return lambda *arguments: shell("generate", *models, *arguments)


def test_it_prints_the_text_and_one_line(generate, folders):
    done = generate("--max-new-tokens", "9", "w5 w6 w7")
    assert (done.code, done.out) == (0, answer(folders[0], [5, 6, 7], 9) + "\n"), done.err
    assert done.err.count("\n") == 1
    assert "9 tokens in" in done.err
    assert "acceptance length" in done.err


def answer(model: str, ids: list[int], new: int) -> str:
    target = AutoModelForCausalLM.from_pretrained(model).eval()
    out = dflash.generate(target, None, torch.tensor([ids]), max_new_tokens=new)
    return " ".join(f"w{token}" for token in out[0, len(ids) :].tolist())


def test_the_drafter_gets_the_dtype_of_the_target(shell, folders, tmp_path):
    """``dflash train`` writes drafters in bfloat16, whatever the target's dtype is."""
    model, draft = folders
    save_draft(dflash.load_draft(draft), tmp_path / "draft")
    assert dflash.load_draft(tmp_path / "draft").dtype == torch.bfloat16
    call = ["generate", "--model", model, "--draft", tmp_path / "draft", "--max-new-tokens", 5, "w5 w6 w7"]
    assert shell(*call).out == answer(model, [5, 6, 7], 5) + "\n"
    shell(*call, "--dtype", "bfloat16").assert_done()


def test_a_float16_checkpoint_runs_in_float32_on_the_cpu(shell, tmp_path):
    folder = save_pair(tmp_path, torch.float16)
    call = ["generate", "--model", folder / "target", "--draft", folder / "draft", "--device", "cpu", "w5 w6 w7"]
    done, refused = shell(*call), shell(*call, "--dtype", "float16")
    assert done.out == shell(*call, "--dtype", "float32").out != ""
    assert "stored as float16, which CPU kernels do not take: it runs as --dtype float32\n" in done.err
    assert "load it with dtype=torch.float32 (on the command line --dtype float32)" in refused.err


def test_the_prompt_may_come_from_a_file_or_standard_input(generate, folders, tmp_path, monkeypatch):
    expected, path = answer(folders[0], [5, 6, 7], 5) + "\n", tmp_path / "prompt.txt"
    path.write_text("w5 w6 w7")
    assert generate("--max-new-tokens", "5", "--file", path).out == expected
    for arguments in ((), ("-",)):
        monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w6 w7"))
        assert generate("--max-new-tokens", "5", *arguments).out == expected
    for arguments, message in (
        (["--file", path, "w5"], "as an argument or with --file, not both"),
        (["--file", tmp_path / "missing"], "there is no file"),
    ):
        generate(*arguments).assert_refused(message)


def test_json_is_all_that_is_printed(generate, folders):
    done = generate("--max-new-tokens", "7", "--json", "w5 w6 w7")
    assert (done.code, done.err) == (0, "")
    report = json.loads(done.out)
    assert report["text"] == answer(folders[0], [5, 6, 7], 7)
    assert report["num_new_tokens"] == 7
    assert report["finish_reason"] == "length"
    assert sum(steps * length for length, steps in enumerate(report["histogram"])) == 6


def test_a_stop_string_ends_the_text(shell, generate, folders, tmp_path):
    model, draft = folders
    shutil.copytree(model, tmp_path / "bytes")
    byte_level().save_pretrained(tmp_path / "bytes")
    call = ["generate", "--model", str(tmp_path / "bytes"), "--draft", draft, "--max-new-tokens", "30", "abc"]
    whole = shell(*call).out
    stop = whole[8:10]
    done = shell(*call, "--stop", stop).assert_done()
    assert stop in done.out
    assert whole.startswith(done.out.rstrip("\n"))
    assert len(done.out) < len(whole)
    first, second, *_ = generate("w5").out.split()  # a tokenizer of whole words
    assert generate("--stop", f"{first} {second}", "w5").out.split() == [first, second]


def test_a_model_needs_no_drafter_and_no_option(shell, folders, monkeypatch):
    model, draft = folders
    expected = answer(model, [5, 6, 7], 5) + "\n"
    for call in (
        [model, "w5 w6 w7"], ["w5 w6 w7", "-m", model], [model, "w5 w6 w7", "--prompt-lookup", "2"],
        [model, "w5 w6 w7", "-md", draft], ["w5 w6 w7", "-m", model, "--draft", "auto"],
    ):  # fmt: skip
        assert shell("generate", *call, "-n", "5").out == expected
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w6 w7"))
    assert shell("generate", model, "-n", "5").out == expected
    shell("generate", model, "w5", "w6").assert_refused("give a model and one text, with quotes around the text")
    shell("chat", model, "-m", draft).assert_refused("name one model: MODEL is")
    shell("generate", model, "w5", "--tree", "8").assert_refused("--tree needs a drafter: name one with --draft")
    shell("chat", model, "--drafter-window", "8").assert_refused("--drafter-window needs a drafter: name one")
    shell("benchmark", model, "--dataset", "gsm8k").assert_refused("name a drafter with --draft")


def test_a_head_in_the_targets_files_drafts_unless_something_else_is_asked_for(shell, folders, tmp_path):
    model = save_with_head(tmp_path / "target", "qwen3_5")
    for file in Path(folders[0]).glob("tokenizer*"):
        shutil.copy(file, model)
    expected, sizes = answer(model, [5, 6, 7], 5), []
    for options in ([], ["--draft", "auto"], ["--draft", "mtp"], ["--draft", "none"], ["--prompt-lookup", "2"]):
        done = shell("generate", model, "w5 w6 w7", "-n", "5", "--json", *options).assert_done()
        report = json.loads(done.out)
        assert report["text"] == expected
        assert ("the target brings a head for drafts" in done.err) == (not options)
        sizes.append(report["block_size"])
    assert sizes == [4, 4, 4, 1, 8]
    shell("generate", model, "w5", "--draft", "mtp", "--tree", "8").assert_refused("tree=8 needs a DFlash drafter")
    shell("serve", model, "--draft", "mtp", "--port", "0", "--learn", tmp_path).assert_refused(
        "--learn needs a drafter with blocks of at least 2 rows, beside the target"
    )
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "w5 w6"}))
    done = shell("benchmark", model, "--dataset", rows, "-n", "4", "--raw", "--json").assert_done()
    header = json.loads(done.out)["header"]
    assert 0 < header["draft_parameters"] < header["target_parameters"]
    shell("doctor", "--model", model, "--draft", "none").assert_refused("a pair is examined, and --draft none has no")
    for take in (dflash.load_draft, dflash.as_assistant):
        with pytest.raises(ValueError, match=r"draft='mtp', the head .*: this needs a DFlash drafter"):
            take("mtp")


def test_a_damaged_head_ends_only_a_command_that_asked_for_it(shell, folders, tmp_path, monkeypatch, caplog):
    model = save_with_head(tmp_path / "target", "qwen3_5")
    for file in Path(folders[0]).glob("tokenizer*"):
        shutil.copy(file, model)
    tensors = load_file(model / "model.safetensors")
    save_file({name: x for name, x in tensors.items() if name != "mtp.norm.weight"}, model / "model.safetensors")
    done = shell("generate", model, "w5 w6 w7", "-n", "5", "--json").assert_done()
    assert json.loads(done.out)["text"] == answer(model, [5, 6, 7], 5)
    left_out = "the target's own head is left out, and nothing drafts: "
    assert f"dflash: warning: {left_out}" in done.err
    monkeypatch.setattr("dflash_serve.app.Server.run", lambda *_, **__: None)
    shell("serve", model, "--port", "0").assert_done()
    assert left_out in caplog.text
    assert "drafts for this model" not in caplog.text
    message = "(--draft none answers without the target's own head)"
    shell("generate", model, "w5", "--draft", "mtp").assert_refused(message)
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"conversations": [{"from": "human", "value": "w5 w6"}]}))
    done = shell("benchmark", model, "--dataset", rows, "-n", "4", "--raw")
    assert (done.code, message in done.err) == (2, True)


@pytest.mark.parametrize(("name", "published"), [
    ("Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"),
    ("bartowski/Qwen3.6-35B-A3B-GGUF:Qwen3.6-35B-A3B-Q4_K_M.gguf", "z-lab/Qwen3.6-35B-A3B-DFlash"),
    ("meta-llama/Meta-Llama-3.1-8B-Instruct", "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat"),
    ("owner/model-of-nobody", None),
])  # fmt: skip
def test_a_published_drafter_is_named_and_not_downloaded(shell, name, published):
    download = f"--draft {published} downloads it" if published else "none is known to be published"
    shell("generate", name, "w5", "--draft", "auto").assert_refused(download)


TEMPLATE = (
    "{% for m in messages %}{{ {'system': 'w90', 'user': 'w91', 'assistant': 'w92'}[m.role] }} {{ m.content }} "
    "{% endfor %}w92"
)


@pytest.fixture
def chat_folders(folders, tmp_path):
    model, draft = folders
    shutil.copytree(model, tmp_path / "chat")
    path = tmp_path / "chat" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "chat_template": TEMPLATE}))
    return str(tmp_path / "chat"), draft


def test_the_chat_template_is_used_unless_raw(shell, chat_folders):
    model, draft = chat_folders
    call = ["generate", "--model", model, "--draft", draft, "--max-new-tokens", "5"]
    assert shell(*call, "w5 w6").out == answer(model, [91, 5, 6, 92], 5) + "\n"
    assert shell(*call, "--system", "w8", "w5 w6").out == answer(model, [90, 8, 91, 5, 6, 92], 5) + "\n"
    assert shell(*call, "--raw", "w5 w6").out == answer(model, [5, 6], 5) + "\n"
    refused = shell(*call, "--raw", "--system", "w8", "w5 w6")
    refused.assert_refused("--system needs a tokenizer with a chat template")


def test_chat_answers_line_by_line(shell, chat_folders, monkeypatch):
    model, draft = chat_folders
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w6\n\nw7\n/reset\nw7\n/exit\nw9\n"))
    done = shell("chat", "--model", model, "--draft", draft, "--max-new-tokens", "4").assert_done()
    first = answer(model, [91, 5, 6, 92], 4)
    ids = [91, 5, 6, 92, *(int(word[1:]) for word in first.split()), 91, 7, 92]
    assert done.out.splitlines() == [first, answer(model, ids, 4), answer(model, [91, 7, 92], 4)]


def test_chat_has_commands_and_messages_of_several_lines(shell, chat_folders, monkeypatch):
    model, draft = chat_folders

    def chat(*lines: str):
        monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
        return shell("chat", model, "--draft", draft, "--max-new-tokens", "4")

    done = chat('"""w5', 'w6"""', "/drop", "w5\\", "w6", "/reset", '"""', "w5 w6", '"""', "/bye", "w7").assert_done()
    assert done.out.splitlines() == [answer(model, [91, 5, 6, 92], 4)] * 3
    assert f"{model}, drafter {draft}; /help lists the commands, /bye leaves" in done.err
    done = chat("/set max_new_tokens 2", "/set system w8", "w5 w6", "/help").assert_done()
    assert done.out.splitlines() == [answer(model, [90, 8, 91, 5, 6, 92], 2)]
    assert "/set NAME VALUE   sets temperature" in done.err
    done = chat("/nothing", "/set temperature -1", "/set")
    assert (done.code, done.out) == (1, "")
    assert "no command" not in chat(" /w5", '"""/w5"""').assert_done().err
    for refused in ("no command /nothing: there are /help, /set, /drop", "temperature must be", "max_new_tokens=4"):
        assert refused in done.err
    assert "top_k must" in chat("/set top_k x").err


def test_trees_and_blocks_of_any_width_write_the_same_text_and_are_named(generate):
    call = ["--max-new-tokens", "9", "w5 w6 w7"]
    chain = generate(*call)
    for options, named in (
        (["--tree", "5"], "of 16 in trees of 5 rows"),
        (["--tree", "auto"], "of 16 in trees of 8 to 128 rows"),
        (["--block-size", "auto"], ""),
        (["--block-size", "4"], "of 4"),
    ):
        done = generate(*call, *options)
        assert (done.code, done.out) == (0, chain.out), done.err
        assert named in done.err
    assert json.loads(generate(*call, "--tree", "5", "--json").out)["tree"] == 5


@pytest.fixture
def stored(monkeypatch):
    """How a command asks for the weights of its target and of its drafter, call by call."""
    found = []
    for name in ("dflash.api:stream", "dflash.generator:Generator", "dflash:Generator"):
        make = pkgutil.resolve_name(name)

        def spy(*models, make=make, **options):
            found.append((options["weights"], options["draft_weights"]))
            return make(*models, **options)

        monkeypatch.setattr(name.replace(":", "."), spy)
    return found


def test_weights_in_8_bits_write_the_text_of_the_quantized_target(
    generate, shell, folders, tmp_path, stored, monkeypatch
):
    call = ["--max-new-tokens", "12", "w5 w6", "--dtype", "float32"]
    plain, file, asked = generate(*call), tmp_path / "receipt.json", []
    done = generate(*call, "--weights", "int8", "--receipt", file).assert_done()
    assert json.loads(file.read_text())["weights"] == "int8"
    assert ", int8 weights, first token" in done.err
    drafted = generate(*call, "--draft-weights", "int8")
    assert (drafted.code, drafted.out) == (0, plain.out)
    assert "int8" not in drafted.err
    assert stored == [(None, None), ("int8", None), (None, "int8")]
    assert json.loads(generate(*call, "--weights", "int8", "--json").out)["weights"] == "int8"
    # Its receipt is verified on the CPU.
    spy = lambda _dtype, device: asked.append(device) or device or "cuda"  # noqa: E731
    monkeypatch.setattr("dflash.cli.sources.check_device", spy)
    done = shell("verify", file, "--model", folders[0])
    assert (done.code, asked) == (0, ["cpu"]), done.err


def test_chat_and_serve_store_weights_as_asked(shell, chat_folders, stored, monkeypatch):
    model, draft = chat_folders
    options = ["--model", model, "--draft", draft, "--weights", "int8", "--draft-weights", "int8"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w6\n"))
    assert ", int8 weights, first token" in shell("chat", *options, "--max-new-tokens", "4").assert_done().err
    monkeypatch.setattr("dflash_serve.app.Server.run", lambda _server, sockets: sockets[0].close())
    shell("serve", *options, "--port", "0").assert_done()
    assert stored == [("int8", "int8")] * 2


def test_a_model_is_served_without_a_drafter_in_the_memory_there_is(shell, chat_folders, monkeypatch, caplog):
    served, free, (model, draft) = [], [2**40], chat_folders
    monkeypatch.setattr("dflash_serve.app.Server.run", lambda server, **_: served.append(server.config.app.state))
    monkeypatch.setattr("dflash_serve.memory.free_memory", lambda _device: free[0])
    shutil.copytree(draft, Path(model).parent / "draft")
    for options in ([model], ["--model", model], [model, "--draft", draft]):
        shell("serve", *options, "--port", "0").assert_done()
        generator = served[-1].service.scheduler.generator
        own = generator.engine.target.config.max_position_embeddings
        assert (generator.max_length, generator.draft is None) == (own, "--draft" not in options)
        assert f"context: {own} tokens, the target's own" in caplog.text
        assert f"cache of prompts: {free[0] / 4e9:.1f} GB" in caplog.text
    assert shell("serve", model, "--port", "0", "--cache-gb", "0.25").code == 0
    assert "cache of prompts: 0.2 GB" in caplog.text
    free[0] = 2 * 4 * 256 * bytes_per_token(AutoModelForCausalLM.from_pretrained(model), None)
    assert shell("serve", model, "--port", "0").code == 0
    assert served[-1].service.scheduler.generator.max_length == 256
    for line in ("drafts for this model: --draft auto", "drafter: none, one token per step", "holds for 4 rows"):
        assert line in caplog.text
    caplog.clear()
    shell("serve", model, "--draft", "none", "--port", "0").assert_done()
    assert "drafts for this model" not in caplog.text


def test_caches_take_the_memory_that_is_counted(folders):
    target, drafter = AutoModelForCausalLM.from_pretrained(folders[0]), dflash.load_draft(folders[1])
    drafter = dflash.load_draft(drafter, dtype=target.dtype)
    for draft in (None, drafter):
        generator = dflash.Generator(target, draft, max_length=64, batch_size=2)
        generator.generate(torch.tensor([[5, 6]]), max_new_tokens=3)
        caches = [generator.state.target_cache] + [generator.state.draft_cache] * (draft is not None)
        each = sum(buffer.nbytes // cache.capacity // 2 for cache in caches for buffer in cache.buffers)
        assert each <= bytes_per_token(target, draft) <= each + 256
    assert bytes_per_token(target, drafter, window=9) == bytes_per_token(target, None), "it does not grow"


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize(("command", "options", "message"), [
    ("generate", "--weights int8", "--weights int8 needs the models on the CPU, got cuda: pass --device cpu"),
    ("benchmark", "--draft-weights int8 --block-size 1 --device cpu", "--draft-weights int8 needs a drafter, and"),
])  # fmt: skip
def test_weights_that_cannot_be_stored_are_refused_before_models_are_loaded(
    shell, chat_folders, tmp_path, monkeypatch, command, options, message
):
    model, draft = chat_folders
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "w5 w6"}\n')
    monkeypatch.setattr("dflash.cli.sources.check_device", lambda _dtype, device: device or "cuda")
    more = {"generate": ["w5"], "benchmark": ["--dataset", str(tmp_path / "prompts.jsonl")]}[command]
    shell(command, "--model", model, "--draft", draft, *options.split(), *more).assert_refused(message)


@pytest.mark.parametrize(("options", "message"), [
    ("--tool-form xml", "--tool-form must be one of qwen3-coder, hermes, "),
    ("--reasoning-form xml", "minimax-m3, kimi, apertus, think, none, got 'xml'"),
    ("--chat-template /missing", "--chat-template: there is no file '/missing'"),
])  # fmt: skip
def test_forms_and_templates_that_are_not_there_are_refused_before_models_are_loaded(shell, options, message):
    shell("serve", "--port", "0", *options.split()).assert_refused(message)


def test_chat_needs_a_template(shell, folders):
    model, draft = folders
    shell("chat", "--model", model, "--draft", draft).assert_refused("has no chat template: use dflash generate")


@pytest.mark.parametrize(("change", "message"), [
    (["--model", "./nowhere"], "dflash: the model: there is no file or folder ./nowhere"),
    (["--draft", "./nowhere"], "dflash: the drafter: there is no file or folder ./nowhere"),
    (["--temperature", "-1"], "dflash: temperature must be a finite number of at least 0, got -1.0"),
    (["--max-new-tokens", "0"], "dflash: max_new_tokens must be an integer of at least 1, got 0"),
    (["--dtype", "int8"], "dflash: --dtype must be auto, float32, bfloat16 or float16, got 'int8'"),
    (["--device", "nonsense"], "dflash: --device 'nonsense'"),
    (["--bos"], "dflash: --bos: this tokenizer has no BOS token"),
    (["--tree", "1"], 'dflash: tree must be a number of rows in 2 .. 128, "auto" or None, got 1'),
    (["--tree", "+-5"], "dflash: tree must be a number of rows in 2 .. 128, \"auto\" or None, got '+-5'"),
    (["--block-size", "most"], 'dflash: block_size must be an integer of at least 1, "auto" or None, got'),
    (["--block-size", "auto", "--tree", "16"], "dflash: block_size='auto' cannot be combined with tree=16"),
])  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(generate, change, message):
    generate(*change, "w5 w6").assert_refused(message)


@pytest.mark.usefixtures("nothing_loads")
@pytest.mark.parametrize("command", ["generate", "benchmark"])
def test_trees_that_cannot_be_are_refused_before_models_are_loaded(shell, chat_folders, tmp_path, command):
    model, draft = chat_folders
    recurrent, prompts = tmp_path / "recurrent", tmp_path / "prompts.jsonl"
    shutil.copytree(model, recurrent)
    make_target("qwen3_5").config.save_pretrained(recurrent)
    prompts.write_text('{"prompt": "w5 w6"}\n')
    rest = {"generate": ["w5"], "benchmark": ["--dataset", prompts]}[command]
    mistakes = [
        (recurrent, [], "Qwen3_5ForCausalLM has recurrent layers: these take chains only"),
        (model, ["--block-size", "1"], "tree=16 needs a drafter to grow from"),
    ]
    if command == "generate":  # a benchmark has chains too, whose sharpness it is
        mistakes.append((model, ["--draft-sharpness", "2"], "cannot be combined with draft_sharpness=2.0"))
    for target, options, message in mistakes:
        shell(command, "--model", target, "--draft", draft, "--tree", "16", *options, *rest).assert_refused(message)


def test_the_installed_command_and_its_debug_option(folders):
    model, draft = folders
    command = [str(Path(sys.executable).with_name("dflash")), "--debug", "generate", "--model", model, "--draft", draft]
    done = subprocess.run([*command, "--temperature", "-1", "w5"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ValueError: temperature must be" in done.stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_what_is_loaded_and_json_does_not(generate, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for extra, shown in (((), True), (("--json",), False)):
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        assert generate("--max-new-tokens", "2", "w5 w6 w7", *extra).code == 0
        printed = terminal.getvalue()
        for what in ("tokenizer", "drafter", "target"):
            assert (f"loading the {what}" in printed) == shown
        assert "Loading weights" not in printed
