r"""Next-character data: Shakespeare's plays, each speaking role a client, or any one plain text.

The plays are read in the Moby format: one file a play, a preface with the list of roles, and from
the first ACT, INDUCTION or PROLOGUE on

    NAME<TAB>line of verse or prose             a speech begins
    <TAB>line                                   and goes on
    <TAB>[Enter GHOST]                          a stage direction, of many lines or within one
    ANTIPHOLUS                                  a name too long for its column
    OF EPHESUS<TAB>line                         goes on in the next line

Headings, running titles and stage directions are left out. A prologue or epilogue that nobody is
named for is spoken by the role PROLOGUE or EPILOGUE. A client is a pair (play, role), its key
"hamlet/HORATIO".

A role takes part that has at least two lines, where a line is what actors call so: a speech, from
one name to the next. Of a role's n lines the last max(1, floor(n / 5)) are test data, those before
are training data, so the split is in time. In a plain text, without roles, the last 10 % of the
characters are test data.

Windows: the text of a role is cut into pieces of T = `sequence_length` characters, not overlapping;
input is x_1..x_T and target x_2..x_{T+1}, so that m characters make ceil((m - 1) / T) windows and
no character is predicted twice. The last window of a text is filled up with input 0 and target
-100, which cross entropy and `dure.contracts.task.accuracy` do not count. No window reaches over
the end of a text.

Indices: 0 is padding, 1 a character that the training text does not have, 2.. its characters in the
order of their code points.

Sources: H. B. McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, section 3, which has 1,146 roles from another edition (these files have 1,129);
S. Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018, whose script drops the roles
with two lines as well. The plays: the Complete Moby(tm) Shakespeare, public domain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from dure.data.examples import Examples
from dure.errors import DataError

PADDING = 0
UNKNOWN = 1
_FIRST_CHARACTER = 2
IGNORED = -100

_BODY = re.compile(r"(ACT [IVX]+|INDUCTION|PROLOGUE)\.?")
_HEADING = re.compile(r"(ACT|SCENE)\s+[IVX]+\b.*|INDUCTION")
_SPOKEN_BY_NOBODY = ("PROLOGUE", "EPILOGUE")
_NAME_AND_LINE = re.compile(r"([A-Z][\w' ]*):\s+(.*)")
# A closing bracket alone is a misprint; a bar joins the lines of roles that speak at once.
_DIRECTION = re.compile(r"\[[^\]]*\]?|[\]|]")


@dataclass(frozen=True)
class Text:
    """Next-character examples.

    inputs, targets: int64 of shape (n, sequence_length). keys: the roles, if any.

    characters: the vocabulary, where `characters[i]` has the index i + 2.
    """

    train: Examples
    test: Examples
    characters: str

    @property
    def vocabulary(self) -> int:
        """How many indices there are: the characters, padding and unknown."""
        return len(self.characters) + _FIRST_CHARACTER

    def decode(self, indices: Sequence[int]) -> str:
        """The text that `indices` stand for; padding is nothing, an unknown character is U+FFFD."""
        # Index 0 is padding, 1 unknown.
        symbols = ["", "�", *self.characters]
        return "".join(symbols[index] for index in indices)


SHORT = 1024
"""Characters that a window may have however short the texts are: its padding takes little."""


def read_shakespeare(data: Path | str, sequence_length: int = 80) -> Text:
    """The examples at `data`: a folder of plays, one plain text file, or a folder that holds one.

    Raises ValueError if sequence_length is not positive or longer than every text, DataError if
    there is no such data at `data`.
    """
    if sequence_length < 1:
        raise ValueError(f"sequence_length has to be at least 1, not {sequence_length}")
    train, test = _texts(Path(data))
    # A window takes as much memory however short its text is: the rest is padding.
    longest = max(SHORT, *(len(text) - 1 for text in (*train.values(), *test.values())))
    if sequence_length > longest:
        raise ValueError(
            f"sequence_length is {sequence_length}, but no text in {data} has so many characters: "
            f"give at most {longest}"
        )
    characters = "".join(sorted(set().union(*train.values())))
    return Text(
        train=_windows(train, characters, sequence_length),
        test=_windows(test, characters, sequence_length),
        characters=characters,
    )


def speeches(play: str) -> dict[str, list[str]]:
    """Role to its speeches in order, of one play in the Moby format.

    Empty if the text is not a play.

    The lines of a speech are joined by newlines, without indentation.
    """
    roles: dict[str, list[str]] = {}
    for role, lines in _turns(_body(play)):
        speech = "\n".join(lines)
        if speech:
            roles.setdefault(role, []).append(speech)
    return roles


def _body(play: str) -> list[str]:
    """The lines after the preface, without running titles; none if no act begins.

    The running title above an act looks like a line of the last speech. It has stood above the
    first act too.
    """
    lines = play.splitlines()
    start = next((i for i, line in enumerate(lines) if _BODY.fullmatch(line.strip())), len(lines))
    # Running titles are recognised by their being in the preface, indented and in capitals.
    titles = {
        line.strip() for line in lines[:start] if line.startswith("\t") and line.strip().isupper()
    }
    return [line for line in lines[start:] if line.strip() not in titles]


def _turns(lines: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(role, lines of the speech), in the order spoken."""
    role = ""
    spoken = list[str]()
    for begins, text in _entries(lines):
        if begins is not None:
            if role:
                yield role, spoken
            role = begins
            spoken = []
        if text:
            spoken.append(text)
    if role:
        yield role, spoken


