"""What became of the drafts: the figures by which a drafter is judged.

Only tokens that were emitted count. What a run held behind a stop or a limit counts nowhere, neither as a token nor as
an accepted draft. Worked example, D = 4: prefill gives one token, a round accepts 3 drafts and emits them and a bonus
token, the next accepts 3 and ends at a stop behind the second. Completion 1 + 4 + 2 tokens, 2 rounds, 3 + 2 drafts:

    accept length 7 / 2; without the bonus token 5 / 2; accept rate 5 / (2 * 3)
    drafts 1, 2, 3: in 1, 1, 1/2 of the rounds; of those with the draft before, in 1, 1, 1/2
"""

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Counts over the rounds of one request, or of several.

    Attributes:
      num_draft_tokens: D.
      completion_tokens: tokens emitted, the first one, which prefill gives, included.
      verify_count: rounds; a round of several requests counts once for each of them that takes part.
      histogram: rounds that emitted 0, 1, .. D - 1 drafts.
      trimmed_tokens: tokens that rounds accepted and a stop or a limit cut off.
    """

    num_draft_tokens: int
    completion_tokens: int
    verify_count: int
    histogram: tuple[int, ...]
    trimmed_tokens: int

    @classmethod
    def of(cls, requests: Sequence[Any], num_draft_tokens: int) -> "Acceptance":
        """Counts over `RequestResult`s."""
        histogram, trimmed = [0] * num_draft_tokens, 0
        for request in requests:
            for accepted, emitted in zip(request.accepted_drafts, request.accept_lengths, strict=True):
                histogram[min(accepted, emitted)] += 1
                trimmed += accepted + 1 - emitted
        return cls(
            num_draft_tokens=num_draft_tokens,
            completion_tokens=sum(len(request.token_ids) for request in requests),
            verify_count=sum(request.verify_count for request in requests),
            histogram=tuple(histogram),
            trimmed_tokens=trimmed,
        )

    @property
    def accepted_drafts(self) -> int:
        """Drafts that were emitted."""
        return sum(drafts * rounds for drafts, rounds in enumerate(self.histogram))

    @property
    def accept_length(self) -> float | None:
        """Completion tokens / verify count; None without a round. The first token counts, so this is a little more than
        the mean of what rounds emit."""
        return _share(self.completion_tokens, self.verify_count)

    @property
    def accept_length_without_bonus(self) -> float | None:
        """Emitted drafts / verify count: without the token of the target's own that ends a run, and without the first
        one; None without a round."""
        return _share(self.accepted_drafts, self.verify_count)

    @property
    def accept_rate(self) -> float | None:
        """Emitted drafts / D - 1 for each round, also where fewer were proposed; None without a round or a draft."""
        return _share(self.accepted_drafts, self.verify_count * (self.num_draft_tokens - 1))

    @property
    def per_position(self) -> list[float]:
        """For each draft 1 .. D - 1, the share of rounds that emitted it; 0 without a round."""
        return [_share(self._reached(j), self.verify_count) or 0.0 for j in range(1, self.num_draft_tokens)]

    @property
    def per_position_conditional(self) -> list[float | None]:
        """The same, of the rounds that emitted the draft before; None where there are none."""
        return [_share(self._reached(j), self._reached(j - 1)) for j in range(1, self.num_draft_tokens)]

    def _reached(self, drafts: int) -> int:
        """Rounds that emitted at least so many drafts."""
        return sum(self.histogram[drafts:])

    def to_json(self) -> dict[str, Any]:
        """All figures by name."""
        return {
            "accept_length": self.accept_length,
            "accept_length_without_bonus": self.accept_length_without_bonus,
            "accept_rate": self.accept_rate,
            "acceptance_per_position": self.per_position,
            "acceptance_per_position_conditional": self.per_position_conditional,
            "accepted_drafts_histogram": list(self.histogram),
            "trimmed_tokens": self.trimmed_tokens,
        }


def distinct_4gram_ratio(completions: Sequence[Sequence[int]]) -> float | None:
    """Distinct runs of four ids over all runs of four, counted within each completion; None if none is that long.

    A model that repeats itself is easy to draft for, so an accept length means little without this figure.

    Example:
      >>> distinct_4gram_ratio([[1, 2, 1, 2, 1, 2]])  # 1212, 2121, 1212
      0.6666666666666666
    """
    runs = [list(zip(ids, ids[1:], ids[2:], ids[3:], strict=False)) for ids in completions]
    total = sum(map(len, runs))
    return sum(len(set(run)) for run in runs) / total if total else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
