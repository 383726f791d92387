"""What a generation returns: plain numbers on the host."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxspec.generation.accounting import Acceptance
from jaxspec.steps import SpecState, requests_of
from jaxspec.steps.settings import lane_settings
from jaxspec.steps.state import FINISH_NAMES, STOP_STRING
from jaxspec.verification import StopStrings


@dataclasses.dataclass(frozen=True)
class RequestResult:
    """One request.

    Attributes:
      token_ids: the completion, the stop id included if there was one, or the token that completed a stop string.
      finish_reason: "stop" (a stop id), "stop_string", "length" (max_new_tokens), "context" (context_len),
        "out_of_pages", or "invalid_token": the target chose an id outside its vocabulary, and the request's first stop
        id (0 if it has none) stands in its place.
      verify_count: rounds the request took part in.
      accept_lengths: tokens each round emitted, 1 .. D. The first token comes from prefill: sum(accept_lengths) + 1 is
        the number of tokens.
      accepted_drafts: drafts each round accepted, 0 .. D - 1, before the run was cut at a stop or a limit.
      logprobs: log-probability of each token under the target; None unless `SpecConfig.logprobs` asked for them.
      rule: what decided its tokens: "greedy", or for a request that samples "rejection", "block" or "match".
      stop_string: the text that ended it; None for any other end.
    """

    token_ids: list[int]
    finish_reason: str
    verify_count: int
    accept_lengths: list[int]
    accepted_drafts: list[int]
    logprobs: list[float] | None = None
    rule: str = "greedy"
    stop_string: str | None = None

    def acceptance(self, num_draft_tokens: int) -> Acceptance:
        """What became of its drafts; num_draft_tokens is D."""
        return Acceptance.of([self], num_draft_tokens)


@dataclasses.dataclass(frozen=True)
class Generation:
    """All requests of a call, in the order of the prompts.

    Attributes:
      requests: one result a prompt.
      num_draft_tokens: D.
      seconds: wall time from the first dispatch to the last result, compilation excluded.
      dispatches: compiled calls it took.
    """

    requests: list[RequestResult]
    num_draft_tokens: int
    seconds: float
    dispatches: int

    @property
    def token_ids(self) -> list[list[int]]:
        """The completions."""
        return [request.token_ids for request in self.requests]

    @property
    def acceptance(self) -> Acceptance:
        """What became of the drafts of all requests."""
        return Acceptance.of(self.requests, self.num_draft_tokens)

    @property
    def accept_length(self) -> float | None:
        """Completion tokens / verify count over all requests; None if no round was needed."""
        return self.acceptance.accept_length

    @property
    def acceptance_per_position(self) -> list[float]:
        """For each draft position 1 .. D - 1, the share of rounds that emitted it."""
        return self.acceptance.per_position

    @property
    def accept_length_histogram(self) -> list[int]:
        """How many rounds emitted 1, 2, .. D tokens."""
        emitted = np.concatenate([request.accept_lengths for request in self.requests] or [[]]).astype(np.int64)
        return np.bincount(emitted, minlength=self.num_draft_tokens + 1)[1:].tolist()

    @property
    def tokens_per_second(self) -> float:
        """Completion tokens of all requests / seconds."""
        return sum(len(request.token_ids) for request in self.requests) / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Any]:
        """`{"requests": [...], "aggregate": {...}}`, ready for `json.dump`."""
        return {
            "requests": [
                dataclasses.asdict(request) | request.acceptance(self.num_draft_tokens).to_json()
                for request in self.requests
            ],
            "aggregate": {
                **self.acceptance.to_json(),
                "accept_length_histogram": self.accept_length_histogram,
                "tokens_per_second": self.tokens_per_second,
                "completion_tokens": sum(len(request.token_ids) for request in self.requests),
                "verify_count": sum(request.verify_count for request in self.requests),
                "num_draft_tokens": self.num_draft_tokens,
                "seconds": self.seconds,
                "dispatches": self.dispatches,
            },
        }


def read_requests(
    state: SpecState,
    prompts: Sequence[Sequence[int]],
    verifier: str | None = None,
    stop_strings: StopStrings | None = None,
) -> list[RequestResult]:
    """Reads the results of a finished generation, in one transfer.

    Args:
      state: after its last round.
      prompts: those of `init_state`.
      verifier: the configuration's `sampling`.
      stop_strings: those of `init_state`.
    """
    matched = None if state.stops is None else state.stops.state
    requests, tokens, log, logprobs, sampling, matched = jax.device_get(
        (requests_of(state), state.tokens, state.round_log, state.logprobs, lane_settings(state), matched)
    )
    greedy = [True] * len(prompts) if sampling is None else ~(sampling.temperature > 0)
    results = []
    for row, prompt in enumerate(prompts, start=1):
        rounds = int(requests.verify_count[row])
        emitted = slice(len(prompt), len(prompt) + int(requests.num_output[row]))
        reason = int(requests.finish_reason[row])
        results.append(
            RequestResult(
                token_ids=tokens[row, emitted].tolist(),
                finish_reason=FINISH_NAMES[reason] or "out_of_pages",
                verify_count=rounds,
                accept_lengths=log[row, :rounds, 1].tolist(),
                accepted_drafts=log[row, :rounds, 0].tolist(),
                logprobs=None if logprobs is None else logprobs[row, emitted].tolist(),
                rule="greedy" if greedy[row - 1] else verifier,
                stop_string=stop_strings.found(int(matched[row])) if stop_strings and reason == STOP_STRING else None,
            )
        )
    return results
