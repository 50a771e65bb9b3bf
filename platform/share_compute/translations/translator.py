"""Translates a text by finding the template of the text.

The template is the English text with ``{}`` instead of its values; a catalogue maps templates to translations.
`web/src/i18n/translator.ts` follows the same rules; ``tests/platform/translations/cases.json`` tests both.

1. Templates that begin with literal text are tried before those that begin with a value. Among templates that match the
   whole text, the one with the most literal characters is used.
2. Each value ends where the next literal part occurs first, so matching takes linear time. A value beside another one
   ends before the next punctuation mark, or with its parentheses.
3. If a template has fewer than 6 letters, its values may have 12 characters for each of these letters. If it has fewer
   than 10, its values may not have two words in sequence, except beside a punctuation mark.
4. Values are translated in the same way. Lists such as ``a, b and c`` are rendered as lists.
5. A text without a template is divided: at ``"; "``, at parentheses or a full stop that end the text, or else at
   ``": "``, ``". "``, ``", and "`` or ``", "``; the parts are translated. At commas it is divided only if all parts are
   known.
6. A first value with one of these separators is accepted only if it is a list, if a punctuation mark follows it, or if
   rule 5 finds nothing.
7. A text without any translation stays as it is.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

_MOST_CHARACTERS = 4000
_MOST_DEPTH = 5
_MOST_PARTS = 16
_SHORT, _CHARACTERS_PER_LETTER = 6, 12
_ENDS = 3
"""Number of first or last characters by which templates are indexed."""
_STOP = "\N{IDEOGRAPHIC FULL STOP}"
_SEPARATORS = (
    ("; ", "\N{FULLWIDTH SEMICOLON}"),
    (": ", "\N{FULLWIDTH COLON}"),
    (". ", _STOP),
    (", and ", "\N{FULLWIDTH COMMA}并且"),
    (", ", "\N{FULLWIDTH COMMA}"),
)
_PARENTHESES = "\N{FULLWIDTH LEFT PARENTHESIS}%s\N{FULLWIDTH RIGHT PARENTHESIS}"
_COMMA = ", "
_ODD = ("; ", ": ", ", ", " (")
_MARKS = (",", ";", ":", ".")
_MARK = re.compile(r"[,;:.] | \(")
_FEW = 10
_PROSE = re.compile(r"[A-Za-z]{2,} [A-Za-z]{2,}")
_FREE = re.compile(r"(?:[,;:.] (?:and |because )?|  )$")
"""End of a literal part after which a value may be a text of any kind."""
_LIST = re.compile(r"[^\s,]+(?:, [^\s,]+)* and [^\s,]+")
_SLOT = re.compile(r"\{(\d*)\}")


class _Template:
    """Literal parts of a template, and its translation."""

    def __init__(self, template: str, translation: str) -> None:
        self._parts = template.split("{}")
        self.weight = len(template) - 2 * template.count("{}")
        letters = sum(character.isalpha() for part in self._parts for character in part)
        self._most = letters * _CHARACTERS_PER_LETTER if letters < _SHORT else _MOST_CHARACTERS
        self._translation = translation
        before, after = self._parts[:-1], self._parts[1:]
        self._are_names = [
            letters < _FEW and not _FREE.search(start) and not (start == "" and end[:1] in _MARKS)
            for start, end in zip(before, after, strict=True)
        ]

    @property
    def key(self) -> tuple[str, str]:
        """Return the fixed first characters of the template's texts, or the last ones, as (first, last); one is ""."""
        first, last = self._parts[0][:_ENDS], self._parts[-1][-_ENDS:]
        if len(first) == _ENDS:
            return first, ""
        return "", last if len(last) == _ENDS else ""

    def values(self, text: str) -> list[str] | None:
        """Return the values in a text; None if the text does not match this template."""
        first, *between, last = self._parts
        place, end = len(first), len(text) - len(last)
        if end < place or not text.startswith(first) or not text.endswith(last):
            return None
        values = []
        for index, part in enumerate(between):
            following = part or next(filter(None, between[index:]), "")
            found = text.find(following, place, end) if following else end
            if found < 0:
                return None
            if not part and text.startswith(" (", place):
                found = text.find(")", place, found) + 1 or found
            elif not part and (mark := _MARK.search(text, place + 1, found)):
                found = mark.start()
            values.append(text[place:found])
            place = found + len(part)
        values.append(text[place:end])
        if sum(map(len, values)) > self._most:
            return None
        pairs = zip(self._are_names, values, strict=True)
        return None if any(is_name and _is_prose(value) for is_name, value in pairs) else values

    def begins_oddly(self, values: list[str]) -> bool:
        """Return whether the first value probably contains more than one value."""
        if self._parts[0] or self._parts[1][:1] in _MARKS or not any(one in values[0] for one in _ODD):
            return False
        return not _LIST.fullmatch(values[0])

    def filled(self, values: list[str]) -> str:
        """Return the translation with these values; ``{2}`` is the second value, ``{}`` the next one.

        Spaces around a value are kept only beside non-Chinese text.
        """
        following = iter(values)
        text = ""
        for place, part in enumerate(_SLOT.split(self._translation)):
            is_value = place % 2 == 1
            shown = part
            if is_value:
                shown = values[int(part) - 1] if part else next(following)
            if text[-2:-1] and text[-1] == " " and _is_wide(text[-2]) and _is_wide(shown[:1]):
                text = text[:-1]
            elif text and shown[:1] == " " and _is_wide(text[-1]) and _is_wide(shown[1:2]):
                shown = shown[1:]
            text += shown
        return text


