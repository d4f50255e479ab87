"""Where an adapter's matrices lie in its vector."""

import pytest
from engine import random_adapter

from marlaas.specs import TARGETS


@pytest.mark.parametrize("targets", [TARGETS, ("k_proj",), ("q_proj", "v_proj", "down_proj")])
def test_offsets_are_those_of_the_matrices_in_every_layer(tiny, targets):
    layout, vector = random_adapter(tiny, 3, 0, targets)
    for site in tiny.transformer.sites:
        a_offsets, b_offsets = layout.offsets(site)[:, site.layer].tolist()
        expected_a, expected_b = [-1] * len(site.parts), [-1] * len(site.parts)
        if site in layout:
            a, b = layout.matrices(vector, site)
            targeted = [i for i, part in enumerate(site.parts) if part.module in targets]
            for order, part in enumerate(targeted):
                expected_a[part] = a[3 * order :].storage_offset()
                expected_b[part] = b[order].storage_offset()
        assert (a_offsets, b_offsets) == (expected_a, expected_b)
