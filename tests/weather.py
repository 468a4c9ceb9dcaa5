"""What happens to the messages of a bad network; a relay that starts in a moment imports nothing else."""

from __future__ import annotations

import random


class Weather:
    """What happens to messages, seeded: some are dropped, doubled, or held back so that later ones overtake them."""

    def __init__(
        self, seed: int | str, drop: float = 0.0, double: float = 0.0, delay: float = 0.0, most_s: float = 0.01
    ) -> None:
        self.random = random.Random(seed)
        self.drop, self.double, self.delay, self.most_s = drop, double, delay, most_s
        self.counts = dict.fromkeys(("dropped", "doubled", "delayed"), 0)

    def copies(self) -> list[float]:
        """Seconds after which copies of a message go on: none of them if it is lost."""
        draw = self.random.random
        if draw() < self.drop:
            self.counts["dropped"] += 1
            return []
        number = 1 + (draw() < self.double)
        self.counts["doubled"] += number - 1
        late = [draw() * self.most_s if draw() < self.delay else 0.0 for _ in range(number)]
        self.counts["delayed"] += sum(x > 0 for x in late)
        return late
