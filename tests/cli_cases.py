"""What the tests of the command line share: two random models in a folder, a run, and runs that decode nothing."""

import pytest
import tiny_models
import tokenizers

from jaxspec import Generation, RequestResult, cli, models
from jaxspec.cli import generate as command

CONTEXT = 128
# Shapes that the tests share, so that they share compiled programs.
SHAPES = ["--num_draft_tokens=3", "--max_new_tokens=9", "--page_size=16", "--batch_size=2"]


def quick_compile():
    """Has steps compile quickly, since what runs is small, until the patch that is returned is undone. A process of its
    own compiles as users do."""
    patch = pytest.MonkeyPatch()
    patch.setattr("jaxspec.steps.step.compiler_options", lambda: tiny_models.FAST_COMPILE)
    return patch


def write_models(root):
    """Writes two random models over one byte-level vocabulary into a folder: target and draft."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["import os\nimport sys\n\ndef main():\n    return 1\n"], trainer)
    for name, windows, seed in (("target", (8, None), 0), ("draft", (None,), 1)):
        config = models.Qwen3Config(
            vocab_size=280,
            hidden_size=24,
            intermediate_size=32,
            num_hidden_layers=len(windows),
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            max_position_embeddings=CONTEXT,
            windows=windows,
            eos_token_ids=(0,),
        )
        models.save(root / name, config, models.random_params(config, seed), tokenizer=tokenizer)


def run(capsys, *words):
    """Exit status, standard output and standard error of a command line."""
    status = cli.main([str(word) for word in words])
    return status, *capsys.readouterr()


def fake_runs(monkeypatch, *completions, reason="length", stop_string=None):
    """Replaces decoding: call i answers every prompt with `completions[i]`. Returns the settings of all calls."""
    answers, asked = iter(completions), []

    def answer(target, params, batch, *, config, max_new_tokens, temperature, **settings):
        if max_new_tokens == 1:  # one token is asked for to compile
            ids = [0]
        else:
            ids = next(answers)
            asked.append({"config": config, "temperature": temperature, **settings})
        rounds = len(ids) - 1
        results = [
            RequestResult(
                ids,
                reason,
                rounds,
                [1] * rounds,
                [0] * rounds,
                rule=config.sampling if t > 0 else "greedy",
                stop_string=stop_string,
            )
            for t in temperature
        ]
        return Generation(results, config.num_draft_tokens, 0.5, 3)

    monkeypatch.setattr(command, "run_generation", answer)
    return asked
