"""A finished run as figures: a table for people, a dictionary for JSON."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxspec.cli.prompts import Prompt
from jaxspec.generation import Generation
from jaxspec.generation.accounting import distinct_4gram_ratio

COMPARED = ("greedy", "match")  # rules whose ids are those of plain decoding; others only follow the same law

_BAR = 40  # characters of the longest bar of the histogram


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run gave.

    Attributes:
      prompts: the requests, encoded.
      speculative: their results, in the same order.
      setup_seconds: wall time of compilation, for both runs together.
      plain: results of plain decoding of the same prompts; None if it did not run.
      decode: text of ids; None if the model has no tokenizer.
      settings: for each request its temperature, top_k, top_p and seed; None if nobody asks for them.
    """

    prompts: Sequence[Prompt]
    speculative: Generation
    setup_seconds: float
    plain: Generation | None
    decode: Callable[[Sequence[int]], str] | None
    settings: Sequence[dict[str, float]] | None = None

    def matches(self) -> list[bool | None] | None:
        """For each request whether its ids equal those of plain decoding, None where its rule does not promise that;
        None if that did not run."""
        if self.plain is None:
            return None
        pairs = zip(self.speculative.requests, self.plain.token_ids, strict=True)
        return [request.token_ids == ids if request.rule in COMPARED else None for request, ids in pairs]

    def exact(self) -> bool | None:
        """Whether all requests that are compared equal plain decoding; None if none is."""
        compared = [match for match in self.matches() or () if match is not None]
        return all(compared) if compared else None

    def first_mismatch(self) -> dict[str, Any] | None:
        """The first request whose ids differ, where they do first, and both ids there (None past the end)."""
        if self.exact() in (None, True):
            return None
        index = self.matches().index(False)
        ours, plain = self.speculative.token_ids[index], self.plain.token_ids[index]
        place = next(
            (i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), min(len(ours), len(plain))
        )
        return {
            "id": self.prompts[index].id,
            "position": place,
            "speculative": ours[place] if place < len(ours) else None,
            "plain": plain[place] if place < len(plain) else None,
        }


def to_json(outcome: Outcome, environment: dict[str, Any]) -> dict[str, Any]:
    """`{"requests": [...], "aggregate": {...}, "environment": {...}}`."""
    matches = outcome.matches()
    requests = []
    for index, (prompt, result) in enumerate(zip(outcome.prompts, outcome.speculative.requests, strict=True)):
        text = prompt.text
        if text is None and outcome.decode is not None:
            text = outcome.decode(prompt.token_ids)
        entry = {
            "id": prompt.id,
            "prompt": text,
            "prompt_tokens": len(prompt.token_ids),
            "text": None if outcome.decode is None else outcome.decode(result.token_ids),
            **dataclasses.asdict(result),
            **result.acceptance(outcome.speculative.num_draft_tokens).to_json(),
            "distinct_4gram_ratio": distinct_4gram_ratio([result.token_ids]),
        }
        if outcome.settings is not None:
            entry["sampling"] = outcome.settings[index]
        if matches is not None:
            entry["exact_match"] = matches[index]
        requests.append(entry)
    aggregate = {
        **outcome.speculative.to_json()["aggregate"],
        "distinct_4gram_ratio": distinct_4gram_ratio(outcome.speculative.token_ids),
        "setup_seconds": outcome.setup_seconds,
    }
    if matches is not None:
        aggregate |= {
            "exact_match": outcome.exact(),
            "first_mismatch": outcome.first_mismatch(),
            "plain_tokens_per_second": outcome.plain.tokens_per_second,
        }
    return {"requests": requests, "aggregate": aggregate, "environment": environment}


def to_text(outcome: Outcome) -> str:
    """The table."""
    run, matches = outcome.speculative, outcome.matches()
    sampled = any(result.rule != "greedy" for result in run.requests)  # a table of greedy requests has no such column
    rule = ["rule"] if sampled else []
    rows = [
        ("request", "prompt", "tokens", "verify count", "accept length", "distinct 4-grams", "finish", *rule, "= plain")
    ]
    for index, (prompt, result) in enumerate(zip(outcome.prompts, run.requests, strict=True)):
        rows.append(
            (
                prompt.id,
                str(len(prompt.token_ids)),
                str(len(result.token_ids)),
                str(result.verify_count),
                _number(result.acceptance(run.num_draft_tokens).accept_length),
                _number(distinct_4gram_ratio([result.token_ids])),
                result.finish_reason if result.stop_string is None else f"stop {result.stop_string!r}",
                *([result.rule] if sampled else []),
                _yes(None if matches is None else matches[index]),
            )
        )
    rows.append(
        (
            "all",
            str(sum(len(p.token_ids) for p in outcome.prompts)),
            str(sum(map(len, run.token_ids))),
            str(sum(r.verify_count for r in run.requests)),
            _number(run.accept_length),
            _number(distinct_4gram_ratio(run.token_ids)),
            "",
            *([""] if sampled else []),
            _yes(outcome.exact()),
        )
    )
    lines = [*_align(rows), ""]
    acceptance = run.acceptance
    if acceptance.per_position:
        lines += ["draft position     " + "".join(f"{i:6d}" for i in range(1, run.num_draft_tokens))]
        lines += ["accepted in rounds " + "".join(f"{share:6.0%}" for share in acceptance.per_position)]
        given = ["-" if share is None else f"{share:.0%}" for share in acceptance.per_position_conditional]
        lines += ["if the last one was" + "".join(f"{share:>6}" for share in given)]
        if acceptance.accept_rate is not None:
            lines += [
                f"accept rate        {acceptance.accept_rate:.1%} of all drafts; accept length without bonus tokens "
                f"{acceptance.accept_length_without_bonus:.2f}"
            ]
        lines += [""]
    lines += ["tokens a round     rounds"]
    highest = max(run.accept_length_histogram, default=0) or 1
    for length, count in enumerate(run.accept_length_histogram, start=1):
        lines.append(f"{length:14d}     {count:6d}  {'#' * round(_BAR * count / highest)}".rstrip())
    lines += [
        "",
        f"tokens/s           {run.tokens_per_second:.1f} without compilation; that took {outcome.setup_seconds:.1f} s",
    ]
    if outcome.plain is not None:
        lines += [f"  plain decoding   {outcome.plain.tokens_per_second:.1f}"]
        lines += [f"ids equal plain    {_verdict(outcome)}"]
    else:
        lines += ["ids equal plain    not checked"]
    return "\n".join(lines) + "\n"


def mismatch_line(outcome: Outcome) -> str | None:
    """Where the ids first differ from plain decoding; None if they do not."""
    first = outcome.first_mismatch()
    if first is None:
        return None
    ours, plain = ("the end" if first[name] is None else first[name] for name in ("speculative", "plain"))
    return (
        f"request {first['id']} differs from plain decoding at completion token {first['position']}: "
        f"speculative {ours}, plain {plain}"
    )


def _verdict(outcome: Outcome) -> str:
    matches = [match for match in outcome.matches() if match is not None]
    if not matches:
        return "not compared"
    if all(matches):
        return f"yes, all {len(matches)}" if len(matches) > 1 else "yes"
    return f"NO, {matches.count(False)} of {len(matches)} differ"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    # Names and words to the left, numbers to the right.
    return [
        "  ".join(
            cell.ljust(width) if i == 0 or i >= 6 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "NO"
