"""How each prompt of a run samples, and what is said about it."""

from collections.abc import Sequence

from absl import flags

from jaxspec.cli.prompts import SETTINGS, Prompt
from jaxspec.config import SpecConfig
from jaxspec.errors import InputError
from jaxspec.steps.settings import pack_settings

_ONE = SpecConfig(batch_size=1, num_draft_tokens=1, context_len=1, max_new_tokens=0, page_size=1, sampling="match")


def settings_of(values: flags.FlagValues, requests: Sequence[Prompt]) -> tuple[dict[str, float], ...]:
    """temperature, top_k, top_p and seed of each prompt: its own, or else the flags', seeds counted up.

    Raises:
      InputError: a value that is none, named by the prompt's place; --top_k or --top_p where no prompt samples.
    """
    settings = []
    for index, request in enumerate(requests):
        common = {name: values[name].value for name in SETTINGS}
        common["seed"] = (values.seed + index) % 2**32
        own = common | request.settings
        for name, value in request.settings.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise InputError(f"{request.place}: {name}={value!r}: give one number")
        try:
            pack_settings(_ONE, 1, **own)
        except InputError as error:
            place = request.place if request.settings else "--" + str(error).split("=")[0]
            raise InputError(f"{place}: {error}") from None
        settings.append(own)
    if not any(each["temperature"] > 0 for each in settings):
        for name in ("top_k", "top_p"):
            if values[name].value != values[name].default:
                raise InputError(f"{name}={values[name].value}: of no use without --temperature; leave one of them out")
    return tuple(settings)


def rule_of(settings: dict[str, float], verifier: str | None) -> str:
    """What decides on the tokens of a prompt: `RequestResult.rule`."""
    return verifier if settings["temperature"] > 0 else "greedy"


def describe(settings: dict[str, float], rule: str) -> str:
    """A prompt's settings and rule, nothing for a greedy one.

    Example:
      >>> describe({"temperature": 0.7, "top_k": 0, "top_p": 0.9, "seed": 3}, "rejection")
      'temperature 0.7, top_p 0.9, seed 3, rule rejection'
    """
    if rule == "greedy":
        return ""
    limits = [f"{name} {settings[name]:g}" for name, none in (("top_k", 0), ("top_p", 1)) if settings[name] != none]
    return ", ".join([f"temperature {settings['temperature']:g}", *limits, f"seed {settings['seed']}", f"rule {rule}"])


def not_compared(rules: Sequence[str]) -> str | None:
    """Why some prompts are not compared with plain decoding; None if all are.

    Example:
      >>> not_compared(["greedy", "match"])
      >>> not_compared(["greedy", "block"])
      'block draws other ids than plain decoding, by the same law: of 2 requests 1 is compared'
    """
    others = sorted({rule for rule in rules if rule not in ("greedy", "match")})
    if not others:
        return None
    left = sum(rule not in others for rule in rules)
    kept = (
        "no request is compared"
        if not left
        else f"of {len(rules)} requests {left} {'is' if left == 1 else 'are'} compared"
    )
    return f"{' and '.join(others)} draws other ids than plain decoding, by the same law: {kept}"
