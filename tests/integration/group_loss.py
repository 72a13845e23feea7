"""Stories of a lost group: what the tests of test_group_loss_*.py have in common."""

from __future__ import annotations

from tests.integration.actors import ConsumerActor, MasterActor, Stage

T, U = b"T", b"U"


def leader(stage: Stage, name: str = "m1", **settings: int) -> MasterActor:
    """One that notes the position when it begins to lead and never again: what it reads is newer than that."""
    made = stage.leader(name, **settings)
    made.dispatcher._position_saver._saved_s = 1e18
    return made


def settle(m: MasterActor, turns: int = 14) -> None:
    """Turns until nothing moves, without the pause between elections that follow each other."""
    for _ in range(turns):
        m.elector._not_before_s = 0.0
        m.look()
        m.turn()


def note_position(m: MasterActor) -> None:
    """The second between two notes of the position is over."""
    m.dispatcher._position_saver._saved_s = 0.0
    m.turn()
    m.dispatcher._position_saver._saved_s = 1e18


def destroy_group(stage: Stage) -> None:
    stage.link.call("XGROUP", "DESTROY", stage.keys.stream, stage.keys.group)


def half_done(stage: Stage, m: MasterActor) -> tuple[ConsumerActor, list[bytes]]:
    """A consumer that has done two of five messages of T and runs the third; what lies below all of them is not
    done."""
    a = stage.consumer("a")
    stage.send(U)
    ids = [entry_id for _ in range(5) for entry_id in stage.send(T)]
    m.settle()
    a.read()
    blocker = a.start()
    assert blocker is not None
    for _ in range(2):
        run = a.start()
        assert run is not None
        run.succeed()
    a.flush()
    m.turn(*a.reports())
    assert a.start() is not None
    assert a.history.ids(T) == ids[:3]
    return a, ids


def end_all(a: ConsumerActor) -> None:
    for run in list(a.runs):
        run.succeed()
