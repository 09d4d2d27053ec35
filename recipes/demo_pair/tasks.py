"""Synthetic tasks for the pair that ships with the package: prompts, right answers, and a check of answers.

There are three families, drawn from a seed without outside data:

- ``records``: a random record rewritten from one notation to another (JSON, YAML, INI, SQL, Python, XML, shell
  options, prose);
- ``sums``: addition, subtraction and multiplication worked column by column;
- ``letters``: a short text from a list of facts, with free choices of words to give sampling something to choose.

The first two have one right answer. A letter is right if it follows its template and states the facts of the prompt.

A prompt's hash decides if it is held out (`held_out`). Training skips such prompts, so it never sees one with any seed,
nor the same sum with its numbers swapped, nor the same letter with its facts in another order.
"""

from __future__ import annotations

import json
import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dflash_tools.measure import ARROW

__all__ = ["KINDS", "Example", "examples", "held_out", "is_right"]


@dataclass(frozen=True)
class Example:
    """A prompt and one right answer to it; ``kind`` is records, sums or letters."""

    kind: str
    prompt: str
    answer: str


def held_out(prompt: str) -> bool:
    """Return True if ``prompt`` is held out of training: one in 16, by the CRC-32 of its words in sorted order."""
    words = sorted(re.findall(r"\w+", prompt))
    return zlib.crc32(" ".join(words).encode()) % 16 == 0


# ------------------------------------------------------------------------------------------------ words and numbers

_WORDS = (  # noqa: SIM905
    "acorn alder amber anchor apple arrow aspen badge barley basil beacon birch bison brass bread brick bridge bronze "
    "brook butter cabin candle canoe canvas carbon cedar chalk cherry clover coal cobalt comet copper coral cotton "
    "crane crystal daisy delta desert dove dragon eagle echo ember falcon feather fern field flint forest fox garnet "
    "ginger glass goose grain granite grape hammer harbor hazel heron honey horse indigo iris iron island ivory jade "
    "jasper juniper kettle lace lantern laurel lemon lily linen lion maple marble marsh meadow melon mint mirror moss "
    "moth nectar needle north oak oasis ocean olive onyx opal orchid otter owl oyster paper pearl pebble pepper pine "
    "planet plum pond poppy prism quartz quill rabbit raven reed ribbon river robin rose ruby saddle sage salmon salt "
    "sand silk silver snow spark spruce stone storm sugar swan table thistle thyme tiger timber topaz tulip turtle "
    "valley velvet violet walnut water wheat willow winter wolf"
).split()
_NAMES = (  # noqa: SIM905
    "Ada Alma Anton Bela Boris Carla Cora Daria David Edith Elena Emil Fiona Frank Greta Hugo Ida Igor Ines Ivan "
    "Jonas Julia Karl Lena Leo Lucia Magda Marco Maria Mina Nadia Nils Nora Olga Oscar Paula Pavel Rita Rosa Sara "
    "Simon Sonja Tamar Theo Tilda Viktor Wanda Zora"
).split()
_TOWNS = (  # noqa: SIM905
    "Alborg Ashford Barlow Belmar Bremsund Calder Corvin Dalmere Dornach Elmstad Everby Falkirk Farnholm Gelden "
    "Glenby Hallin Harwick Ilmen Jorvik Kelmar Kirkby Landau Linden Lorne Marwick Melby Norden Oakham Orlan Ostby "
    "Penrith Queensby Ravenna Redmar Rostad Selby Silvan Sorby Tarnow Thornby Ulster Varna Velden Wexby Wilmar Yarrow "
    "Zelten Zurin"
).split()


def _word(rng: random.Random) -> str:
    return rng.choice(_WORDS)


def _name(rng: random.Random) -> str:
    return rng.choice(_NAMES)


def _town(rng: random.Random) -> str:
    return rng.choice(_TOWNS)


# ------------------------------------------------------------------------------------------------ records

