"""Writing the records of one slot: the only code on the env's side that stores a slot's control words.

It owns no env. A worker writes with it what its env has returned; whoever has records from elsewhere writes them just so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import monotonic_ns
from typing import Any

import numpy as np

from slotloader.records import values
from slotloader.records.specs import Array, Tree, leaves
from slotloader.records.step_type import StepType
from slotloader.table.infos import pack_info, require_info
from slotloader.table.publisher import Publisher
from slotloader.table.slots import SlotState, Table

_STARTING, _ACTED, _WRITING = int(SlotState.STARTING), int(SlotState.ACTED), int(SlotState.WRITING)
_FIRST, _MID = int(StepType.FIRST), int(StepType.MID)
_TERMINATION, _TRUNCATION = int(StepType.TERMINATION), int(StepType.TRUNCATION)
_FLOAT32_MAX = values.FLOAT32_MAX


class SlotWriter:
    """Writes the records of one slot and makes them visible; used by one thread at a time, but for `keeper` and `count_reset`.

    A record is a call of `begin` (ACTED -> WRITING), one of `write_step`, `write_first` or `write_kept`, and `publish`
    (-> READY). The first record of a life that finds its slot STARTING needs no `begin`. A write that raises leaves a row half
    written and the slot as it was: nobody sees it, and nothing is published.

    Args:
      table: the region.
      slot: the row.
      publisher: of this process.
      observation, info: what values look like; default the layout's. Bounds may differ from env to env.
      check: also refuse NaN and values out of bounds.

    Attributes:
      steps: env steps of the slot, over all lives and earlier writers.
      unseen: declared info columns that no record has had yet; may be cleared.
    """

    def __init__(
        self,
        table: Table,
        slot: int,
        publisher: Publisher,
        observation: Tree | None = None,
        info: Mapping[str, Tree] | None = None,
        check: bool = False,
    ) -> None:
        self.slot, self._table, self._check = slot, table, check
        self._observation = table.layout.observation if observation is None else observation
        columns: Mapping[str, Tree] = table.layout.info if info is None else info  # type: ignore[assignment]
        self._write_observation = values.writer(self._observation, table.observation, slot, ("obs",), check)
        self._rows = [column[slot, ...] for column in table.observation]
        self._columns = self._make_columns(columns)
        self.unseen = set(columns)
        self._state, self._resetting, self._begin_ns = table.state_words, table.resetting_words, table.begin_ns_words
        self._step_type, self._reward, self._publish_ns = table.step_type_words, table.reward_words, table.publish_ns_words
        self._sequence, self._steps, self._step_ns = table.sequence_words, table.steps_words, table.step_ns_words
        self._return_word, self._length_word = table.progress_episode_return_words, table.progress_length_words
        self._order_fence, self._hand_over = publisher.order_fence, publisher.publish
        self._length, self._return = 0, 0.0  # of the episode
        self._began = 0  # when the step began, in monotonic ns
        # Running figures go on where an earlier writer of the slot ended.
        self.steps, self._step_time = int(table.steps[slot]), int(table.step_ns[slot])
        self._resets, self._reset_time = int(table.resets[slot]), int(table.reset_ns[slot])
        self._records = int(table.sequence[slot])

    def _make_columns(self, info: Mapping[str, Tree]) -> list[tuple[str, Callable[[Any], None], list[Array]]]:
        columns, at = [], 0
        for name, tree in info.items():
            count = sum(len(values.parts(leaf)) for leaf in leaves(tree))
            arrays = self._table.info[at : at + count]
            rows = [array[self.slot, ...] for array in arrays]
            columns.append((name, values.writer(tree, arrays, self.slot, ("info", name), self._check), rows))
            at += count
        return columns

    # Taking the slot on.

    def begin(self, resetting: bool = False) -> None:
        """ACTED -> WRITING. The action row may be read once it has returned; it may be called again before the record.

        Args:
          resetting: the record waits for a reset that is still running, or about to.
        """
        slot = self.slot
        self._began = self._begin_ns[slot] = monotonic_ns()  # before the words below: the fleet looks for hung steps with it
        if resetting:
            self._resetting[slot] = 1
        self._state[slot] = _WRITING
        self._order_fence()

    def put_back(self) -> None:
        """WRITING -> ACTED: the action has not been carried out and will be taken again. Any other state stays."""
        if self._state[self.slot] == _WRITING:
            self._state[self.slot] = _ACTED
        self._resetting[self.slot] = 0

    def abandon(self) -> None:
        """The env has failed: it is in no reset any more. Its state is the fleet's to change."""
        self._resetting[self.slot] = 0

    def is_starting(self) -> bool:
        """Whether the first record of a life may be published without an action: none of an earlier life is out."""
        return bool(self._state[self.slot] == _STARTING)

    def begin_reset(self) -> None:
        """A reset begins, of the env whose slot this is."""
        self._begin_ns[self.slot] = monotonic_ns()
        self._resetting[self.slot] = 1

    def end_reset(self) -> None:
        """It has ended."""
        self._begin_ns[self.slot] = monotonic_ns()  # before the word below: nobody may take the reset's time for a step's
        self._resetting[self.slot] = 0

    def count_reset(self, duration_ns: int) -> None:
        """Counts a reset that has been done, be it of a spare."""
        self._resets += 1
        self._reset_time += duration_ns
        self._table.resets_words[self.slot], self._table.reset_ns_words[self.slot] = self._resets, self._reset_time

    # Records.

    def write_step(self, observation: Any, reward: Any, terminated: bool, truncated: bool, info: Mapping[str, Any]) -> bool:
        """Writes the record of an env step that has just ended.

        Args:
          observation: by the observation tree; copied.
          reward: a number that float32 can hold.
          terminated: the episode has ended; wins over `truncated`.
          truncated: the episode was cut off, by a time limit say.
          info: the declared columns are taken from it; of a last record all of it, in at most `INFO_BYTES`.

        Returns:
          Whether this is a last record.

        Raises:
          SpecMismatch: something does not fit.
        """
        slot = self.slot
        now = monotonic_ns()
        self._write_observation(observation)
        if type(reward) is not float or not -_FLOAT32_MAX <= reward <= _FLOAT32_MAX:
            reward = values.fit_reward(reward)
        if self._columns:
            self._write_info(info)
        self._length += 1
        self._return += reward
        self._reward[slot] = reward
        self._return_word[slot], self._length_word[slot] = self._return, self._length
        self._publish_ns[slot] = now
        self.steps += 1
        self._step_time += now - self._began
        self._steps[slot], self._step_ns[slot] = self.steps, self._step_time
        if terminated or truncated:
            self._write_last_info(info)
            self._step_type[slot] = _TERMINATION if terminated else _TRUNCATION
            self._table.progress_ended_words[slot] = 1
            return True
        self._step_type[slot] = _MID
        return False

    def write_first(self, observation: Any, info: Mapping[str, Any], life: int, episode: int, seed: int | None) -> None:
        """Writes the FIRST record of an episode.

        Args:
          observation: by the observation tree; copied.
          info: the declared columns are taken from it.
          life: of the slot.
          episode: index within the life.
          seed: of the episode's reset; None if it had none.

        Raises:
          SpecMismatch: something does not fit.
        """
        self._write_observation(observation)
        self._write_first_words(info, life, episode, seed)

    def keeper(self) -> KeptFirst:
        """Private memory for one first observation, to be written later by `write_kept`."""
        return KeptFirst(self._observation, self._rows, self._check)

    def write_kept(self, kept: KeptFirst, life: int, episode: int, seed: int | None) -> None:
        """`write_first` of what has been kept."""
        for row, private in zip(self._rows, kept.rows, strict=True):
            row[...] = private
        self._write_first_words(kept.info, life, episode, seed)

    def _write_first_words(self, info: Mapping[str, Any], life: int, episode: int, seed: int | None) -> None:
        slot, table = self.slot, self._table
        self._write_info(info)
        self._length, self._return = 0, 0.0
        now = self._begin_ns[slot] = monotonic_ns()
        self._resetting[slot] = 0  # `begin` may have set it after the reset that it waited for had ended
        table.life_words[slot], table.episode_words[slot] = life, episode
        table.episode_seed_words[slot] = -1 if seed is None else seed
        table.progress_life_words[slot], table.progress_ended_words[slot] = life, 0
        self._return_word[slot], self._length_word[slot] = 0.0, 0
        self._step_type[slot], self._reward[slot], self._publish_ns[slot] = _FIRST, 0.0, now

    def publish(self) -> None:
        """-> READY: hands the record that has been written to the trainer, and wakes it if it asked for that."""
        slot = self.slot
        self._records += 1
        self._sequence[slot] = self._records
        self._hand_over(slot)

    def _write_info(self, info: Mapping[str, Any]) -> None:
        if self._columns:
            require_info(info)
        for name, write, rows in self._columns:
            if name in info:
                write(info[name])
                if self.unseen:
                    self.unseen.discard(name)
            else:  # a column that a record lacks is zero, as in gymnasium's vector infos
                for row in rows:
                    row[...] = 0

    def _write_last_info(self, info: Mapping[str, Any]) -> None:
        data = pack_info(info)
        self._table.info_data[self.slot, : len(data)] = np.frombuffer(data, np.uint8)
        self._table.info_length_words[self.slot] = len(data)


class KeptFirst:
    """A first observation and its info in private memory: from the reset that was done ahead until its record is due.

    Attributes:
      rows: the observation, an array for each part of each leaf.
      info: as the env returned it, not copied.
    """

    def __init__(self, observation: Tree, rows: list[Array], check: bool) -> None:
        arrays = [np.zeros((1, *row.shape), row.dtype) for row in rows]
        self._write = values.writer(observation, arrays, 0, ("obs",), check)
        self.rows = [array[0, ...] for array in arrays]
        self.info: Mapping[str, Any] = {}

    def keep(self, observation: Any, info: Mapping[str, Any]) -> None:
        """Checks and copies an observation over the one before.

        Raises:
          SpecMismatch: it does not fit.
        """
        self._write(observation)
        self.info = info
