"""Names and texts that hold control characters never steer the terminal."""

import json
import os
import pty
import re
import subprocess
import sys
import unicodedata
import warnings

import process
import pytest
from checkpoints import published, save_drafter, speculators
from tiny_pair import save_pair

from dflash import load_draft
from dflash.terminal import listed, named, printable, shortened
from dflash_tools.measure.progress import bars

HOSTILE = "a\x1b]0;title\x07b\rc\x08d\x9b31me\u202ef\u2066g\u2028h\ud800i\x00j\nk"


def test_control_characters_become_escapes():
    shown = printable(HOSTILE)
    assert shown == r"a\x1b]0;title\x07b\rc\x08d\x9b31me\u202ef\u2066g\u2028h\ud800i\x00j\nk"
    assert printable(shown) == shown
    assert all(unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp") for character in shown)


@pytest.mark.parametrize("text", ["plain", "naïve café", "中文", "हिन्दी", "עברית", "👩‍👩‍👧", "a\\nb", ""])
def test_text_without_control_characters_stays_as_it_is(text):
    assert printable(text) == text


@pytest.mark.parametrize("show", [named, shortened, lambda name: listed([name] * 20)])
def test_names_in_messages_are_printable_and_short(show):
    for name in (HOSTILE, HOSTILE * 1000, "x" * 10**6):
        shown = show(name)
        assert printable(shown) == shown
        assert len(shown) < 1100


ESCAPE = "\x1b]0;owned\x07\u202e"


@pytest.mark.parametrize("config", [
    published(architectures=[ESCAPE]),
    published(rope_scaling={ESCAPE: {}}),
    published(quantization_config={ESCAPE: ESCAPE}),
    published(dflash_config={"mask_token_id": 100, ESCAPE: 1}),
    published(**{ESCAPE: 1}),
    speculators(speculators_model_type=ESCAPE),
])  # fmt: skip
def test_errors_and_warnings_about_a_config_are_printable(tmp_path, config):
    folder = save_drafter(tmp_path, config)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            load_draft(folder)
        except ValueError as error:
            caught.append(error)
    messages = [str(getattr(one, "message", one)) for one in caught]
    assert messages
    assert all(printable(message) == message for message in messages)


COMMAND = "from dflash.cli import main; main()"


def run_on_a_terminal(*arguments: object) -> str:
    """Run the command with its output on a terminal, and return what it wrote there."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "HF_HUB_OFFLINE": "1", "TERM": "xterm"}
    command = [sys.executable, "-c", COMMAND, *map(str, arguments)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as command_process:
        os.close(theirs)
        written = b""
        try:
            while part := os.read(ours, 65536):
                written += part
        except OSError:  # the terminal is closed
            pass
        command_process.wait(timeout=240)
    os.close(ours)
    return written.decode(errors="replace")


def steering(written: str) -> list[str]:
    """Escapes other than those of the spinner: colors, the cursor, and deleted lines."""
    return [found for found in re.findall("\x1b.|\x07|\u202e", written) if found != "\x1b["]


def test_an_answer_and_a_folder_that_hold_escapes_do_not_steer_the_terminal(tmp_path):
    folder = save_pair(tmp_path / f"model{ESCAPE}")
    tokenizer = json.loads((folder / "target" / "tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {(f"w{i}{ESCAPE}" if i not in (0, 5, 96) else f"w{i}"): i for i in words.values()}
    (folder / "target" / "tokenizer.json").write_text(json.dumps(tokenizer))
    options = ["--model", folder / "target", "--draft", folder / "draft", "--raw", "--max-new-tokens", 8]
    written = run_on_a_terminal("generate", "w5", *options)
    assert "tokens/s" in written
    assert r"\x1b]0;owned\x07\u202e" in written
    assert steering(written) == []
    # Anything but a terminal gets the text as it is.
    piped = process.python(COMMAND, "generate", "w5", *options)
    assert piped.returncode == 0, piped.stderr
    assert ESCAPE in piped.stdout
    assert r"\x1b]0;" not in piped.stdout


def test_names_and_texts_of_progress_bars_do_not_steer_the_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes standard error for a terminal
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with bars([f"[red]{ESCAPE}"]) as show:
        show(f"[red]{ESCAPE}", 1, 2, f"[link=x]{ESCAPE}")
    written = capsys.readouterr().err
    assert r"[red]\x1b]0;owned" in written
    assert steering(written) == []
