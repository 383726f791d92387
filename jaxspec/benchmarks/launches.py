"""How many kernels a speculative round starts: those of its metadata, by phase, and all of them.

    traced      Pallas kernels in the traced round, where it is lowered for CUDA; needs no GPU
    compiled    everything that the compiled round starts, on the CUDA device that is there, or compiled for an H200
                where the wheels of a CUDA plugin and a CUDA compiler are

A launch belongs to the metadata if a builder of `jaxspec.metadata` asks for it, and to the attention if it attends: one
or two a layer, as the longest context has one part or more. Other kernels are whatever is neither, by name: those that
move states or commit context rows, and of each layer of a Qwen3 `store_heads`; in bfloat16 with up to 64 rows these
have twice `row_products` and once `row_sums`. Ordinary metadata of a sparse model are mostly plain operations, which
the traced count does not see and the compiled one does.

With unified memory the rounds of a generation run in stretches (`jaxspec.steps.rounds`): they start less than what is
counted here, the round of a script's own loop, which may hand out pages and take them back.

The phases are those of `jaxspec.steps.round`, with what prepares a round counted to the verify; a prompt's chunk is no
part of a round. A loop of so many turns counts as often, one that ends when the data say so as one turn, and of several
branches the one that starts most.
"""

import collections
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from jaxspec import InputError, Params, SpecConfig, embedded_names, init_state, load_model, make_spec_step
from jaxspec.attention import paged as attention
from jaxspec.benchmarks.base import Report, Task, quiet, setting
from jaxspec.config import MEMORIES
from jaxspec.drafting.choose import DRAFTERS, fitting_drafters, make_drafter, page_size_for
from jaxspec.metadata import build as metadata
from jaxspec.models import Checkpoint
from jaxspec.steps import SpecStep, StepOutput, commit, draft, extend, prefill, prepare, verify
from jaxspec.steps.state import SpecState
from jaxspec.steps.step import jit_with_state
from pallas_kernels import aot, kpool_metadata_fusion_supported

SUMMARY = "Counts the kernels that a speculative round starts, those of its metadata by phase; needs no GPU."

ROUND = ("draft", "verify", "extend", "commit")
PREFILL = "prefill chunk"
PHASES = (*ROUND, PREFILL)
METADATA, ATTENTION, OTHERS = SIDES = ("metadata", "attention", "other_kernels")
ORDINARY, FUSED = "ordinary", "fused"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is counted. Of the shapes only the number of drafts and the model's layers change the counts."""

    model: str | None = setting(
        None, "The target: an embedded model's name, or a folder; by default all embedded ones."
    )
    drafter: str = setting("fitting", "Who proposes tokens; by default all that fit.", choices=("fitting", *DRAFTERS))
    draft_model: str | None = setting(None, "The draft model of draft_lm, a name or a folder; 'draft' by default.")
    num_requests: int = setting(8, "Requests decoded together.", least=1)
    num_draft_tokens: int = setting(8, "D, tokens verified per request and round.", least=1)
    context_len: int = setting(1024, "Most tokens of a sequence.", least=1)
    page_size: int = setting(0, "Tokens a page, a power of two; 0 is 64, or 64 pools of a sparse model.", least=0)
    memory: str = setting("static", "A pool for each kind of page, or one for all.", choices=MEMORIES)
    dtype: str = setting("float32", "What is computed in.", choices=("float32", "bfloat16"))
    compiled: str = setting(
        "auto",
        "Whether to count in the compiled round too, some minutes for all embedded models; auto: where a CUDA device "
        "or a CUDA plugin is there.",
        choices=("auto", "yes", "no"),
    )


@dataclasses.dataclass(frozen=True)
class Arm:
    """A target, a drafter and a way to prepare the metadata."""

    model: str
    drafter: str
    metadata: str
    step: SpecStep
    params: Params

    def __str__(self) -> str:
        return f"{self.model} + {self.drafter}, {self.metadata}"


def run(settings: Settings, task: Task = quiet) -> Report:
    """Counts.

    Raises:
      InputError: models, drafters or shapes that cannot be; compiling asked for where nothing can compile.
    """
    device = compiler()
    if settings.compiled == "yes" and device is None:
        raise InputError(f"compiled=yes: no CUDA device, and {aot.missing()}; leave it out to count what is traced")
    if settings.compiled == "no":
        device = None
    with task("models", "loading"):
        arms = list(prepare_arms(settings))
    counts = []
    for arm in arms:
        with task(str(arm), "tracing"):
            count = {"traced": trace(arm)}
        if device is not None:
            with task(str(arm), f"compiling for {device}"):
                count["compiled"] = compile_round(arm)
        counts.append(count)
    return report(arms, counts, device)


def compiler() -> str | None:
    """What a round can be compiled for here: the CUDA device, an H200 that is not there, or None."""
    if jax.default_backend() == "gpu":
        return jax.devices()[0].device_kind
    return None if aot.missing() else "NVIDIA H200 (none here)"


