"""A keeper of the ISR of node A's partition, whom the test tells what followers say, and its clock."""

from __future__ import annotations

from dataclasses import replace

from nsqha.election.model import PartitionMeta
from nsqha.replication.isr import Action, Effective, IsrKeeper, Propose

A, B, C, D = 1, 2, 3, 4
NOW = 50.0


def record(
    isr: tuple[int, ...] = (A, B, C), *, min_isr: int = 2, replicas: tuple[int, ...] = (A, B, C)
) -> PartitionMeta:
    return PartitionMeta(
        leader=A, epoch=3, isr={node: node * 100 for node in isr}, replicas=replicas, min_isr=min_isr, version=10
    )


class IsrRig:
    """A keeper of node A, whose log ends at 10 and is committed up to 8, and its clock."""

    def __init__(self, meta: PartitionMeta | None = None, *, sync_always: bool = False) -> None:
        self.now = NOW
        self.keeper = IsrKeeper(A, meta or record(), epoch_start=5, now=NOW, sync_always=sync_always)
        self.committed = 8
        self.end = 10

    def heard(
        self,
        node: int,
        end: int,
        *,
        log_uid: int | None = None,
        registration: int = 1,
        durable: int = 0,
        fit: bool = True,
    ) -> None:
        self.keeper.followers.heard(
            node,
            registration=registration,
            log_uid=node * 100 if log_uid is None else log_uid,
            end=end,
            durable=durable,
            now=self.now,
            fit=fit,
        )

    def step(self, seconds: float = 0.0) -> list[Action]:
        """Steps every 100 ms until something is to be done, for so long."""
        for _ in range(round(seconds / 0.1)):
            if actions := self._step():
                return actions
            self.now += 0.1
        return self._step()

    def _step(self) -> list[Action]:
        return self.keeper.step(committed=self.committed, end=self.end, end_durable=0, now=self.now)

    def in_sync(self, *nodes: int) -> None:
        for node in nodes:
            self.heard(node, self.end)


def proposal(actions: list[Action]) -> Propose:
    (found,) = [action for action in actions if isinstance(action, Propose)]
    return found


def effective(actions: list[Action]) -> Effective:
    (found,) = [action for action in actions if isinstance(action, Effective)]
    return found


def newer(meta: PartitionMeta, **changes: object) -> PartitionMeta:
    return replace(meta, version=meta.version + 1, **changes)  # type: ignore[arg-type]
