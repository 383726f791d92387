"""`jaxspec.generate_many`: more prompts than slots, for evaluation scripts.

The host keeps a queue of prompts and shows its front to the device, which fills the slots itself (`steps.refill`). It
issues a dispatch, and then reads the report of the one before: the device never waits for it.

    host      issue 1    issue 2, read 1    issue 3, read 2    ..
    device            dispatch 1         dispatch 2         dispatch 3

When report n arrives, dispatch n + 1 has its window already and may take up to N requests from it. So up to there the
queue is fixed, and a request that was turned out is put behind these: it has to wait for N others at most.
"""

import collections
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.config import SpecConfig
from jaxspec.drafting import Drafter
from jaxspec.errors import InputError
from jaxspec.generation.generate import settle
from jaxspec.generation.jsonl import ResultFile, check_names, digest, to_record, to_result
from jaxspec.generation.results import RequestResult
from jaxspec.generation.slots import Report, Shape, SlotReport, compiled_dispatch, read_report
from jaxspec.models.contract import Model
from jaxspec.steps import Params, init_state, make_spec_step
from jaxspec.steps.refill import RefillPlan, Window, empty_slots, entry, most_newcomers
from jaxspec.steps.settings import pack_settings
from jaxspec.steps.state import FINISH_NAMES, STOP_STRING, check_requests
from jaxspec.verification import StopStrings


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


class ManyRun:
    """A run of `generate_many`: an iterator of `Finished`, in the order in which prompts are done.

    Nothing runs before the first one is asked for, and between two of them only what was dispatched already.

    Attributes:
      progress: `ManyProgress`, up to date.
    """

    def __init__(self, scheduler: "_Scheduler"):
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


@dataclasses.dataclass
class _Request:
    """A request in a slot, as far as the host knows."""

    index: int
    since: float
    token_ids: list[int] = dataclasses.field(default_factory=list)
    accepted: list[int] = dataclasses.field(default_factory=list)
    emitted: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)

    def add(self, slot: SlotReport) -> None:
        self.token_ids += slot.token_ids
        self.accepted += slot.accepted
        self.emitted += slot.emitted
        self.logprobs += slot.logprobs or []


class _Queue:
    """The prompts in the order in which they are let in. What a dispatch in flight may take stays where it is."""

    def __init__(self, order: Sequence[int], entries: Callable[[int], np.ndarray], plan: RefillPlan):
        self.order, self.taken = list(order), 0
        self._entries, self._plan = entries, plan
        self._window, self._shown = None, None

    def window(self) -> Window:
        """What the next dispatch may take."""
        shown = tuple(self.order[self.taken : self.taken + self._plan.window])
        if (self.taken, shown) != self._shown:
            rows = [self._entries(index) for index in shown]
            rows += [np.zeros_like(self._entries(0))] * (self._plan.window - len(rows))
            bounds = np.array([self.taken, len(shown)], np.int32)
            self._window, self._shown = Window(jnp.asarray(np.stack(rows)), jnp.asarray(bounds)), (self.taken, shown)
        return self._window

    def put_back(self, index: int) -> None:
        """A prompt that was turned out goes as far to the front as it can."""
        self.order.insert(min(self.taken + self._plan.newcomers, len(self.order)), index)

    def __len__(self) -> int:
        return len(self.order) - self.taken