def prepare_arms(settings: Settings) -> Iterator[Arm]:
    """Loads the models and binds the steps; nothing runs."""
    # What drafts for the others is no target of its own.
    names = [settings.model] if settings.model else [name for name in embedded_names() if name != "draft"]
    if not names:
        raise InputError("model: there are no embedded models; give a folder")
    for name in names:
        target = load_model(name, settings.dtype)
        drafters = fitting_drafters(target) if settings.drafter == "fitting" else [settings.drafter]
        if settings.draft_model is not None and settings.drafter == "fitting":
            drafters = ["draft_lm"]
        for drafter in drafters:
            yield from arms_of(target, drafter, settings)


def arms_of(target: Checkpoint, drafter: str, settings: Settings) -> Iterator[Arm]:
    """The fused arm, which a target with sparse layers has if the pages suit them; then the ordinary one first."""
    bound, draft_params = make_drafter(drafter, target, draft_model=settings.draft_model, dtype=settings.dtype)
    config = SpecConfig(
        batch_size=settings.num_requests,
        num_draft_tokens=settings.num_draft_tokens if bound else 1,
        context_len=settings.context_len,
        max_new_tokens=settings.context_len,
        page_size=settings.page_size or page_size_for(target),
        memory=settings.memory,
    )
    step = make_spec_step(target.model, bound, config)
    params = jax.tree.map(_shape, Params(target.params, draft_params))
    sparse = target.model.sparse
    yield Arm(target.name, drafter, ORDINARY if sparse else FUSED, step, params)
    if sparse and kpool_metadata_fusion_supported(sparse.pool, config.page_size // sparse.pool, sparse.topk):
        # Counted as for CUDA, so what the device here would make of the wish is not asked.
        fused = dataclasses.replace(step, config=dataclasses.replace(step.config, kpool_metadata_fusion=True))
        yield Arm(target.name, drafter, FUSED, fused, params)


def _shape(leaf) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def initial_state(step: SpecStep) -> SpecState:
    """The state's shapes; makes no arrays."""
    return jax.eval_shape(lambda: init_state(step.target, step.drafter, step.config, []))


def phased_round(spec: SpecStep, params: Params, state: SpecState) -> tuple[SpecState, StepOutput]:
    """`jaxspec.steps.run_round`, its phases named."""
    with jax.named_scope("verify"):
        state, plan = prepare(spec, state)
    with jax.named_scope("draft"):
        state, drafts = draft(spec, params, state, plan)
    with jax.named_scope("verify"):
        state, verdict = verify(spec, params, state, plan, drafts)
    with jax.named_scope("extend"):
        state = extend(spec, params, state, plan, verdict)
    with jax.named_scope("commit"):
        return commit(spec, state, plan, drafts, verdict)


def phased_prefill(spec: SpecStep, params: Params, state: SpecState):
    """`jaxspec.prefill`, named as a phase: its loop is open, so one chunk is counted."""
    with jax.named_scope(PREFILL):
        return prefill(spec, params, state)


# What is traced


def trace(arm: Arm) -> dict[str, Any]:
    """Pallas kernels by phase, {phase: {kernel: launches}}, of metadata, attention and others; and open loops of the
    round."""
    state = initial_state(arm.step)
    sides = {side: {phase: collections.Counter() for phase in PHASES} for side in SIDES}
    open_loops = 0
    for function in (phased_round, phased_prefill):
        jaxpr = jax.make_jaxpr(function, static_argnums=0)(arm.step, arm.params, state)
        found, loops = kernels(jaxpr.jaxpr)
        open_loops += loops if function is phased_round else 0
        for (path, name), times in found.items():
            side = METADATA if metadata.SCOPE in path else ATTENTION if attention.SCOPE in path else OTHERS
            sides[side][path[0]][name] += times
    counts = {side: {phase: dict(found) for phase, found in phases.items()} for side, phases in sides.items()}
    return {**counts, "open_loops": open_loops}


def kernels(jaxpr, path: tuple[str, ...] = ()) -> tuple[collections.Counter, int]:
    """Launches of Pallas kernels in a jaxpr lowered for CUDA, {(names of scopes, kernel): times}, and open loops."""
    total, loops = collections.Counter(), 0
    for equation in jaxpr.eqns:
        scopes = (*path, *str(equation.source_info.name_stack).split("/"))
        where = tuple(name for name in scopes if name)
        kind = equation.primitive.name
        if kind == "pallas_call":
            total[where, kernel_name(equation)] += 1
            continue
        inner = [kernels(part, where) for part in branches(equation)]
        if kind == "cond" and inner:
            inner = [max(inner, key=lambda found: found[0].total())]
        if kind == "while" and any(found for found, _ in inner):
            loops += 1
        turns = equation.params["length"] if kind == "scan" else 1
        for found, more in inner:
            loops += more
            for key, times in found.items():
                total[key] += times * turns
    return total, loops


def branches(equation) -> Iterator[Any]:
    """The jaxprs inside an equation; of branches that differ by platform the one for CUDA."""
    parameters = dict(equation.params)
    if platforms := parameters.pop("branches_platforms", None):
        chosen = [i for i, names in enumerate(platforms) if names and "cuda" in names]
        chosen = chosen or [i for i, names in enumerate(platforms) if names is None]
        parameters["branches"] = [parameters["branches"][i] for i in chosen]
    for value in jax.tree.leaves(list(parameters.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
        part = getattr(value, "jaxpr", value)
        if hasattr(part, "eqns"):
            yield part


def kernel_name(equation) -> str:
    """What a `pallas_call` was called by whoever wrote it."""
    name = equation.params.get("name") or getattr(equation.params.get("name_and_src_info"), "name", None)
    return name or "unnamed"


# What is compiled


def compile_round(arm: Arm) -> dict[str, Any]:
    """Launches of the compiled round by phase, {"all": {phase: n}, "metadata": {phase: n}}, and by kind; open loops;
    bytes of the state, and those written in place."""
    state = initial_state(arm.step)
    # Within a command buffer nothing could be read.
    options = {**dict(arm.step.options), "xla_gpu_enable_command_buffer": ""}
    jitted = jit_with_state(phased_round, tuple(sorted(options.items())))
    arguments = arm.step, arm.params, state
    if jax.default_backend() == "gpu":
        compiled = jitted.lower(*arguments).compile()
    else:
        compiled = aot.compile_lowered(aot.lower_for_h200(jitted, *arguments))
    program = aot.read_program(compiled)
    both = {"all": collections.Counter(), "metadata": collections.Counter()}
    kinds = collections.Counter()
    for launch in program.launches:
        names = launch.name.split("/")
        phase = next((name for name in names if name in ROUND), "elsewhere")
        both["all"][phase] += launch.times
        both["metadata"][phase] += launch.times * (metadata.SCOPE in names)
        kinds[launch.kind] += launch.times
    counts = {side: {phase: found[phase] for phase in (*ROUND, "elsewhere")} for side, found in both.items()}
    place = {
        "state_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)),
        "bytes_in_place": compiled.memory_analysis().alias_size_in_bytes,
    }
    return {**counts, "kinds": dict(kinds), "open_loops": program.open_loops, **place}


# What is told


def report(arms: list[Arm], counts: list[dict[str, Any]], device: str | None) -> Report:
    """The tables, and all counts by kernel."""
    traced = [("metadata kernels, traced for CUDA", *ROUND, "a round", PREFILL)]
    attending = [("attention kernels, traced for CUDA", *ROUND, "a round", PREFILL)]
    others = [("other Pallas kernels, traced for CUDA", *ROUND, "a round", PREFILL)]
    compiled = [(f"all launches, compiled for {device}", *ROUND, "elsewhere", "a round", "of metadata")]
    entries = []
    for arm, count in zip(arms, counts, strict=True):
        for rows, side in zip((traced, attending, others), SIDES, strict=True):
            sums = {phase: sum(found.values()) for phase, found in count["traced"][side].items()}
            whole = sum(sums[phase] for phase in ROUND)
            cells = (*(sums[phase] for phase in ROUND), whole, sums[PREFILL])
            rows.append((str(arm), *map(str, cells)))
            count["traced"][f"{side}_a_round"] = whole
        if "compiled" in count:
            found = count["compiled"]
            whole, prepared = sum(found["all"].values()), sum(found["metadata"].values())
            compiled.append((str(arm), *(str(n) for n in found["all"].values()), str(whole), str(prepared)))
            found |= {"all_a_round": whole, "metadata_a_round": prepared}
        config = dataclasses.asdict(arm.step.config)
        names = {"model": arm.model, "drafter": arm.drafter, "metadata_path": arm.metadata}
        entries.append({**names, "config": config, **count})
    tables = [traced, attending, others, *([compiled] if device else []), [(line,) for line in notes(device)]]
    basis = {"traced": "Pallas kernels, lowered for CUDA", "compiled": device}
    return Report(tables=tables, results={"arms": entries, "basis": basis, "notes": notes(device)}, failures=[])


def notes(device: str | None) -> list[str]:
    """What the numbers mean."""
    lines = [
        "Traced: Pallas kernels as a CUDA program holds them, no device asked; plain operations are not counted.",
        "Metadata: launches that builders of jaxspec.metadata ask for; attention: those that attend. Verify: "
        "what prepares the round included.",
        "A loop counts its turns, or one turn where the data end it; of several branches the largest.",
    ]
    if device is None:
        return [*lines, "Not compiled: what XLA makes of plain operations is not counted."]
    return [
        *lines,
        "Compiled: instructions of the optimised program that start work, one each, copies too, command buffers off; a "
        "library call may start more. A fusion counts where its result belongs; 'elsewhere' is what XLA added.",
    ]
