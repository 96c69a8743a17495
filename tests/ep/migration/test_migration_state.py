"""Ranks that only see each other's reports decide alike, whatever happens to each of them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ep.migration.migration_state import (
    Action,
    End,
    Install,
    MigrationPhase,
    MigrationState,
    Outcome,
    Report,
    Stage,
    Stop,
)

# What a rank's background work has to tell before an exchange: layers newly staged, or failure.
NEWS = st.one_of(st.integers(0, 3), st.just(-1))


class Fleet:
    """All ranks' states, and what became of each layer on each rank."""

    def __init__(self, num_ranks: int, num_layers: int) -> None:
        self.states = [MigrationState() for _ in range(num_ranks)]
        self.changed = [set[int]() for _ in range(num_ranks)]
        self.staged = [0] * num_ranks
        self.failed = [False] * num_ranks
        self.run = 0
        self.outcome: Outcome | None = None
        for state in self.states:
            (stage,) = state.begin(num_layers)
            assert isinstance(stage, Stage)
            assert not stage.restore
            self.run, self.limit = stage.run, stage.num_layers

    def hear(self, rank: int, news: int) -> None:
        if self.outcome is not None:
            return
        if news < 0:
            self.failed[rank] = True
            self.states[rank].failed(self.run)
        elif not self.failed[rank]:
            self.staged[rank] = min(self.limit, self.staged[rank] + news)
            self.states[rank].staged(self.run, self.staged[rank])

    def exchange(self) -> None:
        reports = [state.report for state in self.states]
        decided = [state.exchanged(reports) for state in self.states]
        assert all(actions == decided[0] for actions in decided)
        for action in decided[0]:
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Install(run, index, restore):
                assert run == self.run
                assert min(self.staged) > index, "a rank has not staged it"
                assert not any(self.failed)
                for changed in self.changed:
                    changed.remove(index) if restore else changed.add(index)
            case Stage(run, num_layers, restore):
                assert restore
                assert self.changed[0] == set(range(num_layers))
                self.run, self.limit = run, num_layers
                self.staged = [0] * len(self.states)
                self.failed = [False] * len(self.states)
            case Stop(run):
                assert run == self.run
                assert any(self.failed)
            case End(outcome):
                self.outcome = outcome


@settings(max_examples=200, deadline=None)
@given(
    num_layers=st.integers(1, 6),
    rounds=st.lists(st.tuples(NEWS, NEWS, NEWS), max_size=25),
)
def test_all_ranks_change_together_or_not_at_all(
    num_layers: int, rounds: list[tuple[int, int, int]]
) -> None:
    fleet = Fleet(3, num_layers)
    for news in rounds:
        before = [set(changed) for changed in fleet.changed]
        for rank, one in enumerate(news):
            fleet.hear(rank, one)
        fleet.exchange()
        assert len({frozenset(changed) for changed in fleet.changed}) == 1
        assert len(fleet.changed[0] ^ before[0]) <= 1, "more than a layer at a boundary"
    while fleet.outcome is None:  # from here on all goes well
        for rank in range(3):
            fleet.hear(rank, 1)
        fleet.exchange()
    wanted = {Outcome.DONE: set(range(num_layers)), Outcome.RESTORED: set()}
    if fleet.outcome in wanted:
        assert fleet.changed[0] == wanted[fleet.outcome]
    assert all(
        state.phase is MigrationPhase.IDLE and state.report == Report() for state in fleet.states
    )


def test_restores_what_was_installed_before_a_failure() -> None:
    fleet = Fleet(2, 5)
    for _ in range(3):
        for rank in range(2):
            fleet.hear(rank, 1)
        fleet.exchange()
    assert fleet.changed[0] == {0, 1, 2}
    assert fleet.states[0].num_changed == 3
    fleet.hear(1, -1)
    fleet.exchange()
    assert fleet.states[0].phase is MigrationPhase.RESTORING
    assert fleet.states[0].num_changed == 3
    while fleet.outcome is None:
        for rank in range(2):
            fleet.hear(rank, 1)
        fleet.exchange()
    assert fleet.outcome is Outcome.RESTORED
    assert fleet.changed == [set(), set()]


def test_failure_of_both_ways() -> None:
    fleet = Fleet(2, 3)
    for rank in range(2):
        fleet.hear(rank, 2)
    fleet.exchange()
    fleet.exchange()
    fleet.hear(0, -1)
    fleet.exchange()
    fleet.hear(0, 1)
    fleet.hear(1, 1)
    fleet.exchange()
    fleet.hear(1, -1)
    fleet.exchange()
    assert fleet.outcome is Outcome.BROKEN
    assert fleet.changed[0] == fleet.changed[1] == {1}


def test_news_of_an_earlier_run_changes_nothing() -> None:
    state = MigrationState()
    (stage,) = state.begin(2)
    assert isinstance(stage, Stage)
    state.failed(stage.run)
    assert state.exchanged([state.report]) == [Stop(stage.run), End(Outcome.RESTORED)]
    state.staged(stage.run, 2)
    state.failed(stage.run)
    assert state.report == Report()
    state.begin(1)
    state.staged(stage.run, 1)
    state.failed(stage.run)
    assert state.report == Report()


def test_one_at_a_time() -> None:
    state = MigrationState()
    state.begin(1)
    with pytest.raises(AssertionError):
        state.begin(1)
