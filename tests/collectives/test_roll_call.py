"""Who is lost, from what the ranks answered."""

from __future__ import annotations

from dure.collectives.roll_call import RollCallAnswer, RollCallState, transfer_seconds


def ranks_and_reason(
    answers: dict[int, RollCallAnswer], deaths: dict[int, str] | None = None
) -> tuple[tuple[int, ...], str]:
    verdict = RollCallState(answers, deaths or {}).verdict(4, "ring all-reduce", "step 5", "10 s")
    return verdict.ranks, verdict.reason


def test_who_was_waited_for_and_did_not_answer_is_lost() -> None:
    answers = {
        1: RollCallAnswer(waited_for=2),
        3: RollCallAnswer(waited_for=2),
    }  # 0 waits for 3 and has not noticed yet
    assert ranks_and_reason(answers) == ((2,), "died or hung up")


def test_if_the_others_waited_too_long_it_fell_silent() -> None:
    answers = {r: RollCallAnswer(waited_for=(r - 1) % 4, timed_out=True) for r in (0, 1, 3)}
    assert ranks_and_reason(answers) == ((2,), "fell silent (nothing for 10 s)")


def test_a_rank_with_an_error_of_its_own_is_the_culprit() -> None:
    answers = {
        0: RollCallAnswer(waited_for=3),
        1: RollCallAnswer(failed="boom"),
        2: RollCallAnswer(waited_for=1),
    }
    assert ranks_and_reason(answers) == ((1,), "failed: boom")


def test_a_supervisor_knows_best_how_a_rank_died() -> None:
    assert ranks_and_reason({0: RollCallAnswer(waited_for=3)}, {3: "was killed by SIGKILL"}) == (
        (3,),
        "was killed by SIGKILL",
    )


def test_where_nobody_was_waited_for_in_particular_all_who_are_absent_are_lost() -> None:
    assert ranks_and_reason({0: RollCallAnswer(), 3: RollCallAnswer()})[0] == (1, 2)


def test_nobody_is_lost_if_all_answer() -> None:
    verdict = RollCallState({r: RollCallAnswer(waited_for=0) for r in range(4)}, {}).verdict(
        4, "x", "y", "10 s"
    )
    assert verdict.error() is None


def test_transfer_and_roll_call_fit_into_the_deadline() -> None:
    assert transfer_seconds(60) == 58
    assert transfer_seconds(2) == 1.5
