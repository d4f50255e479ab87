"""A multi-turn environment: guess a secret number from hints of higher and lower."""

from __future__ import annotations

import random
import re
from typing import Any


class GuessNumber:
    """The reward is 1 for a hit with the first guess, and less with each one more; 0 without a hit.

    In a fleet file beside which this file lies in `environments/`:

        environment:
          kind: custom
          path: environments
          entry: guess_number:GuessNumber
          arguments: {highest: 20, guesses: 4}
    """

    def __init__(self, highest: int = 20, guesses: int = 4) -> None:
        self.highest, self.guesses = highest, guesses

    def example(self, index: int, split: str, seed: int) -> dict[str, Any]:
        """The secret, and a first hint that makes questions differ."""
        rng = random.Random(f"{split} {seed} {index}")
        low = rng.randint(1, 10 * self.highest)
        secret = rng.randint(low, low + self.highest)
        question = f"I think of a number from {low} to {low + self.highest}. Reply with your guess, a number."
        return {"question": question, "answer": str(secret)}

    def step(self, example: dict[str, Any], messages: list[dict[str, str]], completion: str) -> dict[str, Any]:
        """A hint, or the end. The guesses so far are the assistant's messages: the class keeps no state."""
        turn = 1 + sum(message["role"] == "assistant" for message in messages)
        numbers = re.findall(r"\d+", completion)
        guess = numbers[-1] if numbers else None
        if guess is not None and int(guess) == int(example["answer"]):
            return {"reward": 1.0 - (turn - 1) / self.guesses, "parts": {"turns": turn}, "extracted": guess}
        if turn == self.guesses:
            return {"reward": 0.0, "parts": {"turns": turn}, "extracted": guess}
        return {"done": False, "messages": [{"role": "user", "content": self._hint(example, guess)}]}

    def _hint(self, example: dict[str, Any], guess: str | None) -> str:
        if guess is None:
            return "Reply with a number."
        return f"It is {'higher' if int(guess) < int(example['answer']) else 'lower'} than {guess}. Guess again."
