"""The questions that the MTP module was trained with are not those that it is measured with."""

import re
import tomllib
from pathlib import Path

from tokenmill.bench.mtp import chat_prompts

QUESTIONS = Path(__file__).parents[2] / "scripts" / "mtp_questions.toml"


def test_no_prompt_of_the_benchmark_has_their_form() -> None:
    words = tomllib.loads(QUESTIONS.read_text(encoding="utf-8"))
    gaps = {gap for form in words["forms"] for gap in re.findall(r"\{(\w+)\}", form)}
    assert gaps == words.keys() - {"forms"}
    patterns = [
        re.compile(".+".join(map(re.escape, re.split(r"\{\w+\}", form)))) for form in words["forms"]
    ]
    assert any(pattern.fullmatch("Tell me about Norway.") for pattern in patterns)
    for prompt in chat_prompts():
        assert not any(pattern.fullmatch(prompt.text) for pattern in patterns), prompt.text
