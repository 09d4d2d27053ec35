"""Write prompts about given texts: ``python recipes/smollm2/texts.py PROMPTS.jsonl --wiki FILE.bz2 --news FILE ...``.

The model writes questions and tasks for itself, but no long texts worth reading. The drafter in this folder learned
from tasks about these, none of which is copied into the repository:

- passages of Wikipedia with a question, and to summarize: ``enwiki-latest-pages-articles1...-shortened.bz2`` in
  ``gensim/test/test_data`` of the package gensim (CC BY-SA);
- news to summarize: ``lee_background.cor``, in the same place;
- German sentences to translate: the files of Debian's package fortunes-de;
- paragraphs of HTML pages, several at a time with a question, and to summarize: Debian's packages anarchism,
  debian-handbook, debian-reference-en, developers-reference, debian-faq and gnucash-docs.
"""

import bz2
import itertools
import json
import random
import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path
from typing import Annotated

import typer

QUESTIONS = (
    "What is {}?",
    "What is {} known for?",
    "Describe {}.",
    "When was {} first mentioned?",
    "Who is associated with {}?",
    "Where is {} found?",
    "Why is {} important?",
    "How did {} come about?",
    "Who discovered {}?",
    "What are the main facts about {}?",
    "how many people are mentioned in the text on {}?",
    "what does the term {} refer to",
)
PASSAGE_WORDS = (120, 200, 300, 400)
PARAGRAPH_WORDS = range(46, 420)
PARAGRAPH = re.compile(r"<p(?:\s[^>]*)?>((?:(?!<p[\s>]).)*?)</p>", re.DOTALL | re.IGNORECASE)
TITLE = re.compile(r"<title>(.*?)</title>", re.DOTALL | re.IGNORECASE)
TOGETHER = range(1, 6)  # paragraphs with one question
PAGE = re.compile(r"<title>(.*?)</title>.*?<text(?:[^>]*[^/>])?>(.*?)</text>", re.DOTALL)
# Comments and notes, templates (up to six deep) and tables, pictures, links, emphasis
MARKUP = (
    (r"<!--.*?-->|<ref[^>]*/>|<ref.*?</ref>|<[^>]+>", ""),
    *[(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}", "")] * 6,
    (r"\[\[(?:File|Image)[^\[\]]*(?:\[\[[^\]]*\]\][^\[\]]*)*\]\]", ""),
    (r"\[\[(?:[^|\]]*\|)?([^\]]*)\]\]", r"\1"),
    (r"\[http\S* ?([^\]]*)\]", r"\1"),
    (r"'{2,}", ""),
)
SENTENCE = re.compile(r"[A-ZÄÖÜ][\w ,.!?:;'äöüÄÖÜß-]+")


def passages(dump: Path, chance: random.Random) -> Iterator[tuple[str, str]]:
    """Yield titles and passages of a MediaWiki dump: whole paragraphs, cut after some hundred words."""
    for title, text in PAGE.findall(bz2.decompress(dump.read_bytes()).decode()):
        title, text = unescape(title), unescape(text)
        if text[:9].upper() == "#REDIRECT" or ":" in title:
            continue
        for pattern, plain in MARKUP:
            text = re.sub(pattern, plain, text, flags=re.DOTALL)
        paragraphs = [line.split() for line in map(str.strip, text.split("\n")) if line and line[0] not in "*|=:;#!{"]
        most, words = chance.choice(PASSAGE_WORDS), list[str]()
        for paragraph in paragraphs:
            words += paragraph if len(paragraph) > 45 else []
            if len(words) >= most:
                yield title, " ".join(words[:most])
                most, words = chance.choice(PASSAGE_WORDS), []


def text_of(markup: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", markup)).split())


def paragraphs(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield titles and paragraphs of the HTML pages under a folder, each beginning of a paragraph once."""
    seen = set[str]()
    for path in sorted(folder.rglob("*.html")):
        page = path.read_text(encoding="utf-8", errors="ignore")
        title = text_of(found[1]) if (found := TITLE.search(page)) else path.stem
        for text in map(text_of, PARAGRAPH.findall(page)):
            if len(text.split()) in PARAGRAPH_WORDS and text[:60] not in seen:
                seen.add(text[:60])
                yield title, text


def sentences(folder: Path) -> Iterator[str]:
    """Yield the sentences of 6 to 38 words in files of fortunes."""
    for path in sorted(path for path in folder.iterdir() if path.is_file() and not path.suffix):
        for entry in path.read_text(encoding="utf-8", errors="ignore").split("\n%\n"):
            for sentence in re.split(r"(?<=[.!?]) (?=[A-ZÄÖÜ])", " ".join(entry.split())):
                if 6 <= len(sentence.split()) <= 38 and SENTENCE.fullmatch(sentence):
                    yield sentence


def main(  # noqa: PLR0913 - options, each with its help
    out: Path,
    wiki: Annotated[Path | None, typer.Option(exists=True, help="A MediaWiki dump, bz2.")] = None,
    news: Annotated[Path | None, typer.Option(exists=True, help="An article per line.")] = None,
    german: Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="Folder of fortunes.")] = None,
    pages: Annotated[Path | None, typer.Option(exists=True, file_okay=False, help="Folder of HTML pages.")] = None,
    questions: Annotated[int, typer.Option(help="Prompts about passages of the dump, and about pages.")] = 420,
    summaries: Annotated[int, typer.Option(help="Further passages and paragraphs, to summarize.")] = 240,
    translations: Annotated[int, typer.Option(help="Sentences to translate.")] = 820,
    seed: int = 7,
) -> None:
    """Write prompts about texts, in random order."""
    chance, prompts = random.Random(seed), list[str]()
    if wiki is not None:
        found = list(passages(wiki, chance))
        chance.shuffle(found)
        asked, told = found[:questions], found[questions : questions + summaries]
        prompts += [f"{text}\n{chance.choice(QUESTIONS).format(title)}" for title, text in asked]
        prompts += [f"Summarize: {text}" for _, text in told]
    if pages is not None:
        found = list(paragraphs(pages))
        chance.shuffle(found)
        left = iter(found)
        for _ in range(questions):
            if not (together := list(itertools.islice(left, chance.choice(TOGETHER)))):
                break
            asked = chance.choice(QUESTIONS).format(chance.choice(together)[0])
            prompts.append("\n".join([*(f"{title} {text}" for title, text in together), asked]))
        prompts += [f"Summarize: {text}" for _, text in itertools.islice(left, summaries)]
    if news is not None:
        articles = map(str.strip, news.read_text(encoding="utf-8").splitlines())
        prompts += [f"Summarize: {text}" for text in articles if 40 < len(text.split()) < 600]
    if german is not None:
        spoken = sorted(set(sentences(german)))
        chance.shuffle(spoken)
        prompts += [f"Translate German to English: {sentence}" for sentence in spoken[:translations]]
    chance.shuffle(prompts)
    out.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
