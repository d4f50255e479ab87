"""Group-relative advantages (Shao et al. 2024, GRPO; without the std by default, as Liu et al. 2025 argue)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from marlaas.training.batch import TrainingSample


@dataclass(frozen=True)
class GroupAdvantages:
    """advantages: float64, one a sample. saturated_share: of groups whose rewards are all equal: no signal.

    rewards: float64, one a conversation.
    """

    advantages: np.ndarray
    saturated_share: float
    rewards: np.ndarray


def conversation_advantages(samples: Sequence[TrainingSample], normalize_std: bool) -> GroupAdvantages:
    """Advantages of samples; a conversation that became several samples counts once in its group."""
    keys = [(s.group, i if s.conversation is None else s.conversation) for i, s in enumerate(samples)]
    first = {key: samples[i] for i, key in reversed(list(enumerate(keys)))}
    whole = list(dict.fromkeys(keys))
    found = group_advantages([group for group, _ in whole], [first[key].reward for key in whole], normalize_std)
    place = {key: i for i, key in enumerate(whole)}
    return replace(found, advantages=found.advantages[[place[key] for key in keys]])


def group_advantages(groups: Sequence[str], rewards: Sequence[float], normalize_std: bool) -> GroupAdvantages:
    """reward - mean(reward of its group), divided by the group's std + 1e-6 if asked to."""
    keys = np.array(groups)
    values = np.array(rewards, dtype=np.float64)
    advantages = np.zeros_like(values)
    unique = list(dict.fromkeys(groups))
    saturated = 0
    for key in unique:
        of_group = keys == key
        centred = values[of_group] - values[of_group].mean()
        saturated += bool(np.ptp(values[of_group]) == 0)
        advantages[of_group] = centred / (values[of_group].std() + 1e-6) if normalize_std else centred
    return GroupAdvantages(advantages, saturated / len(unique), values)
