r"""Next-character data: Shakespeare's plays with a client for each speaking role, or a plain text.

The plays are read in the Moby format: a file for each play, a preface with the list of roles, and
from the first ACT, INDUCTION or PROLOGUE on

    NAME<TAB>line of verse or prose             a speech begins
    <TAB>line                                   and continues
    <TAB>[Enter GHOST]                          a stage direction, of many lines or within a line
    ANTIPHOLUS                                  a name too long for its column
    OF EPHESUS<TAB>line                         continues in the next line

Headings, running titles and stage directions are left out. A prologue or epilogue without a name is
spoken by the role PROLOGUE or EPILOGUE. A client is a pair (play, role), its key "hamlet/HORATIO".

A role takes part if it has at least two lines, in the sense of actors: a speech, from one name to
the next. Of a role's n lines the last max(1, floor(n / 5)) are test data, the lines before are
training data, so the split is in time. In a plain text, without roles, the last 10 % of the
characters are test data.

Windows: the text of a role is cut into pieces of T = `sequence_length` characters, not overlapping;
input is x_1..x_T and target x_2..x_{T+1}, so that m characters make ceil((m - 1) / T) windows and
no character is predicted twice. The last window of a text is padded with input 0 and target -100,
which cross entropy and `dure.contracts.task.accuracy` do not count. No window crosses the end of a
text.

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
# A closing bracket alone is a misprint; a bar joins the lines of simultaneous roles.
_DIRECTION = re.compile(r"\[[^\]]*\]?|[\]|]")


@dataclass(frozen=True)
class TextData:
    """Next-character examples.

    train, test: inputs and targets int64 of shape (n, sequence_length), keys: the roles, if any.
    characters: the vocabulary, where `characters[i]` has the index i + 2.
    """

    train: Examples
    test: Examples
    characters: str

    @property
    def vocabulary(self) -> int:
        """Number of indices: the characters, padding and unknown."""
        return len(self.characters) + _FIRST_CHARACTER

    def decode(self, indices: Sequence[int]) -> str:
        """Return the text of `indices`, without padding; an unknown character is U+FFFD."""
        # Index 0 is padding, 1 unknown.
        symbols = ["", "�", *self.characters]
        return "".join(symbols[index] for index in indices)


SHORT = 1024
"""Characters that a window may have even if the texts are shorter: its padding costs little."""


def read_shakespeare(data: Path | str, sequence_length: int = 80) -> TextData:
    """Return the examples at `data`: a folder of plays, or a plain text file or its folder.

    Raises ValueError if sequence_length is not positive or too long for every text, DataError if
    there are no such data at `data`.
    """
    if sequence_length < 1:
        raise ValueError(f"sequence_length has to be at least 1, not {sequence_length}")
    train, test = _texts(Path(data))
    # A window has a fixed size in memory, whatever the length of its text: the rest is padding.
    longest = max(SHORT, *(len(text) - 1 for text in (*train.values(), *test.values())))
    if sequence_length > longest:
        raise ValueError(
            f"sequence_length is {sequence_length}, but no text in {data} is that long: give at "
            f"most {longest}"
        )
    characters = "".join(sorted(set().union(*train.values())))
    return TextData(
        train=_windows(train, characters, sequence_length),
        test=_windows(test, characters, sequence_length),
        characters=characters,
    )


def speeches(play: str) -> dict[str, list[str]]:
    """Return each role's speeches in order, of a play in the Moby format.

    Empty if the text is not a play. The lines of a speech are joined by newlines, without
    indentation.
    """
    roles: dict[str, list[str]] = {}
    for role, lines in _turns(_body(play)):
        speech = "\n".join(lines)
        if speech:
            roles.setdefault(role, []).append(speech)
    return roles


def _body(play: str) -> list[str]:
    """Return the lines after the preface, without running titles; [] if no act begins.

    The running title above an act looks like a line of the last speech. It is above the first act
    too, and so in the preface.
    """
    lines = play.splitlines()
    start = next((i for i, line in enumerate(lines) if _BODY.fullmatch(line.strip())), len(lines))
    # Running titles are recognised by their occurrence in the preface, indented and in capitals.
    titles = {
        line.strip() for line in lines[:start] if line.startswith("\t") and line.strip().isupper()
    }
    return [line for line in lines[start:] if line.strip() not in titles]


def _turns(lines: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield (role, lines of the speech), in the order spoken."""
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
    """Yield (new speaker, text), line by line.

    The speaker is None while a speech continues, and "" if a heading ends it.
    """
    name_begun = ""
    in_direction = False
    for line in lines:
        name, tab, text = (part.strip(" ") for part in line.partition("\t"))
        heading = (name or text).strip()
        # An empty line ends an unclosed bracket or an incomplete name.
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
    """Return the text without stage directions, and whether the last direction is still open."""
    if in_direction:
        _, closed, text = text.partition("]")
        if not closed:
            return "", True
    # An opening bracket without a closing one after it.
    goes_on = text.rfind("[") > text.rfind("]")
    return re.sub(r"\s+", " ", _DIRECTION.sub("", text)).strip(), goes_on


