"""What `generate_many` hands out while it runs: finished prompts, and figures."""

import dataclasses

from jaxspec.generation.results import RequestResult


@dataclasses.dataclass(frozen=True)
class Finished:
    """A prompt that is done.

    Attributes:
      index: of the prompt.
      question_id: its name.
      result: what `generate` gives for it.
      wall_time: seconds from the dispatch that let it in to the arrival of its last token. Other requests ran beside.
      resumed: whether it was read from the file of an earlier run.
    """

    index: int
    question_id: int | str
    result: RequestResult
    wall_time: float
    resumed: bool = False


@dataclasses.dataclass(frozen=True)
class ManyProgress:
    """How far a run is: what a progress bar shows, and at the end the figures of the run.

    A *slot-round* is a round of one slot. A slot is busy in a round if a request of it takes part, not while its prompt
    is read.

    Attributes:
      prompts: all of them; finished: those that are done, `resumed` of which an earlier run has done.
      running: slots with a request.
      tokens, verify_count: tokens emitted and rounds taken part in, over the requests of this run, unfinished ones
        included.
      dispatches, rounds, chunks: dispatches that were read, and their rounds and forwards of prefill.
      slots: B.
      busy_slot_rounds: slot-rounds of busy slots, those of requests that were turned out later included.
      queued_rounds, queued_busy_slot_rounds: rounds of dispatches behind which prompts were still waiting, and busy
        slot-rounds of those. The end of a run, when there is nothing to refill slots with, is left out.
      retractions: how often a request was turned out because pages ran out; retracted_tokens: what they had emitted.
      seconds: since the first dispatch, compilation excluded.
    """

    prompts: int
    finished: int
    resumed: int
    running: int
    tokens: int
    verify_count: int
    dispatches: int
    rounds: int
    chunks: int
    slots: int
    busy_slot_rounds: int
    queued_rounds: int
    queued_busy_slot_rounds: int
    retractions: int
    retracted_tokens: int
    seconds: float

    @property
    def accept_length(self) -> float | None:
        """Tokens / rounds taken part in; None before the first round."""
        return self.tokens / self.verify_count if self.verify_count else None

    @property
    def slot_utilization(self) -> float | None:
        """Busy slot-rounds / all slot-rounds of the run; None before the first round."""
        return self.busy_slot_rounds / (self.rounds * self.slots) if self.rounds else None

    @property
    def queued_slot_utilization(self) -> float | None:
        """The same, while prompts were waiting; None if none ever was."""
        return self.queued_busy_slot_rounds / (self.queued_rounds * self.slots) if self.queued_rounds else None

    @property
    def tokens_per_second(self) -> float:
        """Tokens / seconds."""
        return self.tokens / self.seconds if self.seconds else 0.0
