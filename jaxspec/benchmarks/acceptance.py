"""How many drafts a target accepts, drafter by drafter, at an equal number of drafts a round.

    held-out text    real rounds along a text that is given: each drafts and is verified as ever, and what it accepts is
                     counted; then its rows are made those of the text, and all of them are committed
    greedy           completions of prompts: completion tokens / verify count, beside what tells repetitive text

The first says how good the drafts are where a text goes on as people write. A greedy completion of a small model soon
repeats itself, which is easy to draft for: its accept length means little without the share of distinct runs of four
tokens, and none of it carries over to another pair of models.

A round along the text starts every D tokens. Position k counts as accepted if the drafts 1 .. k all are what the target
itself says, after the text up to the round's anchor and the drafts before; what the text says there plays no part. So
1 + the mean number accepted is what a target step would bring at that place of the text.

The drafter sees what it sees in any round: the text's tokens, the target's hidden rows of them, rows of its own made of
the text. Of one row it sees something else: behind the last token of each prompt a drafter that feeds on hidden rows is
told the token that the target chose, since prefill asks the target.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxspec import (
    Drafter,
    Generation,
    InputError,
    Params,
    SpecConfig,
    generate,
    init_state,
    load_model,
    make_spec_step,
)
from jaxspec.benchmarks.base import Report, Task, quiet, setting
from jaxspec.drafting import Drafts, extends
from jaxspec.drafting.choose import DRAFTERS, make_drafter, page_size_for
from jaxspec.generation.accounting import distinct_4gram_ratio
from jaxspec.models import Checkpoint, embedded_path
from jaxspec.steps import SpecState, SpecStep, commit, draft, extend, prefill, prepare, requests_of, verify

SUMMARY = "Compares drafters at an equal number of drafts: what is accepted along held-out text, and greedily."

Array = jax.Array
NAMES = tuple(name for name in DRAFTERS if name != "none")
BASELINES = ("ngram", "draft_lm")
ANOTHER_PAIR = 4.4347  # greedy accept length in SGLang pull request 44973, of its own models and inputs


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is compared, and on how much text."""

    model: str = setting("target", "The target: an embedded model's name, or a Hugging Face folder.")
    drafter: str = setting("all", "Who proposes tokens; by default all that the target has.", choices=("all", *NAMES))
    draft_model: str | None = setting(None, "The draft that --drafter names, a folder or an embedded model's name.")
    num_draft_tokens: int = setting(8, "D, tokens verified per request and round, D - 1 of them drafts.", least=2)
    text: str | None = setting(
        None, 'JSONL file of held-out texts, {"prompt": "text"} a line; by default the prompts of the package.'
    )
    prompt_len: int = setting(64, "Tokens of a stretch of text before its first round.", least=1)
    rounds: int = setting(56, "Rounds along each stretch of text.", least=1)
    batch_size: int = setting(16, "Stretches of text decoded together.", least=1)
    max_new_tokens: int = setting(128, "Tokens of each greedy completion of the package's prompts.", least=2)
    dtype: str = setting("float32", "What is computed in.", choices=("float32", "bfloat16"))


@dataclasses.dataclass(frozen=True)
class Along:
    """What was accepted along a text.

    Attributes:
      num_draft_tokens: D.
      rounds: how many rounds were counted.
      proposed: drafts of all rounds.
      histogram: rounds that accepted 0, 1, .. D - 1 drafts.
    """

    num_draft_tokens: int
    rounds: int
    proposed: int
    histogram: tuple[int, ...]

    @property
    def acceptance(self) -> list[float]:
        """For each draft position 1 .. D - 1, the share of rounds that accepted the drafts up to it."""
        return [sum(self.histogram[k:]) / self.rounds for k in range(1, self.num_draft_tokens)]

    @property
    def tokens_per_step(self) -> float:
        """Accepted drafts and the target's own token, a round.

        Example:
          >>> Along(num_draft_tokens=3, rounds=4, proposed=8, histogram=(2, 1, 1)).tokens_per_step
          1.75
        """
        return 1 + sum(self.acceptance)

    def to_json(self) -> dict[str, Any]:
        """All figures by name, shares to six places."""
        return {
            "rounds": self.rounds,
            "proposed": self.proposed,
            "acceptance": [round(share, 6) for share in self.acceptance],
            "tokens_per_step": round(self.tokens_per_step, 6),
        }


