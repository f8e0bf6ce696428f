"""Eight CartPoles, one policy: run it as it is, `python examples/quickstart.py`. No main guard is needed."""

import numpy as np

from slotloader import SlotLoader

with SlotLoader("CartPole-v1", num_envs=8, seed=0) as loader:
    for number, batch in enumerate(loader.steps(20_000)):
        angle, angular_velocity = batch.obs[:, 2], batch.obs[:, 3]
        batch.send((angle + angular_velocity > 0).astype(np.int64))
        if number == 0:
            print(f"first batch: slots {batch.env_indices}, observations {batch.obs.shape}", flush=True)
        for episode in batch.episodes[:1]:
            if episode.index % 10 == 0:
                print(f"slot {episode.slot}: episode {episode.index}, return {episode.episode_return:.0f}")
    print(loader.stats())
