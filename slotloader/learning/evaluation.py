"""`evaluate`: how good a policy is, over an exact number of episodes that do not depend on how fast they are.

Episodes that end first are short ones, so the first hundred to end say little about a policy whose return depends on the
length. Here every slot plays a fixed number of episodes, each from a seed of its own, and waits when it has done them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic_ns
from typing import Any

import numpy as np

from slotloader.arguments import require_count
from slotloader.batching.batches import Batch
from slotloader.batching.episodes import Episode
from slotloader.batching.leases import Leases, cut_of
from slotloader.batching.meters import Meter
from slotloader.batching.progress import ProgressBar
from slotloader.batching.receiver import Receiver
from slotloader.device.batch import DeviceBatch
from slotloader.device.batches import DeviceSource
from slotloader.device.binding import bound
from slotloader.device.policies import Policy, positional
from slotloader.errors import EnvFailed, SlotLoaderError, WorkerDied
from slotloader.fleet.supervisor import Cut
from slotloader.loader import SlotLoader
from slotloader.records.specs import Array


@dataclass(frozen=True, eq=False)
class EvalResult:
    """The episodes of an evaluation, by slot and then in the order played; `print` it for a table.

    Attributes:
      returns: float64 (N,), sums of rewards; a wrapper's `info["episode"]["r"]` if there is one.
      lengths: int64 (N,), env steps.
      infos: the info dict of each last record.
      seeds: what each episode was reset with; None if `on_reset` chose so.
      slots: int64 (N,), who played it.
    """

    returns: Array
    lengths: Array
    infos: tuple[dict[str, Any], ...]
    seeds: tuple[int | None, ...]
    slots: Array

    def __len__(self) -> int:
        return len(self.returns)

    @property
    def mean_return(self) -> float:
        """Mean over the episodes."""
        return float(np.mean(self.returns))

    @property
    def std_return(self) -> float:
        """Standard deviation of the returns, with N - 1; NaN for one episode."""
        return _std(self.returns)

    @property
    def standard_error(self) -> float:
        """Of the mean return; NaN for one episode."""
        return _std(self.returns) / float(np.sqrt(len(self)))

    @property
    def mean_length(self) -> float:
        """Mean over the episodes."""
        return float(np.mean(self.lengths))

    def __str__(self) -> str:
        heads = ("mean", "std", "std error", "min", "median", "max")
        lines = [f"{len(self):,} episodes on {np.unique(self.slots).size} slots", " " * 8 + "".join(f"{h:>12}" for h in heads)]
        for name, values in (("return", self.returns), ("length", self.lengths)):
            std = _std(values)
            row = (values.mean(), std, std / np.sqrt(len(self)), values.min(), np.median(values), values.max())
            lines.append(f"{name:8}" + "".join(f"{value:12,.2f}" if np.isfinite(value) else f"{'-':>12}" for value in row))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"EvalResult({len(self)} episodes, mean return {self.mean_return:.6g} +- {self.standard_error:.2g})"


def _std(values: Array) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")


def evaluate(
    loader: SlotLoader | Receiver | DeviceSource,
    policy: Policy | Callable[..., Any],
    episodes: int = 100,
    seed: int = 0,
    progress: bool | None = None,
) -> EvalResult:
    """Plays an exact number of episodes, a fixed share of them on every slot, so that short ones are not favoured.

        result = evaluate(loader, lambda obs: model(obs).argmax(-1), episodes=100)
        print(result)

    Episode k of slot i is reset with a seed that only `(seed, i, k)` decide: with the same number of slots the same episodes
    result for any backend, packing and `spares`, on a fresh loader and in the middle of a run, and two policies are compared
    on the same ones. (An `on_reset` of the loader still has the last word.) A slot that has played its share waits. An
    episode that a failure interrupts does not count: its slot plays another one.

    Every slot that takes part begins a new life for this, and one more afterwards. The loader can then be used as before: the
    first record of each such slot is FIRST, and the episode that was under way comes in `batch.episodes` with
    `interrupted=True`; what its env still had to tell of it is lost. The loader's figures and counters leave the evaluation
    out.

    Args:
      loader: a loader, a receiver of `loader.split(n)`, or an adapter of one (`to_torch`, `to_jax`, `to_numpy`). No batch may
        be unanswered.
      policy: `policy(obs) -> action` on numpy arrays; for an adapter a policy that it has made, or anything that its
        `policy` takes.
      episodes: how many.
      seed: of the episodes, not of the policy.
      progress: show a bar; None shows it on a terminal.

    Returns:
      The episodes and their figures.

    Raises:
      TypeError, ValueError: an argument is wrong.
      SlotLoaderError: a batch is unanswered.
      EnvFailed, WorkerDied: an env has failed for good; and whatever `recv`, `send` and the policy raise.
    """
    if not isinstance(loader, (SlotLoader, Receiver, DeviceSource)):
        raise TypeError(f"loader: expected a SlotLoader, a receiver or an adapter (to_torch, ...), found {loader!r:.200}")
    episodes, seed = require_count("episodes", episodes), require_count("seed", seed, 0)
    side = _DeviceSide(loader, policy) if isinstance(loader, DeviceSource) else _HostSide(loader, policy)
    receiver = side.receiver
    side.settle()
    if receiver.unanswered:
        raise SlotLoaderError(
            f"evaluate: expected no unanswered batch, found {receiver.unanswered}; send or release them "
            "(`close` of a rollout releases those that wait at its barrier, and it can go on afterwards)"
        )
    return _Evaluation(side, int(episodes), int(seed)).run(ProgressBar(progress))


class _HostSide:
    """A policy on numpy arrays."""

    def __init__(self, source: SlotLoader | Receiver, policy: Any) -> None:
        if isinstance(policy, Policy):
            raise TypeError(
                "policy: expected a function of numpy observations, found the policy of an adapter; pass the adapter"
            )
        if not callable(policy):
            raise TypeError(f"policy: expected policy(obs) -> action, found {policy!r:.200}")
        if positional(policy)[0] > 1:
            raise TypeError(
                f"policy: expected policy(obs) -> action of numpy observations, found {policy!r:.200} with more arguments; for "
                "policy(params, inputs, state, key) pass an adapter: evaluate(to_numpy(loader), policy)"
            )
        self.receiver, self._policy = source.receiver, policy

    def settle(self) -> None:
        """Nothing is on its way."""

    def play(self, min_get: int, note: Callable[[Batch], Array]) -> None:
        """Receives a batch and answers the rows that `note` says."""
        batch = self.receiver.recv(min_get=min_get)
        rows = note(batch)
        actions = self._policy(batch.obs)
        if rows.all():
            batch.send(actions)
        else:
            self.receiver.leases.answer_some(batch, actions, rows)


class _DeviceSide:
    """A policy on a device."""

    def __init__(self, batches: DeviceSource, policy: Any) -> None:
        self._batches, self.receiver = batches, batches.receiver
        self._policy = bound(batches, policy)

    def settle(self) -> None:
        """Waits until no action is on its way."""
        self._batches.drain()

    def play(self, min_get: int, note: Callable[[Batch], Array]) -> None:
        """Receives a batch and answers the rows that `note` says."""
        batch: DeviceBatch = self._batches.recv(min_get=min_get)
        rows = note(batch.host)
        acted = self._policy(batch)
        if rows.any():
            batch.send(acted.action, hold=None if rows.all() else ~rows)


class _Aside:
    """What a receiver knew of its slots and counted before the evaluation, and the way back to it."""

    def __init__(self, leases: Leases) -> None:
        self._leases, self._began_ns = leases, monotonic_ns()
        self._meter = leases.exchange_meter(Meter())
        self._last = leases.last.copy()

    def cuts_of(self, batch: Batch, slots: Sequence[int]) -> dict[int, Cut]:
        """The episodes that are open for whoever received before, if they go no further than the records of `batch`."""
        interrupted = {episode.slot: episode for episode in batch.episodes if episode.interrupted}
        cuts, table = {}, batch.exchange.table
        for slot in slots:
            _, _, life, ended = self._last[slot].tolist()
            episode = interrupted.get(slot)
            if not ended and episode is not None:
                cuts[slot] = cut_of(episode)
            elif not ended:
                cuts[slot] = Cut(life, int(table.episode[slot]), int(table.episode_seed[slot]), "evaluation")
        return cuts

    def go_back(self, slots: Sequence[int], cuts: Mapping[int, Cut]) -> None:
        """Goes on with the figures from before; the next record of each slot tells of the episode that was cut."""
        self._meter.start_ns += monotonic_ns() - self._began_ns
        self._leases.exchange_meter(self._meter)
        self._leases.last[slots] = self._last[slots]
        for slot, cut in cuts.items():
            self._leases.exchange.fleet.give_back_cut(slot, cut)


class _Evaluation:
    """One evaluation: begins lives, plays, and leaves the slots to whoever used them before."""

    def __init__(self, side: _HostSide | _DeviceSide, episodes: int, seed: int) -> None:
        self._side, self._episodes, self._seed = side, episodes, seed
        self._receiver, exchange = side.receiver, side.receiver.exchange
        self._leases, self._fleet, self._table = self._receiver.leases, exchange.fleet, exchange.table
        self._played: dict[int, list[Episode]] = {}
        self._share: dict[int, int] = {}  # episodes by slot
        self._begun: dict[int, int] = {}  # their FIRST records, those of interrupted ones too
        self._lives: dict[int, int] = {}

    def run(self, bar: ProgressBar) -> EvalResult:
        """Plays all of it; the slots are given back however it ends."""
        receiver = self._receiver
        aside = _Aside(self._leases)
        cuts: dict[int, Cut] = {}
        try:
            batch = receiver.take_all()
            try:
                slots = [slot for slot in batch.env_indices.tolist() if not self._leases.is_doomed(slot)]
                if not slots:
                    raise SlotLoaderError("evaluate: expected a slot with an env, found none")
                shares = [self._episodes // len(slots) + (at < self._episodes % len(slots)) for at in range(len(slots))]
                self._share = {slot: share for slot, share in zip(slots, shares, strict=True) if share}
                self._played, self._begun = {slot: [] for slot in self._share}, dict.fromkeys(self._share, 0)
                cuts = aside.cuts_of(batch, list(self._share))
                self._begin_lives(list(self._share))
                self._leases.pass_over(batch, np.isin(batch.env_indices, list(self._share)))
                while (done := sum(map(len, self._played.values()))) < self._episodes:
                    bar.update(done / self._episodes, self._text)
                    playing = sum(len(self._played[slot]) < share for slot, share in self._share.items())
                    self._side.play(min(receiver.request.min_get, playing), self._note)
                bar.close(1.0, self._text())
                self._side.settle()
            finally:
                self._leave()
        finally:
            aside.go_back(list(self._share), cuts)
        found = [episode for played in self._played.values() for episode in played]
        return EvalResult(
            returns=np.array([episode.episode_return for episode in found]),
            lengths=np.array([episode.length for episode in found], np.int64),
            infos=tuple(episode.info for episode in found),
            seeds=tuple(episode.seed for episode in found),
            slots=np.array([episode.slot for episode in found], np.int64),
        )

    def _begin_lives(self, slots: list[int]) -> None:
        """Has leased slots play on from a seed of ours, counted on from what they have begun."""
        self._lives.update(self._fleet.begin_lives(slots, {slot: (self._seed, self._begun[slot]) for slot in slots}))

    def _note(self, batch: Batch) -> Array:
        """Counts what a batch brings, bool (B,): the rows to answer. A slot that has played its share stays leased."""
        strays = []
        for slot in batch.env_indices[batch.is_first].tolist():
            if self._table.life[slot] == self._lives[slot]:
                self._begun[slot] += 1
            else:  # its env was rebuilt, with a seed of its own: whatever is sent now only asks for the next FIRST record
                strays.append(slot)
        if strays:
            self._begin_lives(strays)
        for episode in batch.episodes:
            if not episode.interrupted:
                self._played[episode.slot].append(episode)
        return np.array([len(self._played[slot]) < self._share[slot] for slot in batch.env_indices.tolist()], bool)

    def _leave(self) -> None:
        """Gives the slots back: those that have taken part begin another life."""
        receiver = self._receiver
        if receiver.closed:
            return
        with contextlib.suppress(Exception):  # the loop raises it, or has done so
            self._side.settle()
        for batch in receiver.unanswered:
            batch.release()
        failures: list[SlotLoaderError] = []
        rest: Batch | None = None
        while rest is None and self._leases.alive > 0:
            try:
                rest = receiver.take_all()
            except (EnvFailed, WorkerDied) as error:
                failures.append(error)
        if rest is not None:
            self._end_lives(rest)
        if failures:
            raise failures[0]

    def _end_lives(self, batch: Batch) -> None:
        rows = np.array([slot in self._share and not self._leases.is_doomed(slot) for slot in batch.env_indices.tolist()], bool)
        self._fleet.begin_lives(batch.env_indices[rows].tolist())
        self._leases.pass_over(batch, rows)
        batch.release()

    def _text(self) -> str:
        returns = [episode.episode_return for played in self._played.values() for episode in played]
        mean = f", mean return {np.mean(returns):,.2f}" if returns else ""
        return f"{len(returns):,}/{self._episodes:,} episodes{mean}"