def run(settings: Settings, task: Task = quiet) -> Report:
    """Measures every drafter.

    Raises:
      InputError: models, drafters, shapes or texts that cannot be.
    """
    with task("models", "loading"):
        target = load_model(settings.model, settings.dtype)
        drafters, missing = choose(settings, target)
        texts = read_texts(target, settings.text)
        prompts = read_texts(target, None)
    along, greedy = {}, {}
    for name, (drafter, draft_params) in drafters.items():
        params = Params(target.params, draft_params)
        with task(name, "along the text"):
            along[name] = measure(
                target,
                drafter,
                params,
                texts,
                num_draft_tokens=settings.num_draft_tokens,
                prompt_len=settings.prompt_len,
                rounds=settings.rounds,
                batch_size=settings.batch_size,
            )
        with task(name, "greedy completions"):
            greedy[name] = generate(
                target.model,
                params,
                prompts,
                drafter=drafter,
                num_draft_tokens=settings.num_draft_tokens,
                max_new_tokens=settings.max_new_tokens,
            )
    return report(along, greedy, missing)


def choose(settings: Settings, target: Checkpoint) -> tuple[dict[str, tuple[Drafter, Any]], dict[str, str]]:
    """Drafters and their weights by name, and why the target has none of the others."""
    if settings.drafter != "all":
        made = make_drafter(settings.drafter, target, draft_model=settings.draft_model, dtype=settings.dtype)
        return {settings.drafter: made}, {}
    if settings.draft_model is not None:
        raise InputError(f"draft_model={settings.draft_model}: it takes the place of one draft, so name the drafter")
    found, missing = {}, {}
    for name in NAMES:
        try:
            found[name] = make_drafter(name, target, dtype=settings.dtype)
        except InputError as error:
            missing[name] = str(error)
    return found, missing


