"""Answer every line of a file in one batch, in this process and without a server.

    python examples/batch.py questions.txt answers.jsonl

A line of the answers has the question, its answer and why it ended, in the order of the questions.
The prompts run together: as many at once as the KV cache holds, and what they begin with in common
is computed once.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from tokenmill import LLM, SamplingParams

SYSTEM = {"role": "system", "content": "Answer in one short sentence."}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args(arguments)
    questions = [line for line in args.questions.read_text(encoding="utf-8").splitlines() if line]
    chats = [[SYSTEM, {"role": "user", "content": question}] for question in questions]
    greedy = SamplingParams(temperature=0, max_tokens=args.max_tokens)
    with LLM(args.model) as llm:
        begin = time.perf_counter()
        outputs = [output.outputs[0] for output in llm.chat(chats, greedy)]
        seconds = time.perf_counter() - begin
    with args.answers.open("w", encoding="utf-8") as file:
        for question, answer in zip(questions, outputs, strict=True):
            line = {"question": question, "answer": answer.text, "ended": answer.finish_reason}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    tokens = sum(len(answer.token_ids) for answer in outputs)
    print(f"{len(questions)} answers of {tokens} tokens in {seconds:.1f} s: {args.answers}")


if __name__ == "__main__":
    main()
