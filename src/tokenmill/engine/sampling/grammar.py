"""Grammars compiled by xgrammar, and matchers that follow one sequence each.

A grammar is taken only if it can be enforced at a bearable cost: text and nesting are bounded, what
xgrammar would ignore in a JSON schema is refused, and a trial run finds most of the ambiguous
grammars whose masks take seconds. All of that happens in processes of their own, which are bounded:
see grammar_process.py.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from tokenmill.core.json_schema import check_schema, parse_json, patterns
from tokenmill.core.types import GrammarVocab, InvalidRequestError, StructuredOutput
from tokenmill.engine.sampling.free_text import AnyText, Branches, GrammarError, Source
from tokenmill.engine.sampling.sampler import Bitmask, allowed_ids

MAX_SOURCE_BYTES = 256 * 1024
MAX_WHITESPACE = 16  # between two JSON tokens; unbounded, a weak model may never get past it
MAX_MASK_S = 0.1  # CPU time of one mask in the trial
_TRIAL_TOKENS = 64
_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")
_CPP_PREFIX = re.compile(r"^\[[\d:]+\] \S+: (?:Check failed: .*? is false: )?")


class Matcher:
    """Follows one sequence: which tokens may come next. It moves on sampled tokens alone."""

    __slots__ = ("_matcher", "_permitted")

    def __init__(self, matcher: Any, permitted: Bitmask) -> None:
        self._matcher = matcher
        self._permitted = permitted

    def allowed(self) -> Bitmask:
        """The bitmask [ceil(vocab / 32)] of tokens that may come next, at least one."""
        mask = np.zeros_like(self._permitted)
        if self.is_terminated():
            raise GrammarError("a token is asked for after the end of the structured output")
        self._matcher.fill_next_token_bitmask(mask[None])
        mask &= self._permitted
        if not mask.any():
            raise GrammarError("no token of the vocabulary continues the structured output")
        return mask

    def accept(self, token_id: int) -> None:
        if self.is_terminated() or not self._matcher.accept_token(token_id):
            raise GrammarError(f"token {token_id} does not continue the structured output")

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)

    def is_terminated(self) -> bool:
        """True once the grammar was completed and a stop token accepted."""
        return bool(self._matcher.is_terminated())


class Grammar:
    """A compiled grammar; any number of sequences may follow it."""

    def __init__(self, compiled: Any, vocab: GrammarVocab, permitted: Bitmask) -> None:
        self._compiled = compiled
        self._vocab = vocab
        self._permitted = permitted

    def matcher(self, stop_token_ids: Collection[int] | None = None) -> Matcher:
        """A matcher at the start of the text; one of the stop tokens (the vocabulary's) ends it."""
        import xgrammar

        stop_ids = self._vocab.stop_token_ids if stop_token_ids is None else sorted(stop_token_ids)
        matcher = xgrammar.GrammarMatcher(self._compiled, override_stop_tokens=stop_ids)
        return Matcher(matcher, self._permitted)


class GrammarCompiler:
    """Compiles structured outputs for one vocabulary."""

    def __init__(self, vocab: GrammarVocab, vocab_size: int | None = None) -> None:
        import xgrammar

        size = vocab.vocab_size if vocab_size is None else vocab_size  # of the model's logits
        tokens = vocab.encoded_vocab[:size]
        self.vocab = replace(vocab, encoded_vocab=tokens, vocab_size=size)
        info = xgrammar.TokenizerInfo(
            tokens,
            xgrammar.VocabType[vocab.vocab_type],
            vocab_size=size,
            stop_token_ids=vocab.stop_token_ids,
            add_prefix_space=vocab.add_prefix_space,
        )
        num_threads = max(1, (os.cpu_count() or 1) // 2)  # of one compilation
        self._compiler = xgrammar.GrammarCompiler(
            info, max_threads=num_threads, cache_enabled=False
        )
        self._permitted = _permitted(info.decoded_vocab, size)

    def compile_any(self, structured: StructuredOutput) -> Source:
        if structured.kind == "any":
            return AnyText()
        if structured.kind != "branches":
            return self.compile(structured)
        schemas = [StructuredOutput("json_schema", b.json_schema) for b in structured.branches]
        ids = [branch.token_ids for branch in structured.branches]
        return Branches(list(zip(ids, map(self.compile, schemas), strict=True)))

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Compile; raises InvalidRequestError with xgrammar's reason."""
        if not self.vocab.stop_token_ids:
            raise InvalidRequestError("structured output needs a model with an end-of-text token")
        num_bytes = len(structured.value.encode(errors="replace"))
        if num_bytes > MAX_SOURCE_BYTES:
            raise InvalidRequestError(
                f"the {structured.kind} is {num_bytes} bytes long, at most {MAX_SOURCE_BYTES} fit"
            )
        try:
            compiled = _compile(self._compiler, structured)
            permitted = self._permitted[structured.kind in ("json_object", "json_schema")]
            grammar = Grammar(compiled, self.vocab, permitted)
            _try(grammar, self.vocab)
        except (RuntimeError, UnicodeError, GrammarError) as error:
            reason = _CPP_PREFIX.sub("", str(error)).strip()
            raise InvalidRequestError(f"the {structured.kind} is not usable: {reason}") from error
        return grammar


def _permitted(decoded_vocab: list[bytes], vocab_size: int) -> dict[bool, Bitmask]:
    """The ids a grammar may ever allow: the vocabulary's; in JSON those without control characters.

    xgrammar allows the ids that pad the last word of a mask, and control characters in strings of
    bounded length, where JSON forbids them. Line breaks stay for the space between JSON tokens.
    """
    bits = np.zeros((2, -(-vocab_size // 32) * 32), np.uint8)
    bits[:, :vocab_size] = 1
    for token_id, text in enumerate(decoded_vocab):
        bits[1, token_id] = _CONTROL.search(text) is None
    words = np.packbits(bits, axis=-1, bitorder="little").view(np.int32)
    return {False: words[0], True: words[1]}


def _compile(compiler: Any, structured: StructuredOutput) -> Any:
    match structured.kind:
        case "json_object":
            return _compile_schema(compiler, {"type": "object"})
        case "json_schema":
            return _compile_schema(compiler, parse_json(structured.value, "json_schema"))
        case "regex":
            return compiler.compile_regex(structured.value)
        case "choice":
            return compiler.compile_grammar(_choice_grammar(structured.value))
        case "grammar":
            return compiler.compile_grammar(structured.value)
        case "structural_tag":
            tag = _checked_tag(parse_json(structured.value, "structural_tag"))
            return compiler.compile_structural_tag(json.dumps(tag))
        case "branches" | "any":
            raise InvalidRequestError("branches are compiled one by one")


def _compile_schema(compiler: Any, schema: Any) -> Any:
    text = json.dumps(_checked_schema(schema))
    return compiler.compile_json_schema(text, max_whitespace_cnt=MAX_WHITESPACE)


def _checked_schema(schema: Any) -> Any:
    import xgrammar

    checked = check_schema(schema)
    for pattern in patterns(checked):  # in a schema xgrammar ignores what it refuses in a regex
        xgrammar.Grammar.from_regex(pattern)
    return checked


def _checked_tag(node: Any) -> Any:
    if isinstance(node, list):
        return [_checked_tag(child) for child in node]
    if not isinstance(node, dict):
        return node
    checked = {key: _checked_tag(child) for key, child in node.items()}
    if node.get("type") == "json_schema":
        checked["json_schema"] = _checked_schema(node.get("json_schema"))
    return checked


def _choice_grammar(value: str) -> str:
    choices = parse_json(value, "choice")
    if not isinstance(choices, list) or not choices:
        raise InvalidRequestError("choice must be a JSON list of at least one string")
    if not all(isinstance(choice, str) for choice in choices):
        raise InvalidRequestError("choice must be a list of strings")
    # EBNF literals escape as JSON does, but know no surrogate pairs.
    literals = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return "root ::= " + " | ".join(literals)


def _try(grammar: Grammar, vocab: GrammarVocab) -> None:
    """Follow the grammar for some random tokens; raises GrammarError if that is no way to go."""
    matcher, choose = grammar.matcher(), random.Random(0)
    stop_ids = np.array(vocab.stop_token_ids)
    for _ in range(_TRIAL_TOKENS):
        started = time.thread_time()
        allowed = allowed_ids(matcher.allowed(), vocab.vocab_size)
        if time.thread_time() - started > MAX_MASK_S:
            raise GrammarError(
                "it is too ambiguous: choosing among its continuations takes too long"
            )
        allowed = allowed[~np.isin(allowed, stop_ids)]
        if not allowed.size:
            return
        matcher.accept(int(choose.choice(allowed)))
