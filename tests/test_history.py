"""What learners refuse, by name and without a trace: an `add` that raises changes nothing."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from checks import run_script
from gymnasium.spaces import Box, Dict, Discrete, Text
from policies_toys import NAMES, Adapt, host

from slotloader import Acted, LeaseExpired, LoaderClosed, SlotLoader, to_torch
from slotloader.learning.history import History
from slotloader.learning.learners import Transitions, Unrolls

INLINE: dict[str, Any] = {"backend": "inline", "timeout": None}


@pytest.fixture(params=NAMES)
def adapt(request: pytest.FixtureRequest) -> Adapt:
    """The adapters."""
    return Adapt(request.param)


class Clock(gym.Env):
    """The observation and the reward are the time; episodes of 37 steps."""

    observation_space: Any = Box(-np.inf, np.inf, (1,), np.float32)
    action_space: Any = Discrete(5)
    t = 0

    def _see(self) -> Any:
        return np.full(1, self.t, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return self._see(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self._see(), float(self.t), self.t == 37, False, {}


def require_right(transition: Any, most: int) -> int:
    """Every row is a true transition of `Clock` with gamma 1; returns how many there are."""
    size = transition.size
    start, end = (host(obs)[:size, 0].astype(int).tolist() for obs in (transition.obs, transition.next_obs))
    for first, last, reward in zip(start, end, host(transition.reward)[:size].tolist(), strict=True):
        assert 1 <= last - first <= most
        assert reward == sum(range(first + 1, last + 1))
    return size


def zeros(batch: Any) -> Any:
    return np.zeros(batch.size, np.int64)


@pytest.mark.parametrize(
    ("extras", "text"),
    [
        ({"v": 0.5}, r"extras\['v'\]: expected \(4, ...\) and row shape \(\), found shape \(\)"),
        ({"v": np.zeros(3)}, r"extras\['v'\]: expected \(4, ...\) and row shape \(\), found shape \(3,\)"),
        ({"v": np.zeros((4, 1))}, r"extras\['v'\]: expected \(4, ...\) and row shape \(\), found shape \(4, 1\)"),
        ({"v": np.zeros(4, int)}, r"extras\['v'\]: expected .*float.*, as with the first batch, found .*int"),
        (
            {"w": np.zeros(4)},
            r"extras: expected a dict with keys \['v'\], as with the first batch, found a dict with keys \['w'\]",
        ),
        ({"v": None}, r"extras: expected an array, as with the first batch, found None"),
        ({"v": {"x": np.zeros(4)}}, r"extras: expected an array, as with the first batch, found a dict"),
        (None, r"extras: expected a dict with keys \['v'\], as with the first batch, found a dict with keys \[\]"),
        (np.zeros(4), r"extras: expected a dict of arrays, found array"),
    ],
)
@pytest.mark.parametrize("kind", ["Transitions", "Unrolls"])
def test_extras_that_do_not_fit_are_refused_by_name_and_leave_no_trace(adapt: Adapt, kind: str, extras: Any, text: str) -> None:
    with SlotLoader(Clock, 4, **INLINE) as loader, adapt(loader, buckets=(4,)) as batches:
        made: Any = Transitions(batches, 3, 1.0) if kind == "Transitions" else Unrolls(batches, 5, 4)
        complete = 0
        for t in range(31):
            batch = batches.recv()
            if t in (1, 2, 17):
                with pytest.raises((ValueError, TypeError), match=text):
                    made.add(batch, zeros(batch), extras)
            found = made.add(batch, zeros(batch), {"v": np.full(4, float(t), np.float32)})
            if kind == "Transitions":
                complete += require_right(found, 3)
                assert host(found.extras["v"])[: found.size].tolist() == host(found.obs)[: found.size, 0].tolist()
            for unroll in found if kind == "Unrolls" else ():
                complete += int(host(unroll.valid).sum())
                assert (host(unroll.obs)[..., 0] == host(unroll.extras["v"])).all()
            batch.send(zeros(batch))
        assert complete == 4 * (28 if kind == "Transitions" else 30)


def test_trees_are_matched_by_their_keys_and_actions_have_the_dtype_of_their_space(adapt: Adapt) -> None:
    class Steered(Clock):
        action_space = Box(-1, 1, (2,), np.float32)

    with SlotLoader(Steered, 2, **INLINE) as loader, adapt(loader, buckets=(2,)) as batches:
        transitions = Transitions(batches)
        for t in range(5):
            batch = batches.recv()
            extras = {"one": np.full(2, 1.0, np.float32), "two": np.full(2, 2.0, np.float32)}
            action = np.zeros((2, 2), int) if t == 0 else np.full((2, 2), 0.5)
            found = transitions.add(batch, action, extras if t % 2 else dict(reversed(extras.items())))
            if t:
                assert host(found.extras["one"])[:2].tolist() == [1, 1]
                assert host(found.extras["two"])[:2].tolist() == [2, 2]
                assert host(found.action)[:2].tolist() == [[0, 0] if t == 1 else [0.5, 0.5]] * 2
                assert str(found.action.dtype).removeprefix("torch.") == "float32"
            batch.send(action.astype(np.float32))


def test_a_batch_of_another_loader_and_an_add_after_send_are_refused(adapt: Adapt) -> None:
    with SlotLoader(Clock, 1, **INLINE) as one, SlotLoader(Clock, 1, **INLINE) as other:
        transitions = Transitions(one)
        batch = other.recv()
        with pytest.raises(TypeError, match="expected a batch of the loader that this was made for, found Batch"):
            transitions.add(batch, zeros(batch))
        with adapt(one) as batches:
            transitions = Transitions(batches)
            first = batches.recv()
            transitions.add(first, zeros(first))
            first.send(zeros(first))
            batches.drain()
            second = batches.recv()
            second.send(zeros(second))
            batches.drain()
            with pytest.raises(LeaseExpired, match=r"add: the batch has been answered already; call add before batch.send"):
                transitions.add(second, zeros(second))
            third = batches.recv()
            assert transitions.add(third, zeros(third)).size == 0  # the second is missing


class Mixed(Clock):
    """Keys that cannot be sorted, a text, and unsigned numbers, which torch can do little with."""

    observation_space = Dict(
        {"t": Box(0, 99, (), np.float32), 1: Box(0, 2**16 - 1, (2,), np.uint16), "text": Text(9, min_length=0)}
        | {"deep": Dict({"u": Box(0, 2**32 - 1, (), np.uint32)})}
    )

    def _see(self) -> Any:
        return {"t": np.float32(self.t), 1: np.full(2, self.t + 60_000, np.uint16), "text": "x" * (self.t % 9)} | {
            "deep": {"u": np.uint32(self.t + 4_000_000_000)}
        }


def test_texts_unsigned_numbers_and_keys_that_cannot_be_sorted_go_through_every_assembler(adapt: Adapt) -> None:
    def act(params: Any, inputs: Any, state: Any, key: Any) -> Any:
        return Acted(inputs.env_indices * 0, extras={"t": inputs.obs["t"]})

    def check(obs: Any, t: Any) -> None:
        assert host(obs["t"]).tolist() == t
        assert host(obs[1])[..., 0].astype(int).tolist() == (np.array(t, int) + 60_000).tolist()
        assert host(obs["deep"]["u"]).astype(np.int64).tolist() == (np.array(t, np.int64) + 4_000_000_000).tolist()
        assert host(obs["text"].lengths).tolist() == (np.array(t, int) % 9).tolist()

    with SlotLoader(Mixed, 2, **INLINE) as loader, adapt(loader, buckets=(2,), frame_stack={"t": 1}) as batches:
        pass
    with SlotLoader(Mixed, 2, **INLINE) as loader, adapt(loader, buckets=(2,)) as batches:
        rollouts = batches.rollout(act, length=3)
        for n in range(3):
            check(next(rollouts).obs, [[3 * n + t] * 2 for t in range(4)])
        rollouts.close()
        transitions = Transitions(batches, 2)
        for t in range(9, 15):
            batch = batches.recv()
            found = transitions.add(batch, zeros(batch))
            if t > 10:
                text = found.obs["text"]
                first = {name: found.obs[name][:2] for name in ("t", 1)} | {"deep": {"u": found.obs["deep"]["u"][:2]}}
                check(first | {"text": type(text)(text.data[:2], text.lengths[:2])}, [t - 2.0] * 2)
            batch.send(zeros(batch))
        unrolls, pieces = Unrolls(batches, 2, 3), []
        while len(pieces) < 4:
            batch = batches.recv()
            pieces += unrolls.add(batch, zeros(batch), {"a": np.zeros(2, np.float32)})
            batch.send(zeros(batch))
        assert [host(piece.obs["t"]).shape for piece in pieces] == [(3, 3)] * 4


@pytest.mark.parametrize("point", ["write", "_advance", "_read"])
@pytest.mark.parametrize("n_step", [1, 2, 3])
def test_what_an_interrupt_of_add_leaves_half_done_is_left_out(
    point: str, n_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    armed = False

    def interrupted(function: Any, *arguments: Any) -> Any:
        result = function(*arguments)
        if armed:
            raise KeyboardInterrupt
        return result

    owner = History if point == "write" else Transitions
    original = getattr(owner, point)
    monkeypatch.setattr(owner, point, lambda *arguments: interrupted(original, *arguments))
    rng = np.random.default_rng(0)
    with SlotLoader(Clock, 3, **INLINE) as loader:
        transitions = Transitions(loader, n_step, 1.0)
        size = strikes = 0
        while size < 600:
            batch = loader.recv(min_get=1, max_get=int(rng.integers(1, 4)))
            armed = bool(rng.random() < 0.1)
            try:
                size += require_right(transitions.add(batch, zeros(batch)), n_step)
            except KeyboardInterrupt:
                strikes += 1
                armed = False
                if rng.random() < 0.5:
                    batch.release()
                    continue
                if rng.random() < 0.5:
                    size += require_right(transitions.add(batch, zeros(batch)), n_step)
            batch.send(zeros(batch))
        assert strikes > 10 or (point == "_advance" and n_step == 1)


def test_unrolls_after_an_interrupt_of_add_begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    armed, original = False, History.write

    def write(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        if armed:
            raise KeyboardInterrupt

    monkeypatch.setattr(History, "write", write)
    rng = np.random.default_rng(0)
    with SlotLoader(Clock, 3, **INLINE) as loader:
        unrolls = Unrolls(loader, 4, 3)
        valid = 0
        while valid < 400:
            batch = loader.recv(min_get=1, max_get=int(rng.integers(1, 4)))
            armed = bool(rng.random() < 0.1)
            try:
                for unroll in unrolls.add(batch, zeros(batch)):
                    obs = unroll.obs[..., 0]
                    assert (unroll.valid <= (obs[1:] == obs[:-1] + 1)).all()
                    valid += int(unroll.valid.sum())
            except KeyboardInterrupt:
                armed = False
            batch.send(zeros(batch))


def test_real_interrupts_leave_only_true_transitions() -> None:
    torch = pytest.importorskip("torch")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    rng = np.random.default_rng(0)
    try:
        with SlotLoader(Clock, 4, num_workers=2) as loader, to_torch(loader) as batches:
            transitions = Transitions(batches, 2, 1.0)
            size = strikes = 0
            while strikes < 100:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 0.02))
                end = time.monotonic() + 1
                try:
                    for batch in batches:
                        if time.monotonic() > end:  # C code has swallowed the interrupt, as it may
                            batch.release()
                            break
                        size += require_right(transitions.add(batch, torch.zeros(batch.size, dtype=torch.int64)), 2)
                        batch.send(torch.zeros(batch.size, dtype=torch.int64))
                except KeyboardInterrupt:
                    strikes += 1
                assert torch.is_grad_enabled()
                for held in loader.unanswered:
                    held.release()
            assert size > 500
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_rewards_without_a_limit_stay_in_their_own_transitions() -> None:
    class Infinite(Clock):
        def step(self, action: Any) -> Any:
            *record, _, end, cut, info = super().step(action)
            return *record, np.inf if self.t == 2 else 1.0, end, cut, info

    with SlotLoader(Infinite, 1, **INLINE) as loader:
        transitions = Transitions(loader, 3, 1.0)
        found = []
        for t in range(8):
            batch = loader.recv()
            transitions.add(batch, [0]) if t == 2 else None
            if t == 2:
                batch.release()
                batch = loader.recv()
            found += transitions.add(batch, [0]).reward.tolist()
            batch.send([0])
        assert found == [np.inf, np.inf, 3, 3, 3]


FORK = """
import os
from slotloader.device import completion