def _texts(data: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Return (training, test) text of every role; of the role "" without roles."""
    if data.is_file():
        return _split_in_time(_read(data))
    if not data.is_dir():
        raise DataError(
            f"there is no {data}: expected a folder of plays or one text file (see "
            f"'dure.data.shakespeare')"
        )
    files = {file: _read(file) for file in sorted(data.glob("*.txt"))}
    # A folder with a play in it is a folder of plays; other files in it are ignored.
    roles = _roles(files)
    if roles:
        return _split_roles(roles)
    if len(files) == 1:
        return _split_in_time(next(iter(files.values())))
    raise DataError(
        f"{data} contains {len(files)} .txt files, none of them a play: expected plays in the "
        "Moby format (NAME<TAB>line, after a line ACT I), or exactly one plain text file"
    )


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        # Never fails: every byte is a character of Latin-1.
        return file.read_text(encoding="latin-1")
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror or error}") from error


def _roles(files: Mapping[Path, str]) -> dict[str, list[str]]:
    """Return key to speeches, of all roles with at least two speeches."""
    found: dict[str, list[str]] = {}
    for file, play in files.items():
        for role, spoken in speeches(play).items():
            if len(spoken) >= 2:
                found[f"{file.stem}/{role}"] = spoken
    return found


def _split_roles(roles: Mapping[str, list[str]]) -> tuple[dict[str, str], dict[str, str]]:
    """Split each role: the last fifth of its speeches, at least 1, is for testing."""
    train = {}
    test = {}
    for key, spoken in roles.items():
        held_out = max(1, len(spoken) // 5)
        # Every speech ends in a newline, so that even a speech "O" has a next character.
        train[key] = "".join(f"{speech}\n" for speech in spoken[:-held_out])
        test[key] = "".join(f"{speech}\n" for speech in spoken[-held_out:])
    return train, test


def _split_in_time(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """Split off the last tenth of a plain text for testing."""
    end = len(text) - len(text) // 10
    if len(text) - end < 2:
        raise DataError(
            f"the text has {len(text)} characters: at least 20 are needed to train and to test"
        )
    return {"": text[:end]}, {"": text[end:]}


def _windows(texts: Mapping[str, str], characters: str, length: int) -> Examples:
    """Return all texts cut into windows, each with the key of its text."""
    pairs = [_cut(_encode(text, characters), length) for text in texts.values()]
    inputs = torch.from_numpy(np.concatenate([inputs for inputs, _ in pairs]))
    targets = torch.from_numpy(np.concatenate([targets for _, targets in pairs]))
    keys: list[str] = []
    for key, (windows, _) in zip(texts, pairs, strict=True):
        keys += [key] * len(windows)
    return Examples(inputs, targets, keys if any(texts) else None)


def _encode(text: str, characters: str) -> np.ndarray:
    """Return the indices of the text's characters, int64."""
    # As arrays of code points: a single search in the sorted vocabulary for all characters.
    codes, known = (
        np.frombuffer(string.encode("utf-32-le"), "<u4") for string in (text, characters)
    )
    # The search returns the end for a character above the whole vocabulary.
    position = np.minimum(np.searchsorted(known, codes), len(known) - 1)
    return np.where(known[position] == codes, position + _FIRST_CHARACTER, UNKNOWN).astype(np.int64)


def _cut(indices: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of shape (windows, length), with the last window padded."""
    predicted = len(indices) - 1
    count = -(-predicted // length)
    inputs = np.full(count * length, PADDING, np.int64)
    targets = np.full(count * length, IGNORED, np.int64)
    inputs[:predicted] = indices[:-1]
    targets[:predicted] = indices[1:]
    return inputs.reshape(count, length), targets.reshape(count, length)