def _entries(lines: Sequence[str]) -> Iterator[tuple[str | None, str]]:
    """(who begins to speak, text), line by line.

    Who is None where the speech goes on, and "" where a heading ends it.
    """
    name_begun = ""
    in_direction = False
    for line in lines:
        name, tab, text = (part.strip(" ") for part in line.partition("\t"))
        heading = (name or text).strip()
        # An empty line ends what a missing bracket or name has left open.
        if not heading:
            name_begun = ""
            in_direction = False
        elif heading in _SPOKEN_BY_NOBODY:
            yield heading, ""
        elif _HEADING.fullmatch(heading):
            yield "", ""
        # A few speeches have a colon in place of the tab.
        elif name and not tab and (named := _NAME_AND_LINE.fullmatch(name)):
            yield _role(named[1]), _without_directions(named[2])[0]
        elif name and not tab:
            name_begun = f"{name_begun} {name}"
        else:
            # A stage direction whose bracket was never closed ends with the next name.
            text, in_direction = _without_directions(text, in_direction and not name)
            yield _role(f"{name_begun} {name}") if name else None, text
            name_begun = "" if name else name_begun


def _role(name: str) -> str:
    return re.sub(r"\s+", " ", name).strip(" :")


def _without_directions(text: str, in_direction: bool = False) -> tuple[str, bool]:
    """The text without stage directions, and whether one goes on in the next line."""
    if in_direction:
        _, closed, text = text.partition("]")
        if not closed:
            return "", True
    # The last bracket of the line is an opening one.
    goes_on = text.rfind("[") > text.rfind("]")
    return re.sub(r"\s+", " ", _DIRECTION.sub("", text)).strip(), goes_on


def _texts(data: Path) -> tuple[dict[str, str], dict[str, str]]:
    """(training, test) text of every role; of the role "" where there are no roles."""
    if data.is_file():
        return _split_in_time(_read(data))
    if not data.is_dir():
        raise DataError(
            f"there is no {data}: expected a folder of plays or one text file (see "
            f"'dure.data.shakespeare')"
        )
    files = {file: _read(file) for file in sorted(data.glob("*.txt"))}
    # A folder with a play in it is a folder of plays; other files there are passed over.
    roles = _roles(files)
    if roles:
        return _split_roles(roles)
    if len(files) == 1:
        return _split_in_time(next(iter(files.values())))
    raise DataError(
        f"{data} holds {len(files)} .txt files and no play among them: expected plays in the Moby "
        f"format "
        "(NAME<TAB>line, after a line ACT I), or exactly one plain text file"
    )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        # Never fails: every byte is a character of it.
        return file.read_text(encoding="latin-1")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error


def _roles(files: Mapping[Path, str]) -> dict[str, list[str]]:
    """Key to speeches, of all roles that speak at least twice."""
    found: dict[str, list[str]] = {}
    for file, play in files.items():
        for role, spoken in speeches(play).items():
            if len(spoken) >= 2:
                found[f"{file.stem}/{role}"] = spoken
    return found


def _split_roles(roles: Mapping[str, list[str]]) -> tuple[dict[str, str], dict[str, str]]:
    """Splits each role: the last fifth of its speeches, at least one, is for testing."""
    train = {}
    test = {}
    for key, spoken in roles.items():
        held_out = max(1, len(spoken) // 5)
        # Every speech ends in a newline, so that even "O" and nothing else has a next character.
        train[key] = "".join(f"{speech}\n" for speech in spoken[:-held_out])
        test[key] = "".join(f"{speech}\n" for speech in spoken[-held_out:])
    return train, test


def _split_in_time(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """The last tenth of a plain text for testing."""
    end = len(text) - len(text) // 10
    if len(text) - end < 2:
        raise DataError(
            f"the text has {len(text)} characters: at least 20 are needed to train and to test"
        )
    return {"": text[:end]}, {"": text[end:]}


def _windows(texts: Mapping[str, str], characters: str, length: int) -> Examples:
    """All texts cut into windows, each with the key of its text."""
    pairs = [_cut(_encode(text, characters), length) for text in texts.values()]
    inputs = torch.from_numpy(np.concatenate([inputs for inputs, _ in pairs]))
    targets = torch.from_numpy(np.concatenate([targets for _, targets in pairs]))
    keys: list[str] = []
    for key, (windows, _) in zip(texts, pairs, strict=True):
        keys += [key] * len(windows)
    return Examples(inputs, targets, keys if any(texts) else None)


def _encode(text: str, characters: str) -> np.ndarray:
    """The indices of the text's characters, int64."""
    # As arrays of code points: a search in the sorted vocabulary for all characters at once.
    codes, known = (
        np.frombuffer(string.encode("utf-32-le"), "<u4") for string in (text, characters)
    )
    # A character above all that are known would be found past the end.
    position = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    return np.where(known[position] == codes, position + _FIRST_CHARACTER, UNKNOWN).astype(np.int64)


def _cut(indices: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of shape (windows, length), the last ones filled up."""
    predicted = len(indices) - 1
    count = -(-predicted // length)
    inputs = np.full(count * length, PADDING, np.int64)
    targets = np.full(count * length, IGNORED, np.int64)
    inputs[:predicted] = indices[:-1]
    targets[:predicted] = indices[1:]
    return inputs.reshape(count, length), targets.reshape(count, length)
