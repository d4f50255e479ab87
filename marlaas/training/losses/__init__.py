"""Policy-gradient losses, one file an algorithm; the file's name is the algorithm's.

A loss module has one function, `token_loss(inputs: TokenInputs, spec: AlgorithmSpec) -> TokenLoss`, and nothing
in the trainer knows which one runs.
"""

import pkgutil


def algorithm_names() -> list[str]:
    """The algorithms there are, found without importing them."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base")
