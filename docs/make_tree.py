"""Draw the tree of one real step of the pair inside the package: ``python docs/make_tree.py`` writes tree.svg.

The drafter is made worse as in ``bench/bench_trees.py --noise 0.6``, so that its tree has some width.
"""

import sys
from pathlib import Path
from xml.sax.saxutils import escape

from rich.cells import cell_len

import dflash
from dflash_tools.measure import demo_prompts, encode
from dflash_tools.measure.trees import ACCEPTED, BONUS, DRAFT, EDGE, Piece, TreeWatch, draw

DOCS = Path(__file__).parent
sys.path.append(str(DOCS.parent / "bench"))
import package_pair  # noqa: E402

ROWS, PROMPTS, NOISE = 32, 8, 0.6
CELL, LINE = 8, 18  # pixels
STYLES = {
    ACCEPTED: 'fill="#1a7f37" font-weight="bold"',
    BONUS: 'fill="#bf8700" font-weight="bold" text-decoration="underline"',
    DRAFT: 'fill="#808890"',
    EDGE: 'fill="#808890"',
}


def one_step() -> list[list[Piece]]:
    """Return the picture of a step that left the spine, of the first few prompts."""
    target, draft, tokenizer = dflash.demo_pair(generation=1)
    package_pair.perturb(draft, NOISE)
    generator, watch = dflash.Generator(target, draft, max_length=384, tree=ROWS), TreeWatch()
    for prompt in demo_prompts()[:PROMPTS]:
        ids = encode(tokenizer, prompt.text)
        for _ in watch.watch(generator, generator.stream(ids, max_new_tokens=120, temperature=0.0)):
            pass
    return draw(watch.best, lambda token: tokenizer.decode([token]))


def svg(lines: list[list[Piece]]) -> str:
    """Return the lines as a picture, every text at its column."""
    texts, width = [], 0
    for number, line in enumerate(lines, 1):
        column = 0
        for text, kind in line:
            at = column + len(text) - len(text.lstrip(" "))
            if shown := text.strip(" "):
                length = f'textLength="{CELL * cell_len(shown)}" lengthAdjust="spacingAndGlyphs"'
                texts.append(
                    f'<text x="{CELL * at}" y="{LINE * number}" {length} {STYLES[kind]}>{escape(shown)}</text>'
                )
            column += cell_len(text)
        width = max(width, column)
    size = f'width="{CELL * width}" height="{LINE * len(lines) + 6}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace" font-size="13">'
    return "\n".join([head, *texts, "</svg>"]) + "\n"


if __name__ == "__main__":
    (DOCS / "tree.svg").write_text(svg(one_step()))