# No word follows a space here. A byte-level BPE splits a word differently after a space than after a quote, and the
# model would have to spell it instead of copying tokens.

FIELDS = [
    *((key, _word) for key in ("name", "city", "owner", "tool", "color", "role", "group", "lang", "type", "state")),
    *((key, lambda rng: rng.randrange(1000, 10000)) for key in ("id", "port", "year")),
    *((key, lambda rng: rng.randrange(10, 1000)) for key in ("size", "score", "level")),
]
Record = dict[str, str | int]


def _quoted(value: str | int) -> str:
    return str(value) if isinstance(value, int) else f"'{value}'"


def _each(
    line: str, between: str, around: str = "{}", quote: Callable[[str | int], str] = str
) -> Callable[[Record], str]:
    """Return a notation that writes ``line`` for each field, with its ``key`` and ``value``."""

    def write(record: Record) -> str:
        return around.format(between.join(line.format(key=key, value=quote(value)) for key, value in record.items()))

    return write


NOTATIONS: dict[str, Callable[[Record], str]] = {
    "json": json.dumps,
    "yaml": _each("{key}: {value}", "\n", "item:\n{}", json.dumps),
    "ini": _each("{key}={value}", "\n", "[item]\n{}"),
    "sql": _each("{key} = {value}", ",\n", "UPDATE items SET\n{};", _quoted),
    "python": _each("{key}={value}", ", ", "Item({})", _quoted),
    "xml": _each("<{key}>{value}</{key}>", "\n", "<item>\n{}\n</item>"),
    "shell": _each("--{key}={value}", " ", "add-item {}"),
    "prose": _each("the {key} {value}", " and ", "The item has {}.", json.dumps),
}


def _records(rng: random.Random) -> Example:
    source, wanted = rng.sample(sorted(NOTATIONS), 2)
    record: Record = {key: make(rng) for key, make in rng.sample(FIELDS, rng.randint(9, 12))}
    return Example("records", f"{source} to {wanted}:\n{NOTATIONS[source](record)}{ARROW}", NOTATIONS[wanted](record))


# ------------------------------------------------------------------------------------------------ sums

_DIGITS = 6  # of the longest number in a prompt
_PLACES = ["ones", "tens", "hundreds", "thousands", "ten thousands", "hundred thousands", "millions"]


def _number(rng: random.Random) -> int:
    """Draw a length, then a number of that length. One in eight is round, as people like to ask for."""
    digits = rng.randint(1, _DIGITS)
    number = rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
    zeros = rng.randrange(digits) if rng.random() < 1 / 8 else 0
    return number - number % 10**zeros


def _column(number: int, place: int) -> int:
    return number // 10**place % 10


def _with_carries(column: Callable[[int, int], tuple[str, int]], places: int) -> list[str]:
    """Write out an addition or a multiplication. ``column(place, carry)`` gives a column's words and its result."""
    lines, carry = [], 0
    for place in range(places):
        words, total = column(place, carry)
        lines.append(f"{_PLACES[place]}: {words} makes {total}, write {total % 10}")
        carry = total // 10
    if carry:
        lines.append(f"{_PLACES[places]}: write {carry}")
    return lines


def _add(rng: random.Random) -> Example:
    a, b = _number(rng), _number(rng)

    def column(place: int, carry: int) -> tuple[str, int]:
        x, y = _column(a, place), _column(b, place)
        return f"{x} + {y}" + (f" + {carry} carried" if carry else ""), x + y + carry

    lines = _with_carries(column, max(len(str(a)), len(str(b))))
    return Example("sums", f"add {a} and {b}{ARROW}", "\n".join([*lines, f"The sum of {a} and {b} is {a + b}."]))