def _is_wide(character: str) -> bool:
    """Return whether a character is Chinese, or Chinese punctuation."""
    return "\u3000" <= character <= "\u9fff" or "\uff00" <= character <= "\uffef"


def _is_prose(value: str) -> bool:
    return _PROSE.search(value) is not None and not _LIST.fullmatch(value)


class Translator:
    """Translates texts with a catalogue.

    Args:
        catalogue: English template -> translation, with ``{}`` or ``{1}``, ``{2}``, ... in the places of values.
    """

    def __init__(self, catalogue: Mapping[str, str]) -> None:
        self._whole = {template: text for template, text in catalogue.items() if "{}" not in template}
        templates = [_Template(*entry) for entry in catalogue.items() if "{}" in entry[0]]
        self._by_key: dict[tuple[str, str], list[_Template]] = defaultdict(list)
        for template in sorted(templates, key=lambda template: -template.weight):
            self._by_key[template.key].append(template)

    def translate(self, text: str) -> str:
        """Return a text in the catalogue's language; unchanged if no part of it is known."""
        return self._translated(text, 0) or text

    def _translated(self, text: str, depth: int) -> str | None:
        if not text or len(text) > _MOST_CHARACTERS or depth > _MOST_DEPTH:
            return None
        return (
            self._matched(text, depth)
            or self._divided(text, depth)
            or self._matched(text, depth, strict=False)
        )

    def _matched(self, text: str, depth: int, *, strict: bool = True) -> str | None:
        """Return the translation of a text that has a template; None if no template matches."""
        whole = self._whole.get(text)
        if whole is not None:
            return whole
        found = self._best(text, [(text[:_ENDS], "")], strict) or self._best(
            text, [("", text[-_ENDS:]), ("", "")], strict
        )
        return found and found[0].filled([self._value(value, depth + 1) for value in found[1]])

    def _best(
        self, text: str, keys: list[tuple[str, str]], strict: bool
    ) -> tuple[_Template, list[str]] | None:
        """Return the template with the most literal characters among those with these keys, and its values."""
        best: tuple[_Template, list[str]] | None = None
        for key in keys:
            for template in self._by_key.get(key, ()):
                if best is not None and template.weight <= best[0].weight:
                    break
                values = template.values(text)
                if values is not None and not (strict and template.begins_oddly(values)):
                    best = template, values
                    break
        return best

    def _value(self, text: str, depth: int) -> str:
        if _LIST.fullmatch(text):
            return text.replace(", ", "、").replace(" and ", " 和 ")
        return self._translated(text, depth) or text

    def _divided(self, text: str, depth: int) -> str | None:
        """Return the parts of a text, translated; None if no part is known."""
        first, *others = _SEPARATORS
        for divided in (self._at(text, *first, depth), self._before_its_end(text, depth)):
            if divided is not None:
                return divided
        found = (self._at(text, *other, depth) for other in others)
        return next((divided for divided in found if divided is not None), None)

    def _before_its_end(self, text: str, depth: int) -> str | None:
        """Return the translation of a text that ends with parentheses or a full stop."""
        if text[-1] == ".":
            sentence = self._translated(text[:-1], depth + 1)
            return sentence and sentence + _STOP
        before, parenthesis, inner = text.partition("(")
        if text[-1] != ")" or not parenthesis or before.rstrip(" ") == before != "":
            return None
        before = before.rstrip(" ")
        known = self._translated(before, depth + 1), self._translated(inner[:-1], depth + 1)
        return (known[0] or before) + _PARENTHESES % (known[1] or inner[:-1]) if any(known) else None

    def _at(self, text: str, separator: str, mark: str, depth: int) -> str | None:
        """Return the parts of a text between separators, translated; None if not enough of them are known."""
        head, *others = text.split(separator, _MOST_PARTS)
        if not others:
            return None
        start = self._translated(head, depth + 1)
        # A template may begin with the separator, for example "; these do not reach each other: {}".
        rest = [self._matched(separator + part, depth + 1) for part in others]
        ends = [
            None if whole else self._translated(part, depth + 1)
            for whole, part in zip(rest, others, strict=True)
        ]
        known = [start, *(whole or end for whole, end in zip(rest, ends, strict=True))]
        if not (all(known) if separator == _COMMA else any(known)):
            return None
        tails = (whole or mark + (end or part) for whole, end, part in zip(rest, ends, others, strict=True))
        return (start or head) + "".join(tails)


@cache
def chinese() -> Translator:
    """Return the translator to simplified Chinese."""
    text = (files("share_compute.translations") / "zh.json").read_text(encoding="utf-8")
    return Translator(json.loads(text))
