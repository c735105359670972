"""Reading plays and plain text for next-character prediction."""

from __future__ import annotations

import pytest
import torch

from dure.data.shakespeare import read_shakespeare, speeches
from dure.errors import DataError

PLAY = """\
\tHAMLET


\tDRAMATIS PERSONAE

CLAUDIUS\tking of Denmark. (KING CLAUDIUS:)

SCENE\tDenmark.

\tHAMLET


ACT I


SCENE I\tElsinore. A platform before the castle.


\t[FRANCISCO at his post. Enter to him
\tBERNARDO]

BERNARDO\tWho's there?

FRANCISCO\tNay, answer me: stand, and unfold yourself.
\t  I am [Aside]  cold.

\t[Exit]

\tAnd sick.

KING
CLAUDIUS\tWell.

BERNARDO:\tHe.

\tHAMLET


ACT II


SCENE I\tA room.

FRANCISCO: For this relief much thanks.

Both\t[Within]  Anon!

BERNARDO\tHe is not here, no?

\tEPILOGUE

\tGood night.
\tGood night.
"""


def test_speeches_leave_out_headings_titles_and_stage_directions():
    assert speeches(PLAY) == {
        "BERNARDO": ["Who's there?", "He.", "He is not here, no?"],
        "FRANCISCO": [
            "Nay, answer me: stand, and unfold yourself.\nI am cold.\nAnd sick.",
            "For this relief much thanks.",
        ],
        "KING CLAUDIUS": ["Well."],
        "Both": ["Anon!"],
        "EPILOGUE": ["Good night.\nGood night."],
    }


def test_a_poem_has_no_speeches():
    assert speeches("\tSONNETS\n\n\nFROM fairest creatures we desire increase,\n") == {}


@pytest.fixture
def plays(tmp_path):
    (tmp_path / "hamlet.txt").write_text(PLAY)
    (tmp_path / "sonnets.txt").write_text("I.\n\nFROM fairest creatures we desire increase,\n")
    return tmp_path


def test_roles_with_two_lines_are_clients_and_their_last_lines_are_the_test_data(plays):
    text = read_shakespeare(plays, sequence_length=100)
    assert text.train.keys == text.test.keys == ["hamlet/BERNARDO", "hamlet/FRANCISCO"]
    assert text.decode(text.train.inputs[0].tolist()) == "Who's there?\nHe."
    assert text.decode(text.test.inputs[0].tolist()) == "He is not here, no?"


def test_targets_are_the_inputs_one_character_later(plays):
    text = read_shakespeare(plays, sequence_length=8)
    inputs, targets = text.train.inputs, text.train.targets
    first = [i for i, key in enumerate(text.train.keys) if key == "hamlet/BERNARDO"]
    assert torch.equal(inputs[first].flatten()[1:16], targets[first].flatten()[:15])
    assert ((targets == -100) == (inputs == 0)).all()
    # "Who's there?\nHe.\n" has 17 characters, so 16 are predicted: two windows of 8.
    assert len(first) == 2


def test_the_last_window_is_filled_up(plays):
    text = read_shakespeare(plays, sequence_length=10)
    assert text.train.targets[1].tolist()[6:] == [-100] * 4
    assert text.train.inputs[1].tolist()[6:] == [0] * 4


def test_characters_that_training_has_not_seen_are_unknown(tmp_path):
    (tmp_path / "text.txt").write_text("ab" * 45 + "aZbababab!")
    text = read_shakespeare(tmp_path, sequence_length=20)
    assert (text.characters, text.vocabulary) == ("ab", 4)
    assert text.test.inputs[0, :3].tolist() == [2, 1, 3]
    assert text.decode([0, 1, 2, 3]) == "�ab"


def test_a_plain_text_is_split_in_time_and_has_no_keys(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("x" * 90 + "xyxyxyxyxy")
    for data in (file, tmp_path):
        text = read_shakespeare(data, sequence_length=89)
        assert (len(text.train), len(text.test), text.train.keys) == (1, 1, None)
        assert text.train.inputs.tolist() == [[2] * 89]


@pytest.mark.parametrize("files", [[], ["a.txt", "b.txt"]])
def test_a_folder_without_plays_says_what_is_expected(tmp_path, files):
    for name in files:
        (tmp_path / name).write_text("none of them a play" * 10)
    with pytest.raises(DataError, match=rf"contains {len(files)} .txt files, none of them a play"):
        read_shakespeare(tmp_path)


def test_a_missing_folder_or_a_tiny_text_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="there is no"):
        read_shakespeare(tmp_path / "nowhere")
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match="5 characters"):
        read_shakespeare(tmp_path)


def test_a_window_that_is_longer_than_every_text_takes_no_memory(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("To be or not to be. " * 100)
    with pytest.raises(ValueError, match=r"sequence_length is 1000000000, .* at most 1799"):
        read_shakespeare(text, sequence_length=10**9)
    assert read_shakespeare(text, sequence_length=1799).train.inputs.shape == (1, 1799)


def test_a_sequence_length_of_zero_is_refused(plays):
    with pytest.raises(ValueError, match="at least 1"):
        read_shakespeare(plays, sequence_length=0)