class _Scheduler:
    """The host's side of a run."""

    def __init__(self, spec, params, plan, *, prompts, limits, settings, stop_ids, stop_strings, starts, names, out):
        self._spec, self._params, self._plan = spec, params, plan
        self._stop_ids, self._stop_strings, self._starts = stop_ids, stop_strings, starts
        self._prompts, self._limits, self._settings, self._names = prompts, limits, settings, names
        self._out: _Output = out
        self._shape = Shape.of(spec.config, plan)
        self._live: dict[int, _Request] = {}
        self._counts = collections.Counter()
        self._begin = self._end = None

    def progress(self) -> ManyProgress:
        counts, slots = self._counts, self._spec.config.batch_size
        seconds = 0.0 if self._begin is None else (self._end or time.perf_counter()) - self._begin
        given = {field.name: counts[field.name] for field in dataclasses.fields(ManyProgress)}
        given |= {"prompts": len(self._prompts), "running": len(self._live), "slots": slots, "seconds": seconds}
        return ManyProgress(**given)

    def close(self) -> None:
        self._out.close()

    def run(self) -> Iterator[Finished]:
        """Dispatches and reads until every prompt is done."""
        try:
            for done in self._out.earlier():
                self._counts.update(finished=1, resumed=1)
                yield done
            left = [index for index, name in enumerate(self._names) if name not in self._out.names]
            # Long ones first: a short one at the end leaves its slot idle for less.
            left.sort(key=lambda index: -self._limits[index])
            if left:
                yield from self._work(_Queue(left, self._entry, self._plan), len(left))
        finally:
            self._end = time.perf_counter() if self._end is None else self._end
            self.close()

    def _work(self, queue: _Queue, count: int) -> Iterator[Finished]:
        step, lag = compiled_dispatch(self._spec.options), 1
        slots = self._empty()
        step.lower(self._spec, self._params, slots, queue.window(), self._plan).compile()
        self._begin = time.perf_counter()
        flying = collections.deque()
        while count:
            issued = time.perf_counter()
            slots, table = step(self._spec, self._params, slots, queue.window(), self._plan)
            table.copy_to_host_async()
            flying.append((issued, table))
            if len(flying) <= lag:
                continue
            issued, table = flying.popleft()
            report = read_report(np.asarray(table), self._shape)
            finished = self._take(report, queue, issued)
            count -= len(finished)
            if count == 0:
                self._end = time.perf_counter()
            for done in finished:  # all of them before the caller sees any
                self._out.write(done)
            self._counts.update(finished=len(finished))
            yield from finished
            self._out.tell(self.progress())

    def _take(self, report: Report, queue: _Queue, issued: float) -> list[Finished]:
        """Takes note of a report; returns what it has finished."""
        now, finished, counts = time.perf_counter(), [], self._counts
        busy = sum(len(slot.emitted) for slot in report.slots)
        for age in range(queue.taken + 1, report.taken + 1):
            self._live[age] = _Request(queue.order[age - 1], issued)
        queue.taken = report.taken
        counts.update(dispatches=1, rounds=report.rounds, chunks=report.chunks, busy_slot_rounds=busy)
        if len(queue):
            counts.update(queued_rounds=report.rounds, queued_busy_slot_rounds=busy)
        alone = len(self._live) == 1
        for slot in report.slots:
            request = self._live.get(slot.age)
            if request is None:  # it finished in an earlier dispatch
                continue
            request.add(slot)
            counts.update(tokens=len(slot.token_ids), verify_count=len(slot.emitted))
            if slot.retracted and not alone:
                counts.update(retractions=1, retracted_tokens=len(request.token_ids))
                counts.update(tokens=-len(request.token_ids), verify_count=-len(request.emitted))
                queue.put_back(request.index)
                del self._live[slot.age]
            elif slot.retracted or slot.reason:
                del self._live[slot.age]
                result = self._result(request, slot)
                finished.append(Finished(request.index, self._names[request.index], result, now - request.since))
        return finished

    def _result(self, request: _Request, slot: SlotReport) -> RequestResult:
        config, settings = self._spec.config, self._settings
        sampled = settings is not None and settings[0, request.index].view(np.float32) > 0
        return RequestResult(
            token_ids=request.token_ids,
            finish_reason=FINISH_NAMES[slot.reason] or "out_of_pages",
            verify_count=len(request.emitted),
            accept_lengths=request.emitted,
            accepted_drafts=request.accepted,
            logprobs=request.logprobs if config.logprobs else None,
            rule=config.sampling if sampled else "greedy",
            stop_string=self._stop_strings.found(slot.matched) if slot.reason == STOP_STRING else None,
        )

    def _entry(self, index: int) -> np.ndarray:
        settings = None if self._settings is None else self._settings[:, index]
        return entry(self._spec.config, self._prompts[index], self._limits[index], settings, self._starts[index])

    def _empty(self):
        spec, strings, count = self._spec, self._stop_strings, len(self._prompts)
        state = init_state(spec.target, spec.drafter, spec.config, [], stop_ids=self._stop_ids)
        if strings is not None:
            stops = strings.matcher(count, count + 1, spec.target.vocab_size)
            state = state.replace(stops=stops.replace(state=jnp.zeros((spec.config.rows,), jnp.int32)))
        return empty_slots(spec, state, self._plan)


class _Output:
    """Where finished prompts go besides the caller: a file, and whoever follows the progress."""

    def __init__(self, names, digests, *, path, categories, model_id, decode, progress):
        self._index = {name: index for index, name in enumerate(names)}
        self._digests, self._categories, self._progress = digests, categories, progress
        self._how = {"model_id": model_id, "decode": decode}
        self._file = None if path is None else ResultFile(path, digests)
        self.names = set() if self._file is None else set(self._file.records)

    def earlier(self) -> Iterator[Finished]:
        """What the file held when it was opened."""
        for name, record in {} if self._file is None else self._file.records.items():
            time_taken = record["choices"][0]["wall_time"][0]
            yield Finished(self._index[name], name, to_result(record), time_taken, resumed=True)

    def write(self, done: Finished) -> None:
        if self._file is not None:
            name = done.question_id
            how = {"settings": self._digests[name], "category": self._categories[done.index], **self._how}
            self._file.append(to_record(done.result, question_id=name, wall_time=done.wall_time, **how))

    def tell(self, progress: ManyProgress) -> None:
        if self._progress is not None:
            self._progress(progress)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


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
    output = _Output(
        names,
        digests,
        path=out,
        categories=[None] * count if categories is None else list(categories),
        model_id=model_id,
        decode=decode,
        progress=progress,
    )
    scheduler = _Scheduler(
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