def _subtract(rng: random.Random) -> Example:
    # Only the smaller from the larger: a sign would have to be known before the first column is written. In half of the
    # draws the difference gets a drawn length too: it would rarely be much shorter than the numbers.
    a, b = _number(rng), _number(rng)
    if rng.random() < 0.5 and a + b < 10**_DIGITS:
        a += b
    a, b = max(a, b), min(a, b)
    lines, borrow = [], 0
    for place in range(len(str(a))):
        x, y = _column(a, place), _column(b, place)
        under = y + borrow
        words = f"{_PLACES[place]}: {x} - {y}" + (" - 1 borrowed" if borrow else "")
        borrow = int(x < under)
        lines.append(words + (", borrow ten" if borrow else "") + f", write {x + 10 * borrow - under}")
    lines.append(f"The difference of {a} and {b} is {a - b}.")
    return Example("sums", f"take {b} from {a}{ARROW}", "\n".join(lines))


def _multiply(rng: random.Random) -> Example:
    a, b = _number(rng), rng.randrange(10)

    def column(place: int, carry: int) -> tuple[str, int]:
        product = _column(a, place) * b
        words = f"{_column(a, place)} x {b}" + (f" is {product}, with {carry} carried" if carry else "")
        return words, product + carry

    lines = [*_with_carries(column, len(str(a))), f"The product of {a} and {b} is {a * b}."]
    return Example("sums", f"multiply {a} by {b}{ARROW}", "\n".join(lines))


def _sums(rng: random.Random) -> Example:
    return rng.choice([_add, _subtract, _multiply])(rng)


# ------------------------------------------------------------------------------------------------ letters

# {fact} is copied from the prompt; {a|b|c} is a free choice, the first word twice as likely as each other one.
_LETTERS: dict[str, tuple[dict[str, Callable[[random.Random], str | int]], str]] = {
    "hotel": (
        {
            "guest": _name,
            "room": lambda rng: rng.randrange(100, 700),
            "nights": lambda rng: rng.randrange(2, 10),
            "home": _town,
            "wish": lambda rng: rng.choice(
                ["a late breakfast", "a quiet floor", "a view of the lake", "an early taxi"]
            ),
        },
        "Dear {guest},\nthank you for {choosing|booking|trusting} our {small|old|quiet} house by the river. Room "
        "{room} is {ready|reserved|kept} for you for {nights} nights, and the key will wait at the "
        "{front|main|side} desk from noon on the day you arrive. We {read|saw|noted} that you would like {wish}, "
        "and the staff will {gladly|happily|surely} see to it. The way from {home} is {long|slow|rough} at this "
        "time of year, so please {call|write|ring} if you are late. We {hope|trust|know} that you will enjoy "
        "every one of the {nights} nights here.\n{Yours|Warmly|Sincerely}, the host",
    ),
    "order": (
        {
            "customer": _name,
            "item": lambda rng: rng.choice(["lamps", "chairs", "kettles", "blankets", "clocks", "mirrors"]),
            "count": lambda rng: rng.randrange(2, 60),
            "price": lambda rng: rng.randrange(100, 1000),
            "city": _town,
        },
        "Hello {customer},\nyour order of {count} {item} has {left|passed|cleared} our store and is now on the "
        "road to {city}. The {full|total|final} price is {price} coins, and the bill is {inside|under|beside} "
        "the first box. Each of the {item} was {tested|checked|cleaned} by hand before it was wrapped in "
        "{paper|cloth|straw}. If one of them should be {broken|damaged|missing}, send us a {note|photo|message} "
        "within ten days and we will {replace|repair|refund} it without a question. Most of our "
        "{friends|clients|buyers} in {city} get their goods in {three|four|five} days.\n{Thanks|Regards|Cheers}, "
        "the store",
    ),
    "weather": (
        {
            "city": _town,
            "morning": lambda rng: rng.randrange(1, 20),
            "noon": lambda rng: rng.randrange(20, 40),
            "wind": lambda rng: rng.choice(["north", "south", "east", "west"]),
            "sky": lambda rng: rng.choice(["rain", "snow", "fog", "sun", "hail"]),
        },
        "Good {morning|day|evening} from the {city} station. The day {starts|begins|opens} at {morning} degrees, "
        "with a {light|fresh|gentle} wind from the {wind} and a {thin|pale|low} layer of cloud over the hills. "
        "By noon we expect {noon} degrees, and {sky} will {cover|reach|cross} the valley before the "
        "{shops|schools|offices} close. Drivers on the {wind} road should {take|use|show} extra care near the "
        "bridge, because {sky} makes the stones {slick|smooth|wet}. The night stays {calm|mild|still} in {city}, "
        "and tomorrow looks {much|rather|quite} the same.",
    ),
    "trip": (
        {
            "person": _name,
            "from": _town,
            "to": _town,
            "train": lambda rng: rng.randrange(100, 1000),
            "hour": lambda rng: rng.randrange(6, 22),
        },
        "Today {person} will {travel|go|ride} from {from} to {to} on train {train}. It {leaves|departs|starts} at "
        "{hour} sharp from the {last|first|middle} platform, so a {bus|taxi|tram} to the station should be "
        "{called|ordered|found} an hour before. The seat is by the {window|door|aisle} and a {warm|hot|light} "
        "meal is served when the train has passed the {border|tunnel|lake}. In {to} a {guide|friend|driver} with "
        "a {green|blue|red} hat will meet {person} and {carry|bring|take} the bags to the inn. If train {train} "
        "is {late|full|delayed}, the next one from {from} goes two hours later.",
    ),
}
_SLOT = re.compile(r"\{([^{}]*)\}")


