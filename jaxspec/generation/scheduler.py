"""The host's side of `generate_many`: the queue, what is dispatched when, and what comes of the reports.

The host keeps a queue of prompts and shows its front to the device, which fills the slots itself (`steps.refill`). It
issues a dispatch, and then reads the report of the one before: the device never waits for it.

    host      issue 1    issue 2, read 1    issue 3, read 2    ..
    device            dispatch 1         dispatch 2         dispatch 3

When report n arrives, dispatch n + 1 has its window already and may take up to N requests from it. So up to there the
queue is fixed, and a request that was turned out is put behind these: it has to wait for N others at most.
"""

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence

import jax.numpy as jnp
import numpy as np

from jaxspec.generation.jsonl import ResultFile, to_record, to_result
from jaxspec.generation.progress import Finished, ManyProgress
from jaxspec.generation.results import RequestResult
from jaxspec.generation.slots import Report, Shape, SlotReport, compiled_dispatch, read_report
from jaxspec.steps import init_state
from jaxspec.steps.refill import RefillPlan, Window, empty_slots, entry
from jaxspec.steps.state import FINISH_NAMES, STOP_STRING


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


class Queue:
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


class Scheduler:
    """The host's side of a run."""

    def __init__(self, spec, params, plan, *, prompts, limits, settings, stop_ids, stop_strings, starts, names, out):
        self._spec, self._params, self._plan = spec, params, plan
        self._stop_ids, self._stop_strings, self._starts = stop_ids, stop_strings, starts
        self._prompts, self._limits, self._settings, self._names = prompts, limits, settings, names
        self._out: Output = out
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
                yield from self._work(Queue(left, self._entry, self._plan), len(left))
        finally:
            self._end = time.perf_counter() if self._end is None else self._end
            self.close()

    def _work(self, queue: Queue, count: int) -> Iterator[Finished]:
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

    def _take(self, report: Report, queue: Queue, issued: float) -> list[Finished]:
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


class Output:
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
