"""MkDocs hook: pages made from the Markdown files in the repository's root, and from the help of the commands."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return what ``page`` shows: a root file, the commands' help, or the page as it is."""
    name = page.file.src_uri
    if name in PAGES:
        return root_file(PAGES[name])
    return markdown + command_help() if name == "cli.md" else markdown


def root_file(name: str) -> str:
    """Return a file of the repository's root, with its links turned to pages of the site."""
    text = (ROOT / name).read_text().replace("](docs/", "](")
    for target, source in PAGES.items():
        text = re.sub(rf"\]\({re.escape(source)}(#[\w-]*)?\)", rf"]({target}\1)", text)
    return text


def command_help() -> str:
    """Return typer's own Markdown for all commands, one section per command."""
    code = (
        "import typer.cli\nfrom dflash.cli import application\n"
        "command = typer.main.get_command(application())\n"
        "context = command.make_context('dflash', ['generate'])\n"
        "print(typer.cli.get_docs_for_click(obj=command, ctx=context, name='dflash'))"
    )
    text = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return text.replace("# `dflash`\n", "", 1)
