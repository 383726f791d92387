"""`jaxspec.generate_many`: more prompts than slots, for evaluation scripts."""

import os
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np

from jaxspec.config import SpecConfig
from jaxspec.drafting import Drafter
from jaxspec.errors import InputError
from jaxspec.generation.generate import settle
from jaxspec.generation.jsonl import check_names, digest
from jaxspec.generation.progress import Finished, ManyProgress
from jaxspec.generation.results import RequestResult
from jaxspec.generation.scheduler import Output, Scheduler
from jaxspec.models.contract import Model
from jaxspec.steps import Params, init_state, make_spec_step
from jaxspec.steps.refill import RefillPlan, most_newcomers
from jaxspec.steps.settings import pack_settings
from jaxspec.steps.state import check_requests
from jaxspec.verification import StopStrings


class ManyRun:
    """A run of `generate_many`: an iterator of `Finished`, in the order in which prompts are done.

    Nothing runs before the first one is asked for, and between two of them only what was dispatched already.

    Attributes:
      progress: `ManyProgress`, up to date.
    """

    def __init__(self, scheduler: Scheduler):
        self._scheduler, self._finished = scheduler, scheduler.run()

    @property
    def progress(self) -> ManyProgress:
        return self._scheduler.progress()

    def __iter__(self) -> Iterator[Finished]:
        return self

    def __next__(self) -> Finished:
        return next(self._finished)

    def results(self) -> list[RequestResult]:
        """Runs to the end. The results that were not iterated over yet, in the order of the prompts."""
        return [done.result for done in sorted(self, key=lambda done: done.index)]

    def close(self) -> None:
        """Ends the run early and closes its file. What is not finished is lost."""
        self._finished.close()
        self._scheduler.close()

    def __enter__(self) -> "ManyRun":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def generate_many(
    target: Model,
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: Drafter | None = None,
    num_draft_tokens: int = 8,
    max_new_tokens: int | Sequence[int] | None = None,
    stop_ids: Sequence[int] = (),
    slots: int | None = None,
    memory: str | None = None,
    logprobs: bool | None = None,
    config: SpecConfig | None = None,
    rounds_per_dispatch: int = 8,
    newcomers_per_dispatch: int | None = None,
    chunks_per_dispatch: int = 8,
    temperature: float | Sequence[float] = 0.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    seed: int | Sequence[int] = 0,
    verifier: str | None = None,
    stop_strings: StopStrings | None = None,
    ids: Sequence[int | str] | None = None,
    categories: Sequence[str] | None = None,
    out: str | os.PathLike | None = None,
    model_id: str = "",
    decode: Callable[[list[int]], str] | None = None,
    progress: Callable[[ManyProgress], None] | None = None,
) -> ManyRun:
    """Completes any number of prompts in a fixed number of slots, which are kept full. Each prompt gets the tokens that
    `generate` gives it alone, whatever runs beside it.

    A slot whose request has ended takes the next prompt; of these the ones that may emit most come first. New prompts
    are read in chunks, beside the requests that run. Pages need not suffice for all slots: newcomers are held back
    while they might not, and if they run out nevertheless, the request that came last gives back its pages and is done
    again from its prompt, with the same tokens. All runs in one compiled program, and its reports are read one dispatch
    late.

    Args:
      target, params, drafter, num_draft_tokens, stop_ids, memory, logprobs, verifier, stop_strings: as in `generate`.
      prompts: token ids of each.
      max_new_tokens, temperature, top_k, top_p: one number or one a prompt, as in `generate`.
      seed: of the draws. With one number, prompt i has the seed (seed + i) modulo 2**32; or one a prompt.
      slots: B, requests that run together, 8 by default, or what `config` says. Fewer if there are fewer prompts.
      config: shapes, instead of a configuration that fits the prompts: B, pages, `prefill_chunk` and others.
      rounds_per_dispatch: K, rounds between two reports at most. A dispatch also ends when newcomers can enter.
      newcomers_per_dispatch: N, prompts that enter together and are read together; by default B / 16, at least 1. More
        of them make each read better use of the device, and let slots wait longer for each other.
      chunks_per_dispatch: chunks of prompts that are read before the others go on for a round.
      ids: a name for each prompt, by default its index. They are the records' `question_id`.
      categories: for each prompt, a word for the records.
      out: file that results are appended to as JSON Lines, one a finished prompt, with the fields of Spec-Bench; see
        `jaxspec.generation.jsonl`. Prompts that it holds already are not done again: a run that was killed is continued
        by the same call. Slots, pages, K and the order of prompts may differ then, but no setting that tokens or
        accept lengths depend on. Weights are not looked at: name them by `model_id`.
      model_id: a name for model and drafter in the records.
      decode: token ids to text, for the records.
      progress: called with a `ManyProgress` after each report. What it raises, KeyboardInterrupt say, ends the run and
        leaves a valid file.

    Returns:
      A `ManyRun`, an iterator of `Finished`, first those that `out` held. Its `progress` has the figures of the run:
      accept length, slot utilisation, retractions.

    Raises:
      InputError: bad prompts, limits or settings, a prompt that the pages do not suffice for even alone, or a file of
        other settings. Nothing has run then.

    Example:
      >>> import jaxspec
      >>> target = jaxspec.load_model("target")
      >>> prompts = [target.encode(text) for text in ("import os\\nimport", "def main(", "for i in range(")]
      >>> model, params, drafter = target.model, jaxspec.Params(target.params), jaxspec.NgramDrafter()
      >>> run = jaxspec.generate_many(model, params, prompts, drafter=drafter, max_new_tokens=8, slots=2)
      >>> texts = {done.index: done.result.token_ids for done in run}
      >>> texts[1] == jaxspec.generate(model, params, prompts[1:2], drafter=drafter, max_new_tokens=8).token_ids[0]
      True
      >>> run.progress.finished, 0 < run.progress.slot_utilization <= 1
      (3, True)
    """
    count = len(prompts)
    for name, value in (
        ("rounds_per_dispatch", rounds_per_dispatch),
        ("chunks_per_dispatch", chunks_per_dispatch),
        ("newcomers_per_dispatch", 1 if newcomers_per_dispatch is None else newcomers_per_dispatch),
        ("slots", 1 if slots is None else slots),
    ):
        if value < 1:
            raise InputError(f"{name}={value}: must be at least 1")
    if config is not None and slots not in (None, config.batch_size):
        raise InputError(f"slots={slots}: the configuration says batch_size={config.batch_size}; say it there")
    prompts, config, max_new_tokens = settle(
        target,
        params,
        prompts,
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        max_new_tokens=max_new_tokens,
        memory=memory,
        logprobs=logprobs,
        config=config,
        temperature=temperature,
        verifier=verifier,
        stop_strings=stop_strings,
        batch_size=max(min(8 if slots is None else slots, count), 1),
    )
    limit = config.max_new_tokens if max_new_tokens is None else max_new_tokens
    limits = [int(limit)] * count if np.ndim(limit) == 0 else [int(each) for each in limit]
    spec = make_spec_step(target, drafter, config)
    check_requests(spec.target, spec.drafter, config, prompts, limits)
    if isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**32:
        seed = [(seed + index) % 2**32 for index in range(count)]
    # Of this configuration only the number of rows and the verifier matter.
    wide = SpecConfig(max(count, 1), 1, context_len=1, max_new_tokens=1, page_size=1, sampling=config.sampling)
    settings = pack_settings(wide, count, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    settings = None if settings is None else settings[:, 1:]
    starts = [0] * count
    if stop_strings is not None:
        starts = np.asarray(stop_strings.matcher(count, count + 1, target.vocab_size).state)[1:].tolist()
    plan = RefillPlan(
        rounds=rounds_per_dispatch,
        newcomers=most_newcomers(spec, newcomers_per_dispatch or max(config.batch_size // 16, 1)),
        chunks=chunks_per_dispatch,
    )
    jax.eval_shape(lambda: init_state(spec.target, spec.drafter, config, [], stop_ids=stop_ids))  # checks the ids
    names = list(range(count)) if ids is None else list(ids)
    check_names(names)
    for name, values in (("ids", names), ("categories", categories)):
        if values is not None and len(values) != count:
            raise InputError(f"{name}: there are {len(values)} for {count} prompts; give one each")

    digests = _digests(
        names,
        prompts,
        limits,
        settings,
        config,
        drafter=drafter,
        model_id=model_id,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        target=target,
    )
    output = Output(
        names,
        digests,
        path=out,
        categories=[None] * count if categories is None else list(categories),
        model_id=model_id,
        decode=decode,
        progress=progress,
    )
    scheduler = Scheduler(
        spec,
        params,
        plan,
        prompts=prompts,
        limits=limits,
        settings=settings,
        stop_ids=tuple(stop_ids),
        stop_strings=stop_strings,
        starts=starts,
        names=names,
        out=output,
    )
    return ManyRun(scheduler)


def _digests(names, prompts, limits, settings, config, *, drafter, model_id, stop_ids, stop_strings, target):
    """{name: digest} of all that the tokens and accept lengths of each prompt hang on, weights excepted."""
    common = {
        "stop_ids": sorted(map(int, stop_ids)),
        "num_draft_tokens": config.num_draft_tokens,
        "logprobs": config.logprobs,
        "drafter": "none" if drafter is None else type(drafter).__name__,
        "dtype": str(np.dtype(target.dtype)),
        "vocab_size": target.vocab_size,
        "model_id": model_id,
    }
    texts = [[]] * len(names) if stop_strings is None else stop_strings.of(len(names))
    digests = {}
    for i, (name, prompt, limit) in enumerate(zip(names, prompts, limits, strict=True)):
        sampled = settings is not None and settings[0, i].view(np.float32) > 0
        own = {
            "prompt": prompt.tolist(),
            "max_new_tokens": limit,
            # No round comes nearer to a longer context's end.
            "context_len": min(config.context_len, prompt.size + limit + config.num_draft_tokens),
            "stop_strings": sorted(texts[i]),
            "sampling": [config.sampling, *settings[:, i].tolist()] if sampled else None,
        }
        digests[name] = digest(common | own)
    return digests