class Kept:
    def close(self, timeout):
        os._exit(5)

kept = Kept()
completion._alive.add(kept)
child = os.fork()
if child == 0:
    completion._end_threads()
    os._exit(0)
completion._alive.discard(kept)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_of_fork_does_not_wait_for_actions_of_its_parent(tmp_path: Path) -> None:
    assert run_script(tmp_path, FORK).out == "0\n"


def test_versions_seeds_and_partners_are_checked_at_once(adapt: Adapt) -> None:
    with SlotLoader(Clock, 2, **INLINE) as loader, adapt(loader, buckets=(2,)) as batches:
        params = {"x": adapt.array(np.zeros(1, np.float32))}
        policy = batches.policy(lambda params, obs: (obs[:, 0] > params["x"]) * 1, params=params)
        for wrong in ("a", 1.5, -1):
            with pytest.raises(ValueError, match="version: expected an integer of at least 0 or None"):
                policy.update(params, version=wrong)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="seed: expected a non-negative integer below"):
                batches.policy(lambda obs: obs, seed=wrong)
        assert policy.version == policy.newest_version == 0
        for partner in (None, Transitions(batches), Unrolls(loader, 3)):
            if adapt.name == "numpy" and isinstance(partner, Unrolls):
                continue
            with pytest.raises(TypeError, match=r"unrolls: expected Unrolls\(batches, ...\) of this adapter, found"):
                batches.background(policy, unrolls=partner)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="seed: expected a non-negative integer"):
            adapt(loader, seed="a")
        with pytest.raises(ValueError, match="fields: expected some of"):
            adapt(loader, fields=5)
        with pytest.raises(ValueError, match="dtype: expected a float dtype"):
            adapt(loader, dtype="uint8")
        with pytest.raises(TypeError, match=r"policy: expected Acted without a state, since none was given, found one"):
            batches.run(lambda p, inputs, state, key: Acted(inputs.env_indices * 0, inputs.obs), env_steps=4)
        batch = batches.recv()
        for hold in (np.array([0, 1]), [True], np.ones((2, 1), bool)):
            with pytest.raises(ValueError, match=r"hold: expected bool \(2,\), one per record, found"):
                batch.send(zeros(batch), hold=hold)  # type: ignore[arg-type]
        batch.send(zeros(batch), hold=[False, True])  # type: ignore[arg-type]
        batch.release()
        batches.recv(1).release()
        loader.close()
        with pytest.raises(LoaderClosed, match="closed after 0 of 100 env steps"):
            batches.run(policy, env_steps=100)


def test_a_state_of_another_shape_or_kind_is_refused(adapt: Adapt) -> None:
    def act(new: Any) -> Any:
        return lambda params, inputs, state, key: Acted(inputs.env_indices * 0, new(state))

    like = r"expected a new state like the one given, "
    cases: dict[str, tuple[Any, Any]] = {
        like + r"float32 \(3, 2\), found float32 \(1, 2\)": (lambda s: s[:1], np.float32),
        like + r"float32 \(3, 2\), found float32 \(3, 1\)": (lambda s: s[:, :1], np.float32),
        like + r"int(32|64) \(3, 2\), found float": (lambda s: s + 0.5, np.int64),
    }
    with SlotLoader(Clock, 3, **INLINE) as loader, adapt(loader, buckets=(3,)) as batches:
        for text, (new, dtype) in cases.items():
            with pytest.raises(ValueError, match=text):
                batches.run(batches.policy(act(new), state=np.zeros(2, dtype)), env_steps=4)
        assert not loader.unanswered
        batches.run(batches.policy(act(lambda s: s + 1), state=np.zeros(2)), env_steps=9)