def _letters(rng: random.Random) -> Example:
    kind = rng.choice(sorted(_LETTERS))
    fields, template = _LETTERS[kind]
    facts = {key: make(rng) for key, make in fields.items()}

    def fill(slot: re.Match[str]) -> str:
        options = slot[1].split("|")
        if len(options) == 1:
            return str(facts[slot[1]])
        return rng.choices(options, [2] + [1] * (len(options) - 1))[0]

    answer = _SLOT.sub(fill, template)
    given = rng.sample(sorted(facts), len(facts))
    return Example("letters", f"{kind}: " + "; ".join(f"{key} {facts[key]}" for key in given) + ARROW, answer)


def _letter_pattern(prompt: str) -> re.Pattern[str]:
    kind, _, given = prompt.removesuffix(ARROW).partition(": ")
    facts = dict(part.split(" ", 1) for part in given.split("; "))

    def fill(slot: re.Match[str]) -> str:
        options = slot[1].split("|")
        return re.escape(facts[slot[1]]) if len(options) == 1 else "(?:" + "|".join(options) + ")"

    # Escape the text between slots, but not the slots.
    template, out, end = _LETTERS[kind][1], [], 0
    for slot in _SLOT.finditer(template):
        out += [re.escape(template[end : slot.start()]), fill(slot)]
        end = slot.end()
    return re.compile("".join([*out, re.escape(template[end:])]))


# ------------------------------------------------------------------------------------------------ draws and checks

KINDS: dict[str, Callable[[random.Random], Example]] = {"records": _records, "sums": _sums, "letters": _letters}


def examples(seed: int, *, held: bool, kinds: Sequence[str] = tuple(KINDS)) -> Iterator[Example]:
    """Yield examples without end.

    Args:
        seed: the same seed gives the same examples.
        held: True draws only held-out prompts, False only training prompts. They never overlap.
        kinds: the kinds to draw.

    Yields:
        Examples.
    """
    rng = random.Random(seed)
    while True:
        example = KINDS[rng.choice(list(kinds))](rng)
        if held_out(example.prompt) == held:
            yield example


def is_right(example: Example, answer: str) -> bool:
    """Return True if ``answer`` is the right answer or, for a letter, fits its template with the prompt's facts."""
    if example.kind == "letters":
        return _letter_pattern(example.prompt).fullmatch(answer) is not None
    return answer == example.answer