def read_texts(target: Checkpoint, file: str | None) -> list[list[int]]:
    """Token ids of the texts of a JSONL file, or of the package's prompts; white space at an end is left out.

    Raises:
      InputError: the file cannot be read, or a line is no object with a text.
    """
    path = pathlib.Path(file) if file else embedded_path("target").parent / "prompts.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [target.encode(json.loads(line)["prompt"].rstrip()) for line in lines if line.strip()]
    except OSError as error:
        raise InputError(f"text={file}: it cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise InputError(f'text={path}: each line must be an object with a "prompt", which is a text') from None


# Along a text


def measure(
    target: Checkpoint,
    drafter: Drafter,
    params: Params,
    texts: Sequence[Sequence[int]],
    *,
    num_draft_tokens: int,
    prompt_len: int,
    rounds: int,
    batch_size: int,
    options: dict[str, Any] | None = None,
) -> Along:
    """Runs a drafter along texts.

    Args:
      target: the model that decides.
      drafter, params: who proposes, and the weights of both.
      texts: token ids, cut into stretches from their starts; what is too short for a stretch is left out.
      num_draft_tokens: D.
      prompt_len: tokens of a stretch before its first round.
      rounds: rounds of a stretch, so it has `prompt_len + rounds * num_draft_tokens + 1` tokens.
      batch_size: stretches run together.
      options: XLA options, as of `jaxspec.make_spec_step`.

    Raises:
      InputError: no text is long enough, or the shapes do not suit the models.
    """
    length = prompt_len + rounds * num_draft_tokens + 1
    stretches = [text[at : at + length] for text in texts for at in range(0, len(text) - length + 1, length)]
    if not stretches:
        raise InputError(
            f"prompt_len={prompt_len}, rounds={rounds}: a stretch of text has {length} tokens, the longest text "
            f"{max(map(len, texts), default=0)}: ask for fewer rounds"
        )
    config = SpecConfig(
        batch_size=min(batch_size, len(stretches)),
        num_draft_tokens=num_draft_tokens,
        context_len=length + num_draft_tokens,  # nothing is cut short
        max_new_tokens=length + num_draft_tokens,
        page_size=page_size_for(target),
    )
    spec = make_spec_step(target.model, drafter, config, options=options)
    run = jax.jit(along_text, static_argnums=(0, 4), compiler_options=dict(spec.options) or None)
    histogram, proposed = np.zeros(num_draft_tokens, np.int64), 0
    for start in range(0, len(stretches), config.batch_size):
        part = stretches[start : start + config.batch_size]
        state = init_state(spec.target, spec.drafter, config, [text[:prompt_len] for text in part])
        text = np.zeros((config.batch_size, length), np.int32)
        text[: len(part)] = part
        accepted, count = (np.asarray(x)[:, : len(part)] for x in run(spec, params, state, text, rounds))
        histogram += np.bincount(accepted.ravel(), minlength=num_draft_tokens)
        proposed += int(count.sum())
    return Along(num_draft_tokens, int(histogram.sum()), proposed, tuple(histogram.tolist()))


def along_text(spec: SpecStep, params: Params, state: SpecState, text: Array, rounds: int) -> tuple[Array, Array]:
    """Prefill, then rounds that commit the text whatever they accept.

    Args:
      spec: the step (static).
      params: its weights.
      state: from `init_state`, each prompt the beginning of its text.
      text: int32[B, T]; zeros for lanes without a request.
      rounds: how many (static).

    Returns:
      int32[rounds, B] twice: drafts that the target accepted, and drafts proposed; 0 for lanes without a request.
    """
    state, _ = prefill(spec, params, state)
    state = _say(state, text)
    _, counts = lax.scan(lambda state, _: _forced_round(spec, params, state, text), state, length=rounds)
    return counts


def _say(state: SpecState, text: Array) -> SpecState:
    """The state after a prefill with the text's token for an anchor, in place of the target's choice."""
    length = requests_of(state).seq_len
    token = jnp.take_along_axis(text, length[1:, None], axis=1)[:, 0]
    rows = jnp.arange(1, len(length), dtype=jnp.int32)
    return state.replace(tokens=state.tokens.at[rows, length[1:]].set(token))


def _forced_round(spec: SpecStep, params: Params, state: SpecState, text: Array):
    """A round that counts what it would accept, and commits the next D tokens of the text."""
    D = spec.config.num_draft_tokens
    state, plan = prepare(spec, state)
    state, drafts = draft(spec, params, state, plan)
    active = plan.req_rows > 0
    ahead = jnp.take_along_axis(text, plan.seq_lens[:, None] + 1 + jnp.arange(D, dtype=jnp.int32), axis=1)
    told = Drafts(tokens=ahead[:, :-1], count=jnp.where(active, D - 1, 0))

    def verified(cache, drafts):
        after, verdict = verify(spec, params, state.replace(cache=cache), plan, drafts)
        return after.cache, verdict

    # Two forwards of one program: the second writes the text's rows over those of the drafts.
    both = jax.tree.map(lambda *x: jnp.stack(x), Drafts(tokens=drafts.tokens, count=drafts.count), told)
    cache, verdicts = lax.scan(verified, state.cache, both)
    accepted, verdict = jnp.where(active, verdicts.accepted[0], 0), jax.tree.map(lambda x: x[1], verdicts)
    verdict = verdict.replace(targets=ahead, accepted=told.count)
    state = extend(spec, params, state.replace(cache=cache), plan, verdict)
    if not extends(spec.drafter):
        # A drafter with rows of its own has those of its drafts; it reads the text's as it has read the prompt's.
        rows = jnp.concatenate([plan.anchor[:, None], ahead[:, :-1]], axis=1)
        read = spec.drafter.prefill(params.draft, state.draft, rows, plan.metadata)
        state = state.replace(draft=read)
    state, _ = commit(spec, state, plan, told, verdict)
    return state, (accepted, jnp.where(active, drafts.count, 0))


# What is told


def report(along: dict[str, Along], greedy: dict[str, Generation], missing: dict[str, str]) -> Report:
    """The tables, all figures, and whose greedy ids are not those of the first drafter."""
    first = next(iter(greedy))
    failures = [
        f"greedy: the ids with {name} are not those with {first}"
        for name, result in greedy.items()
        if result.token_ids != greedy[first].token_ids
    ]
    D = along[first].num_draft_tokens
    base = max((along[name].tokens_per_step for name in BASELINES if name in along), default=None)
    positions = [str(k) for k in range(1, D)]
    text = [("along held-out text", "rounds", *positions, "tokens per target step", "over the best baseline")]
    completions = [("greedy completions", "accept length", "distinct 4-grams", "tokens", "verify count")]
    entries = {}
    for name, found in along.items():
        result, over = greedy[name], None if base is None else found.tokens_per_step / base
        distinct = distinct_4gram_ratio(result.token_ids)
        shares = [f"{share:.3f}" for share in found.acceptance]
        cells = (*shares, f"{found.tokens_per_step:.4f}", "" if over is None else f"{over:.3f}")
        text.append((name, str(found.rounds), *cells))
        tokens, rounds = sum(map(len, result.token_ids)), sum(r.verify_count for r in result.requests)
        lengths = (_number(result.accept_length), _number(distinct))
        completions.append((name, *lengths, str(tokens), str(rounds)))
        entries[name] = {
            "along": found.to_json(),
            "over_best_baseline": over,
            "greedy": {**result.acceptance.to_json(), "distinct_4gram_ratio": distinct, "completion_tokens": tokens},
        }
    completions.append(("another pair of models", str(ANOTHER_PAIR)))
    notes = [
        f"Drafts a round: {D - 1}. Column k: rounds along the text in which the drafts 1 .. k all were accepted.",
        f"Baselines: {', '.join(BASELINES)}. {ANOTHER_PAIR}: SGLang pull request 44973, other models and inputs.",
        *(f"Not there: {name}: {reason}" for name, reason in missing.items()),
    ]
    results = {"drafters": entries, "missing": missing, "another_pair": ANOTHER_PAIR}
    return Report(tables=[text, completions, [(line,) for line in notes]], results=results, failures=failures)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
