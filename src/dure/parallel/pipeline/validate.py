"""Check whether a schedule can run and computes everything that training needs.

A schedule is valid if

    homes     every action belongs to a stage on its rank, and every stage computes something;
    complete  every stage computes every micro-batch forward once and backward once: B, or I and
              then W;
    order     the requirements of an action come before it on its rank: F(s) after F(s-1) or the
              receive of its output; B(s) and I(s) after F(s), and after B(s+1) or I(s+1) or the
              receive of its gradient; W(s) after I(s); sends after the action that makes the value;
    messages  every message between ranks is sent once and received once, for each pair of ranks in
              the order of sending;
    end       all ranks, which wait at receives but not at sends, reach the end of their lists.

The last condition is checked by running the ranks without times. Cost: O(actions).
"""

from __future__ import annotations

from collections import deque

from dure.parallel.pipeline.schedule import (
    RECEIVES,
    SENDS,
    Action,
    Schedule,
    on_other_rank,
    receive_before,
)


class ScheduleError(ValueError):
    """Error: a schedule cannot run.

    rank, place, action: the first invalid action, and its index in its rank's list. place is None
    for a missing action; all three may be None if the error belongs to no single action.
    """

    def __init__(
        self,
        message: str,
        rank: int | None = None,
        place: int | None = None,
        action: Action | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.place = place
        self.action = action


def check(schedule: Schedule, require_backward: bool = True) -> None:
    """Raise ScheduleError if the schedule is invalid.

    require_backward: False if forwards alone are enough.
    """
    # In this order: each check may rely on the earlier checks, and the first error is reported.
    _check_homes(schedule)
    for rank in range(schedule.ranks):
        _check_belongs(schedule, rank)
    _check_stages(schedule)
    for rank in range(schedule.ranks):
        _check_order(schedule, rank)
    _check_complete(schedule, require_backward)
    _check_messages(schedule)
    running_order(schedule)


def _error(schedule: Schedule, rank: int, place: int, said: str) -> ScheduleError:
    action = schedule.actions[rank][place]
    return ScheduleError(f"{action} (rank {rank}, place {place}) {said}", rank, place, action)


def _check_homes(schedule: Schedule) -> None:
    if schedule.microbatches < 1 or not schedule.home:
        raise ScheduleError(
            f"the schedule has {schedule.microbatches} micro-batches and {schedule.stages} stages: "
            "give at least one"
        )
    for stage, rank in enumerate(schedule.home):
        if not 0 <= rank < schedule.ranks:
            raise ScheduleError(
                f"stage {stage} is on rank {rank}, but there are {schedule.ranks} ranks",
                rank,
            )
    for rank in range(schedule.ranks):
        if rank not in schedule.home:
            raise ScheduleError(
                f"rank {rank} has no stage: give it one, or leave the rank out", rank
            )


def _check_belongs(schedule: Schedule, rank: int) -> None:
    """Check that every action is of a stage of this rank, and that every transfer has a message."""
    for place, action in enumerate(schedule.actions[rank]):
        said = _stranger(schedule, rank, action)
        if said is not None:
            raise _error(schedule, rank, place, said)


def _stranger(schedule: Schedule, rank: int, action: Action) -> str | None:
    """Return why an action does not belong on a rank; None if it does."""
    home = schedule.home
    if not 0 <= action.stage < schedule.stages:
        return f"names a stage that does not exist: there are {schedule.stages}"
    if not 0 <= action.microbatch < schedule.microbatches:
        return f"names a micro-batch that does not exist: there are {schedule.microbatches}"
    if home[action.stage] != rank:
        return f"is on the wrong rank: stage {action.stage} is on rank {home[action.stage]}"
    if not action.computes and not on_other_rank(home, action.stage, action.counterpart.stage):
        return f"has nothing to transfer: {_neighbour(action, home)}; remove it"
    return None


def _neighbour(action: Action, home: tuple[int, ...]) -> str:
    other = action.counterpart.stage
    if other < 0 or other >= len(home):
        return f"stage {action.stage} is the {'first' if other < 0 else 'last'} one"
    return f"stages {action.stage} and {other} are both on rank {home[other]}"


def _check_stages(schedule: Schedule) -> None:
    alive: set[int] = set()
    for actions in schedule.computing:
        alive.update(action.stage for action in actions)
    for stage, rank in enumerate(schedule.home):
        if stage not in alive:
            action = Action("forward", stage, 0)
            raise ScheduleError(
                f"stage {stage} is unused: rank {rank} computes nothing for it, not even {action}",
                rank=rank,
                action=action,
            )


def _needs(action: Action, home: tuple[int, ...]) -> list[tuple[Action, ...]]:
    """Return the requirements of an action: from each tuple, at least one action before it."""
    kind, stage, microbatch = action
    forward = Action("forward", stage, microbatch)
    # B and I both compute the gradient of the inputs: either is enough.
    gradient = Action("input_gradient", stage, microbatch)
    if kind in RECEIVES:
        return []
    if kind == "weight_gradient":
        return [(gradient,)]
    if kind == "send_output":
        return [(forward,)]
    if kind == "send_gradient":
        return [(Action("backward", stage, microbatch), gradient)]
    needs: list[tuple[Action, ...]] = [] if kind == "forward" else [(forward,)]
    # from another rank: the receive; else the action of the neighbouring stage, here on this rank
    if message := receive_before(action, home):
        needs.append((message,))
    elif kind == "forward" and stage > 0:
        needs.append((Action("forward", stage - 1, microbatch),))
    elif kind != "forward" and stage < len(home) - 1:
        needs.append(
            (
                Action("backward", stage + 1, microbatch),
                Action("input_gradient", stage + 1, microbatch),
            )
        )
    return needs


def _check_order(schedule: Schedule, rank: int) -> None:
    """Check that no action is repeated, and that its requirements on its rank come before it."""
    actions = schedule.actions[rank]
    places: dict[Action, int] = {}
    for place, action in enumerate(actions):
        if action in places:
            raise _error(
                schedule,
                rank,
                place,
                f"occurs twice, first at place {places[action]}: keep one",
            )
        twin = _twin(action)
        if twin in places:
            raise _error(
                schedule, rank, place, f"is a second backward after {twin}: keep B, or I and W"
            )
        for choice in _needs(action, schedule.home):
            if not any(needed in places for needed in choice):
                raise _error(schedule, rank, place, f"needs {_where(choice, actions)}")
        # only now, so that an action does not satisfy its own need
        places[action] = place


def _twin(action: Action) -> Action | None:
    """Return I for B and B for I: the other action that computes a gradient of the inputs."""
    if action.kind == "backward":
        return action._replace(kind="input_gradient")
    return action._replace(kind="backward") if action.kind == "input_gradient" else None


def _where(choice: tuple[Action, ...], actions: tuple[Action, ...]) -> str:
    later = next((needed for needed in choice if needed in actions), None)
    if later is None:
        return f"{' or '.join(map(str, choice))}, which is missing: put it before"
    return f"{later}, which comes only at place {actions.index(later)}: put it before"


def _check_complete(schedule: Schedule, require_backward: bool) -> None:
    # Actions name their stage, and a stage has a single rank, so a set of all ranks' actions is
    # unambiguous.
    there = set().union(*schedule.actions)
    for stage, rank in enumerate(schedule.home):
        for number in range(schedule.microbatches):
            forward = Action("forward", stage, number)
            backward = Action("backward", stage, number)
            gradient = Action("input_gradient", stage, number)
            weight = Action("weight_gradient", stage, number)
            missing = None
            if forward not in there:
                missing = forward
            elif gradient in there and weight not in there:
                missing = weight
            elif require_backward and not {backward, gradient} & there:
                missing = backward
            if missing:
                raise ScheduleError(
                    f"{missing} is missing on rank {rank}: every stage computes every micro-batch "
                    "forward once and backward once",
                    rank=rank,
                    action=missing,
                )


def _check_messages(schedule: Schedule) -> None:
    """Check that every message is sent and received, in the same order for each pair of ranks."""
    there = set().union(*schedule.actions)
    sent: dict[tuple[int, int], list[Action]] = {}
    for rank, actions in enumerate(schedule.actions):
        for place, action in enumerate(actions):
            if action.computes:
                continue
            other = schedule.home[action.counterpart.stage]
            if action.counterpart not in there:
                receives = action.kind in RECEIVES
                said = "waits for what is never sent" if receives else "is never received"
                missing = f"{action.counterpart} is missing on rank {other}"
                raise _error(schedule, rank, place, f"{said}: {missing}")
            if action.kind in SENDS:
                sent.setdefault((rank, other), []).append(action)
    for rank, actions in enumerate(schedule.actions):
        queues = {source: iter(sends) for (source, to), sends in sent.items() if to == rank}
        for place, action in enumerate(actions):
            if action.kind in RECEIVES:
                source = schedule.home[action.counterpart.stage]
                # There are as many sends as receives: each has its counterpart, and no action is
                # repeated.
                send = next(queues[source])
                if send != action.counterpart:
                    said = (
                        f"is in crossed order: rank {source} sends {send} before it; "
                        f"receive {send.counterpart} first"
                    )
                    raise _error(schedule, rank, place, said)


def running_order(schedule: Schedule) -> list[tuple[int, Action]]:
    """Return all actions with their ranks, in a possible order of execution.

    Raises ScheduleError at a deadlock.
    """
    order: list[tuple[int, Action]] = []
    places = [0] * schedule.ranks
    sent: set[Action] = set()
    waiting: dict[Action, int] = {}  # the send that a rank waits for
    ready = deque(range(schedule.ranks))
    while ready:
        rank = ready.popleft()
        actions = schedule.actions[rank]
        # A rank runs until a receive whose message is not sent yet; the send makes it ready again.
        while places[rank] < len(actions):
            action = actions[places[rank]]
            if action.kind in RECEIVES and action.counterpart not in sent:
                # a message has a single receiver, so at most one rank waits for it
                waiting[action.counterpart] = rank
                break
            if action.kind in SENDS:
                sent.add(action)
                if action in waiting:
                    ready.append(waiting.pop(action))
            order.append((rank, action))
            places[rank] += 1
    # All other ranks have finished or wait too, so no further send can wake a rank.
    if waiting:
        raise _deadlock(schedule, places, set(waiting.values()))
    return order


def _deadlock(schedule: Schedule, places: list[int], stuck: set[int]) -> ScheduleError:
    """Return the error that names the waiting ranks: for a send that never comes, or in a cycle.

    places: the index at which each rank has stopped. stuck: the ranks that wait at a receive.
    """

    def awaited(rank: int) -> int:
        return schedule.home[schedule.actions[rank][places[rank]].counterpart.stage]

    chain = [min(stuck)]
    # Follow each rank to the rank that it waits for, until a rank repeats: these form the cycle.
    while awaited(chain[-1]) not in chain:
        if awaited(chain[-1]) not in stuck:  # that rank has finished without the send
            rank = chain[-1]
            send = schedule.actions[rank][places[rank]].counterpart
            return _error(
                schedule, rank, places[rank], f"waits for {send}, which is never sent: add it"
            )
        chain.append(awaited(chain[-1]))
    circle = chain[chain.index(awaited(chain[-1])) :]
    # Begin with the lowest rank, so that equal deadlocks have equal messages.
    start = circle.index(min(circle))
    circle = circle[start:] + circle[:start]
    steps = []
    for rank in circle:
        action = schedule.actions[rank][places[rank]]
        send = action.counterpart
        other = awaited(rank)
        before = schedule.actions[other][places[other]]
        said = f"waits for {send}, which comes after {before}"
        steps.append(said if rank == circle[0] else f"{action} {said}")
    first = circle[0]
    return _error(
        schedule, first, places[first], f"can never continue (deadlock): it {'; '.join(steps)}"
    )
