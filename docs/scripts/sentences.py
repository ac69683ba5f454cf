"""Numbers within sentences, made from the ledger.

`sentences/PAGE.txt` has the sentences of a page that state results, with functions of `quantities` for the numbers:

    SAM is {above label_noise/40%/sam sgd} points above SGD (95 % interval {interval .2})

A sentence is found in the page whatever its numbers are now, and gets those of the ledger. A function without arguments
has those of the one before; a last argument such as `.2` is the number of decimals. Blank lines separate sentences, and
lines may break anywhere in both files.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from quantities import FUNCTIONS, Query, Tables

from bisam.lab.tables.cells import Collection

FOLDER = Path(__file__).with_name("sentences")
NUMBER = r"[+−]?\d+(?:\.\d+)?"
VALUE = rf"({NUMBER}(?:\s+to\s+{NUMBER})?|[A-Za-z]+)"


def of_page(page: Path) -> list[str]:
    """The sentences of a page that state results."""
    file = FOLDER / f"{page.stem}.txt"
    return re.split(r"\n\s*\n", file.read_text().strip()) if file.is_file() else []


def fill(text: str, sentences: Iterable[str], found: Collection) -> str:
    """The page with the numbers of these sentences made anew."""
    tables = Tables(found)
    for sentence in sentences:
        text = _filled(text, sentence, tables)
    return text


def _filled(text: str, sentence: str, tables: Tables) -> str:
    words, values = _parsed(sentence, tables)
    places = list(re.finditer(VALUE.join(map(_pattern, words)), text))
    if len(places) != 1:
        raise ValueError(f"the page has this sentence {len(places)} times, and should have it once: {sentence}")
    for number, value in reversed(list(enumerate(values, 1))):
        start, end = places[0].span(number)
        if text[start:end].split() != value.split():  # a line may break within an interval
            text = text[:start] + (value.capitalize() if text[start].isupper() else value) + text[end:]
    return text


def _pattern(words: str) -> str:
    """
    >>> _pattern("SAM  (best)")
    'SAM\\\\s+\\\\(best\\\\)'
    """
    return r"\s+".join(re.escape(part) for part in re.split(r"\s+", words))


def _parsed(sentence: str, tables: Tables) -> tuple[list[str], list[str]]:
    """The words between the values, and the values."""
    first, *rest = re.split(r"\{([^{}]*)\}", sentence)
    words, values, arguments = [first], list[str](), list[str]()
    for call, after in zip(rest[::2], rest[1::2], strict=True):
        name, *given = call.split()
        digits = int(given.pop()[1:]) if given and re.fullmatch(r"\.\d", given[-1]) else 1
        arguments = given or arguments
        value = _value(name, Query(tables, arguments, digits), sentence)
        if value:
            values.append(value)
            words.append(after)
        else:
            words[-1] = words[-1].rstrip() + after
    return words, values


def _value(name: str, query: Query, sentence: str) -> str:
    if name not in FUNCTIONS:
        raise ValueError(f"unknown function {name!r} of quantities.py: choose from {', '.join(FUNCTIONS)}")
    try:
        return FUNCTIONS[name](query)
    except (ValueError, KeyError, StopIteration) as error:
        raise ValueError(f"{name} {' '.join(query.arguments)} in {sentence!r}: {error}") from error
