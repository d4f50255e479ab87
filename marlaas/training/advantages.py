"""Group-relative advantages (Shao et al. 2024, GRPO; without the std by default, as Liu et al. 2025 argue)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class GroupAdvantages:
    """advantages: float64, one a sample. saturated_share: of groups whose rewards are all equal: no signal."""

    advantages: np.ndarray
    saturated_share: float


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
    return GroupAdvantages(advantages, saturated / len(unique))
