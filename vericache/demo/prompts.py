"""Long prompts of real text that ship with the project (sources and licences: ``prompts/SOURCES.md``)."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class DemoPrompt:
    """``text`` is a file of ``prompts/``, cut to ``tokens`` tokens. With an ``instruction`` the prompt is a chat
    message (text, then instruction), else the model continues the raw text and ``suffix``."""

    name: str
    text: str
    tokens: int
    instruction: str | None = None
    suffix: str = ""
    note: str = ""  # a line planted in the middle of the text, for retrieval


PROMPTS: dict[str, DemoPrompt] = {
    p.name: p
    for p in (
        DemoPrompt("continue_code", "statistics.txt", 2600),
        DemoPrompt(
            "extract_json",
            "zones.txt",
            2200,
            suffix="\n\nThe same list as JSON, in the same order:\n["
            '{"countries": "AD", "zone": "Europe/Andorra"},\n {"countries": "AE,OM,RE,SC,TF", "zone": "Asia/Dubai"},\n',
        ),
        DemoPrompt("summarise", "sotu_1791.txt", 2400, "Summarise the speech above in a few sentences."),
        DemoPrompt("continue_prose", "licences.txt", 2000),
        DemoPrompt(
            "find_needle",
            "mpl2.txt",
            2300,
            suffix="\n\nQ: What is the access code of the archive room?\nA: The access code of the archive room is",
            note="The access code of the archive room is 7319, and the key is kept by Ada Lindqvist in Stockholm.",
        ),
        DemoPrompt("write_tests", "textwrap.txt", 2200, "Write unit tests for the module above."),
        DemoPrompt("continue_novel", "loomings.txt", 2300),
        DemoPrompt("explain_code", "decoder.txt", 2100, "Explain step by step what the module above does."),
    )
}

# What `make demo` serves at once: summarise, extract JSON, continue code, continue prose.
DEMO: tuple[str, ...] = ("summarise", "extract_json", "continue_code", "continue_prose")


def token_ids(prompt: DemoPrompt, tokenizer: Any, limit: int | None = None) -> list[int]:
    """The prompt as token ids; ``limit`` caps the text's tokens below the prompt's own length."""
    text = files("vericache.demo").joinpath("prompts", prompt.text).read_text(encoding="utf-8")
    body = tokenizer.encode(text, add_special_tokens=False)[: min(prompt.tokens, limit or prompt.tokens)]
    if prompt.note:
        middle = len(body) // 2
        body = [*body[:middle], *tokenizer.encode(f"\n\n{prompt.note}\n\n", add_special_tokens=False), *body[middle:]]
    if prompt.instruction is None:
        return [*body, *tokenizer.encode(prompt.suffix, add_special_tokens=False)]
    message = [{"role": "user", "content": tokenizer.decode(body) + "\n\n" + prompt.instruction}]
    rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return tokenizer.encode(rendered, add_special_tokens=False)


def load(names: Sequence[str], tokenizer: Any, limit: int | None = None) -> dict[str, list[int]]:
    return {name: token_ids(PROMPTS[name], tokenizer, limit) for name in names}
