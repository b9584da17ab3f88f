"""Errors about values that a user passed: what was expected, what was given, and how to fix it."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class InputError(Exception):
    """Something that a user passed is wrong; the message says what to change.
    Everything else is a bug.
    """


class InputValueError(InputError, ValueError):
    """A value that is out of range, missing or inconsistent."""


class InputTypeError(InputError, TypeError):
    """A value of the wrong type."""


class InputOSError(InputError, OSError):
    """A file or folder that cannot be written: a full disk, a missing permission,
    a name that is too long.
    """


def without_secrets(text: str) -> str:
    """Leave out the passwords and the queries of addresses, which may hold tokens.

    >>> without_secrets("s3://me:secret@host/a.csv, https://host/b.csv?token=secret")
    's3://***@host/a.csv, https://host/b.csv?***'
    """
    # Each pattern begins or ends where the one before may not go on,
    # so that a long text takes linear time.
    text = re.sub(r"(://)[^/\s]+@", r"\1***@", text)
    # Drivers name an address without its protocol.
    text = re.sub(r"(?<![^/\s@'\"])[^/\s:@'\"]+:[^/\s'\"]+@", "***@", text)
    return re.sub(r"(://(?:(?!://)[^\s?])*\?)[^\s,;)'\"]+", r"\1***", text)


def expected(argument: str, requirement: str, got: object, way_out: str) -> str:
    """Word an error message.

    >>> expected("gamma", "be at least 0", -1.0, "use inverse_focal for a negative gamma")
    'expected gamma to be at least 0, got -1.0; use inverse_focal for a negative gamma'
    """
    return message_of(f"{argument} to {requirement}", got, way_out)


def check(holds: bool, requirement: str, got: object, way_out: str) -> None:
    """Raise unless a requirement on a user's value is fulfilled.

    >>> check(-1.0 >= 0, "gamma to be at least 0", -1.0, "use inverse_focal for a negative gamma")
    Traceback (most recent call last):
    hf_calib._errors.InputValueError: expected gamma to be at least 0, got -1.0; use inverse_focal for a negative gamma
    """
    if not holds:
        raise InputValueError(message_of(requirement, got, way_out))


def message_of(requirement: str, got: object, way_out: str) -> str:
    """Word an error message whose requirement names its argument."""
    # Each part may quote the data: a message stays one line of a readable length in any terminal.
    parts = [cut(printable(part)) for part in (requirement, got, way_out)]
    return "expected {}, got {}; {}".format(*parts)


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Name the nearest known spelling, or list all of them.

    >>> did_you_mean("focl", ["focal", "brier"])
    "did you mean 'focal'?"
    >>> did_you_mean("zzz", ["focal", "brier"])
    'known: brier, focal'
    """
    known = sorted(known)
    close = get_close_matches(str(name), known, n=1)
    return (
        f"did you mean {close[0]!r}?"
        if close
        else f"known: {', '.join(known) or 'none'}"
    )


def few(values: Sequence[object]) -> str:
    """The first values as text, each cut to a readable length.

    >>> few(["a", "b", "c", "d", "e", "f"])
    'a, b, c, d, e, ...'
    """
    shown = [cut(printable(value), 200) for value in values[:5]]
    return ", ".join(shown) + (", ..." if len(values) > 5 else "")


def cut(text: str, most: int = 1000) -> str:
    """A text of at most so many characters.

    >>> cut("abcdefgh", 7)
    'abcd...'
    """
    return text if len(text) <= most else f"{text[: most - 3]}..."


def printable(text: object) -> str:
    r"""A text as one line, without secrets and the control characters that a terminal would obey.

    >>> printable("no such\tcolumn\n\x1b[2J\u202egone")
    'no such column [2J gone'
    """
    shown = visible(str(text).replace("\n", " "))
    return without_secrets(" ".join(shown.split()))


def visible(text: str) -> str:
    r"""A text whose lines and spaces stay, with a space for each character that a terminal would
    obey.

    >>> visible("a  b\n\x1b[2Jc\u202e")
    'a  b\n [2Jc '
    """
    shown = (
        letter if letter.isprintable() or letter == "\n" else " " for letter in text
    )
    return "".join(shown)


def look_alikes(names: Iterable[str], others: Iterable[str]) -> str:
    r"""A sentence on the first name that looks like another name and differs from it;
    "" if there is none.

    >>> look_alikes(["law", "cafe\u0301"], ["caf\xe9", "law"])
    "'cafe\\u0301' and 'caf\\xe9' differ only by spaces or by their Unicode form"
    """
    known = {_as_it_looks(other): other for other in others}
    for name in names:
        if (other := known.get(_as_it_looks(name), name)) != name:
            return (
                # In ASCII, characters that look the same are shown by their numbers.
                f"{name!a} and {other!a} differ only by spaces or by their Unicode form"
            )
    return ""


def _as_it_looks(name: str) -> str:
    visible = (
        # Characters of the category Cf, such as a zero-width space, are not visible.
        c
        for c in unicodedata.normalize("NFC", name)
        if unicodedata.category(c) != "Cf"
    )
    return " ".join("".join(visible).split())
