"""`python -m jaxspec generate-many`: prompts of an evaluation, in slots that are kept full, into a JSONL file."""

import contextlib
from pathlib import Path

from absl import flags

from jaxspec import InputError, ManyProgress, SpecConfig, generate_many
from jaxspec.cli import generate, prompts, switches
from jaxspec.cli.screen import Screen
from jaxspec.drafting.choose import page_size_for
from jaxspec.generation.generate import default_verifier

SUMMARY = (
    "Completes any number of prompts in slots that are kept full, into a JSONL file; goes on where it was stopped."
)

# Flags of `generate` that mean nothing here: what is compared, shown and batched is another matter.
_WITHOUT = ("check_exact", "json", "loop", "batch_size")


def define_flags(values: flags.FlagValues) -> None:
    """Declares the command's flags: most of those of `generate`, and its own."""
    generate.define_flags(values)
    for name in _WITHOUT:
        delattr(values, name)
    flags.DEFINE_string(
        "out",
        None,
        "JSONL file that each finished prompt is appended to, with the fields of Spec-Bench. Prompts that it holds "
        "already are not done again. Needed.",
        flag_values=values,
    )
    flags.DEFINE_integer("slots", 8, "Requests that run together.", lower_bound=1, flag_values=values)


def run(values: flags.FlagValues) -> int:
    """Runs the command. Exit status 0, or 1 if pages ran out for a prompt."""
    if not values.out:
        raise InputError("--out is missing: name the JSONL file for the results")
    screen = Screen()
    with screen.log_lines():
        return _run(values, screen)


def _run(values: flags.FlagValues, screen: Screen) -> int:
    fusion = switches.kpool_metadata_fusion()
    loaded = generate.load(values, screen)
    target, config = loaded.target, _config(values, loaded, fusion)
    has_text = (target.folder / "tokenizer.json").is_file()
    run = generate_many(
        target.model,
        loaded.params,
        [request.token_ids for request in loaded.requests],
        drafter=loaded.drafter,
        max_new_tokens=config.max_new_tokens,
        stop_ids=loaded.stop_ids,
        stop_strings=loaded.stop_strings,
        config=config,
        ids=[request.id for request in loaded.requests],
        out=values.out,
        model_id=_model_id(values, loaded),
        decode=target.decode if has_text else None,
        progress=lambda progress: _show(screen, progress),
        **{name: [each[name] for each in loaded.settings] for name in prompts.SETTINGS},
    )
    starved = 0
    with contextlib.closing(run), screen.task("completions", f"{len(loaded.requests)} prompts, compiling"):
        for done in run:
            starved += done.result.finish_reason == "out_of_pages"
    screen.write(_summary(run.progress, values.out))
    if starved:
        screen.say(f"error: pages ran out for {starved} prompts: raise --num_pages")
    return 1 if starved else 0


def _config(values: flags.FlagValues, loaded: generate.Loaded, fusion: bool) -> SpecConfig:
    """Shapes that fit every prompt."""
    context = loaded.target.config.max_position_embeddings
    longest = max(len(request.token_ids) for request in loaded.requests)
    wanted = -(-(longest + values.max_new_tokens) // generate.CONTEXT_STEP) * generate.CONTEXT_STEP
    temperatures = [each["temperature"] for each in loaded.settings]
    return SpecConfig(
        batch_size=min(values.slots, len(loaded.requests)),
        num_draft_tokens=generate.num_draft_tokens_of(values, loaded.drafter),
        context_len=min(wanted, context),
        max_new_tokens=min(values.max_new_tokens, context),
        page_size=page_size_for(loaded.target) if values.page_size is None else values.page_size,
        num_pages=values.num_pages,
        memory=values.memory,
        logprobs=values.logprobs,
        sampling=values.verifier or default_verifier(loaded.drafter, temperatures),
        kpool_metadata_fusion=fusion,
    )


def _model_id(values: flags.FlagValues, loaded: generate.Loaded) -> str:
    """Target and draft, as the flags name them: by the last part of a path."""
    names = [values.model, getattr(loaded.drafter, "algorithm", "plain"), values.draft_model]
    return " ".join(Path(name).name for name in names if name)


def _show(screen: Screen, progress: ManyProgress) -> None:
    parts = [f"{progress.finished} of {progress.prompts}, {progress.running} running"]
    if progress.accept_length is not None:
        parts.append(f"accept length {progress.accept_length:.2f}")
    screen.progress(progress.finished / progress.prompts, ", ".join(parts))


def _summary(progress: ManyProgress, out: str) -> str:
    """What there is to say in the end.

    Example:
      >>> done = dict.fromkeys(ManyProgress.__dataclass_fields__, 0) | {"prompts": 3, "finished": 3, "resumed": 3}
      >>> print(_summary(ManyProgress(**done), "out.jsonl"), end="")
      3 prompts in out.jsonl, 3 of them from earlier runs
    """
    lines = [f"{progress.finished} prompts in {out}, {progress.resumed} of them from earlier runs"]
    if progress.rounds:
        lines.append(
            f"accept length {progress.accept_length:.2f}, {progress.tokens_per_second:.0f} tokens/s, "
            f"slots busy {progress.slot_utilization:.1%} of the rounds"
        )
    if progress.retractions:
        lines.append(f"{progress.retractions} requests begun again because pages ran out")
    return "\n".join(lines) + "\n"
