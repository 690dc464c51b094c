"""Tokenizers and chat templates against transformers, from folders and from GGUF files."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import pytest
import xgrammar
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tiny_tokenizers import HERMES_TEMPLATE, byte_fallback, byte_level, save_folder, save_gguf
from tokenmill.core.specs.gguf import read_gguf_header
from tokenmill.core.types import InvalidRequestError, ModelLoadError
from tokenmill.text.gguf_tokenizer import PRE_TOKENIZERS
from tokenmill.text.tokenizer import Tokenizer, load_tokenizer

TEXTS = [
    "",
    " ",
    "Hello world! Hello there.",
    "  two spaces, and three   here; a tab\tand a newline\n\n  x",
    "trailing  ",
    "\r\nWindows\r\n",
    "don't I'LL we've 12 3456789 3.14 a1b2",
    "größer, señor, e\u0301te\u0301",
    "数字 123 和 мир 한국어 हिन्दी",
    "😀👍🏽🇺🇸❤️ \u200b zero width",
    "def f(x):\n    return x ** 2  # ok",
    "<|im_start|>user\nhi<|im_end|> <think>x</think> <s></s> <unk> <0x0A>",
]
QUICK = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'What it\'s like <outside> & "é"',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather in São Paulo?"},
    {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "São Paulo"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "<sunny>"},
    {"role": "assistant", "content": "Sunny."},
    {"role": "user", "content": "Thanks 😀"},
]
CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello! <b>you</b>"},
    {"role": "user", "content": "How are you?\n"},
]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def smollm2_reference(smollm2_path: Path) -> PreTrainedTokenizerFast:
    """transformers' reading of the same file, with the digit split of the published tokenizer.json.

    Its GGUF loader does not know the pre-tokenizer "smollm" and takes GPT-2's.
    """
    reference = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    reference.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return reference


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte_level")
    return save_folder(
        byte_level(),
        folder,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=HERMES_TEMPLATE,
    )


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("byte_fallback")
    return save_folder(
        byte_fallback(),
        folder,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        add_bos_token=True,
    )


@pytest.fixture(scope="module")
def sentencepiece_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    ids = {"ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "ggml.unknown_token_id": 0}
    return save_gguf(byte_fallback(), file, **ids)


@pytest.fixture(scope="module")
def ours(chat_folder: Path) -> Tokenizer:
    return load_tokenizer(chat_folder)


@pytest.fixture(scope="module")
def reference(chat_folder: Path) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(chat_folder)


def assert_same_encoding(ours: Tokenizer, reference: PreTrainedTokenizerFast, text: str) -> None:
    for special in (True, False):
        ids = ours.encode(text, add_special_tokens=special)
        assert ids == reference.encode(text, add_special_tokens=special)
        for skip in (True, False):
            expected = reference.decode(ids, skip_special_tokens=skip)
            assert ours.decode(ids, skip_special_tokens=skip) == expected


class TestSmolLM2:
    @pytest.mark.parametrize("text", TEXTS)
    def test_encodes_and_decodes_as_transformers(
        self, smollm2: Tokenizer, smollm2_reference: PreTrainedTokenizerFast, text: str
    ) -> None:
        assert_same_encoding(smollm2, smollm2_reference, text)

    @QUICK
    @given(text=st.text(max_size=40))
    def test_any_text(
        self, smollm2: Tokenizer, smollm2_reference: PreTrainedTokenizerFast, text: str
    ) -> None:
        assert_same_encoding(smollm2, smollm2_reference, text)

    def test_published_ids(self, smollm2: Tokenizer) -> None:
        assert smollm2.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
        assert smollm2.encode("  multiple   spaces") == [216, 2701, 256, 5600]
        assert smollm2.encode("<|im_start|>user\n") == [1, 4093, 198]

    def test_special_ids(
        self, smollm2: Tokenizer, smollm2_reference: PreTrainedTokenizerFast
    ) -> None:
        assert smollm2.vocab_size == len(smollm2_reference) == 49152
        assert smollm2.bos_token_id == smollm2_reference.bos_token_id == 1
        assert smollm2.eos_token_ids[0] == smollm2_reference.eos_token_id == 2
        assert set(smollm2.eos_token_ids) == {0, 2}
        assert smollm2.special_token_ids == frozenset(range(17))

    @pytest.mark.parametrize("messages", [CHAT[:1], CHAT, CONVERSATION[:2]])
    @pytest.mark.parametrize("generate", [True, False])
    def test_chat_template(
        self,
        smollm2: Tokenizer,
        smollm2_reference: PreTrainedTokenizerFast,
        messages: list[dict[str, Any]],
        generate: bool,
    ) -> None:
        expected = smollm2_reference.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate
        )
        assert smollm2.apply_chat_template(messages, add_generation_prompt=generate) == expected
        assert smollm2.encode_chat(
            messages, add_generation_prompt=generate
        ) == smollm2_reference.encode(expected, add_special_tokens=False)

    def test_tool_turns_reach_a_template_without_tools(self, smollm2: Tokenizer) -> None:
        call = CONVERSATION[2] | {"content": None}
        prompt = smollm2.apply_chat_template([CONVERSATION[1], call, CONVERSATION[3]])
        assert "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n<sunny><|im_end|>" in prompt

    def test_token_bytes_join_to_the_text(self, smollm2: Tokenizer) -> None:
        text = "naïve 😀 数字\n<|im_end|>"
        ids = smollm2.encode(text)
        assert b"".join(smollm2.token_to_bytes(i) for i in ids) == text.encode()
        assert smollm2.token_to_bytes(10**6) == b""
        assert smollm2.id_to_token(2) == "<|im_end|>"
        assert smollm2.token_to_id("<|im_end|>") == 2

    def test_threads_get_the_same_ids(self, smollm2: Tokenizer) -> None:
        texts = [text * 20 for text in TEXTS]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(smollm2.encode, texts)) == smollm2.encode_batch(texts)


class TestFolder:
    @pytest.mark.parametrize("text", TEXTS)
    @pytest.mark.parametrize("kind", ["chat_folder", "sentencepiece_folder"])
    def test_encodes_and_decodes_as_transformers(
        self, request: pytest.FixtureRequest, kind: str, text: str
    ) -> None:
        folder = request.getfixturevalue(kind)
        assert_same_encoding(load_tokenizer(folder), AutoTokenizer.from_pretrained(folder), text)

    @pytest.mark.parametrize(("bos", "eos"), [(True, True), (False, True), (False, False)])
    def test_bos_and_eos_flags(self, tmp_path: Path, bos: bool, eos: bool) -> None:
        folder = save_folder(
            byte_fallback(),
            tmp_path,
            bos_token="<s>",
            eos_token="</s>",
            add_bos_token=bos,
            add_eos_token=eos,
        )
        ids = load_tokenizer(folder).encode("the dog")
        assert ids == AutoTokenizer.from_pretrained(folder).encode("the dog")
        assert (ids[0] == 1, ids[-1] == 2) == (bos, eos)

    def test_tokens_that_only_the_config_knows(self, chat_folder: Path, tmp_path: Path) -> None:
        for file in chat_folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        size = load_tokenizer(chat_folder).vocab_size
        config = json.loads((tmp_path / "tokenizer_config.json").read_text())
        entry = {"content": "<|extra|>", "special": True, "normalized": False}
        config["added_tokens_decoder"] = {str(size): entry}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        ours = load_tokenizer(tmp_path)
        assert ours.encode("a<|extra|>b", add_special_tokens=False)[1] == size
        assert size in ours.special_token_ids
        config["added_tokens_decoder"] = {str(size + 5): entry}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with pytest.raises(ModelLoadError, match=r"added_tokens_decoder\[\d+\]"):
            load_tokenizer(tmp_path)

    def test_end_tokens_join_generation_config(self, chat_folder: Path, tmp_path: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((chat_folder / name).read_bytes())
        assert load_tokenizer(tmp_path).eos_token_ids == (2,)
        (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
        assert load_tokenizer(tmp_path).eos_token_ids == (2, 7)
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
        assert load_tokenizer(tmp_path).eos_token_ids == (2, 0)

    def test_sampling_defaults_are_those_of_generation_config(
        self, chat_folder: Path, tmp_path: Path
    ) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((chat_folder / name).read_bytes())
        assert load_tokenizer(tmp_path).sampling_defaults() == {}
        file = tmp_path / "generation_config.json"
        file.write_text('{"temperature": 0.6, "top_k": 20, "top_p": null, "do_sample": true}')
        ours = load_tokenizer(tmp_path)
        assert ours.sampling_defaults() == {"temperature": 0.6, "top_k": 20}
        assert ours.sampling_defaults("none") == {}
        for wrong, named in (
            ('{"top_p": "x"}', "top_p: expected a number, got 'x'"),
            ('{"top_k": 1.5}', "top_k: expected a number"),
            ('{"temperature": true}', "temperature: expected a number"),
            ('{"min_p": 2}', "min_p must be"),
        ):
            file.write_text(wrong)
            with pytest.raises(ModelLoadError, match=rf"generation_config\.json: {named}"):
                load_tokenizer(tmp_path)

    def test_missing_and_broken_files_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json: not found"):
            load_tokenizer(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(ModelLoadError, match=r"tokenizer\.json: not a usable tokenizer"):
            load_tokenizer(tmp_path)
        save_folder(byte_level(), tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("{")
        with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: not valid JSON"):
            load_tokenizer(tmp_path)

    def test_lone_surrogates_and_bad_ids_are_refused(self, chat_folder: Path) -> None:
        ours = load_tokenizer(chat_folder)
        with pytest.raises(InvalidRequestError, match="surrogate at position 1") as caught:
            ours.encode("a\ud800")
        assert caught.value.param == "prompt"
        with pytest.raises(InvalidRequestError) as caught:
            ours.apply_chat_template([{"role": "user", "content": "\udfff"}])
        assert caught.value.param == "messages"
        for bad in (-1, ours.vocab_size):
            with pytest.raises(InvalidRequestError, match=str(bad)):
                ours.decode([1, bad])


class TestGguf:
    def test_metadata_as_the_gguf_package_reads_it(self, sentencepiece_gguf: Path) -> None:
        found = read_gguf_header(sentencepiece_gguf).metadata
        fields = gguf.GGUFReader(sentencepiece_gguf).fields
        assert [key for key in fields if not key.startswith("GGUF.")] == list(found)
        for key, value in found.items():
            assert fields[key].contents() == value

    def test_sentencepiece_as_transformers(self, sentencepiece_gguf: Path) -> None:
        ours = load_tokenizer(sentencepiece_gguf)
        reference = AutoTokenizer.from_pretrained(
            sentencepiece_gguf.parent, gguf_file=sentencepiece_gguf.name
        )
        # transformers adds no second space before a leading one, SentencePiece does
        for text in (text for text in TEXTS if text[:1] != " " and "<" not in text):
            ids = ours.encode(text, add_special_tokens=False)
            assert ids == reference.encode(text, add_special_tokens=False)
            assert ours.decode(ids) == reference.decode(ids) == text
            assert ours.encode(text) == [1, *ids]

    @pytest.mark.parametrize("text", TEXTS)
    def test_sentencepiece_as_its_folder(
        self, sentencepiece_folder: Path, sentencepiece_gguf: Path, text: str
    ) -> None:
        folder = load_tokenizer(sentencepiece_folder)
        assert load_tokenizer(sentencepiece_gguf).encode(text) == folder.encode(text)

    @pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "tekken", "gpt-4o", "gpt-2", "qwen35"])
    def test_byte_level_as_transformers(self, tmp_path: Path, pre: str) -> None:
        fields = {"ggml.pre": pre, "ggml.bos_token_id": 1, "ggml.eos_token_id": 2}
        file = save_gguf(byte_level(), tmp_path / "m.gguf", **fields)
        ours = load_tokenizer(file)
        reference = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
        for text in TEXTS:
            text = text.replace("e\u0301", "é")  # transformers leaves out Qwen's NFC
            ids = ours.encode(text, add_special_tokens=False)
            assert ids == reference.encode(text, add_special_tokens=False)
        assert ours.encode("hi")[:1] == ([1] if PRE_TOKENIZERS[pre].add_bos else ours.encode("h"))

    def test_qwen_text_is_normalised(self, tmp_path: Path) -> None:
        file = save_gguf(byte_level(), tmp_path / "m.gguf", **{"ggml.pre": "qwen2"})
        ours = load_tokenizer(file)
        assert ours.encode("e\u0301te\u0301") == ours.encode("été")

    @pytest.mark.parametrize("pre", PRE_TOKENIZERS)
    def test_every_split_keeps_the_text(self, tmp_path: Path, pre: str) -> None:
        file = save_gguf(byte_level(), tmp_path / "m.gguf", **{"ggml.pre": pre})
        ours = load_tokenizer(file)
        text = " ".join(TEXTS).replace("e\u0301", "é")
        ids = ours.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=False) == text

    def test_flags_and_templates(self, tmp_path: Path) -> None:
        fields = {
            "ggml.pre": "gpt-2",
            "ggml.bos_token_id": 1,
            "ggml.eos_token_id": 0,
            "ggml.add_bos_token": True,
            "ggml.add_eos_token": True,
            "chat_template": "plain",
            "chat_template.tool_use": "{{ tools[0].function.name }}",
        }
        ours = load_tokenizer(save_gguf(byte_level(), tmp_path / "m.gguf", **fields))
        ids = ours.encode("hi")
        assert (ids[0], ids[-1]) == (1, 0)
        assert set(ours.eos_token_ids) == {0, 2}  # <|im_end|> ends a turn too
        assert ours.apply_chat_template(CHAT) == "plain"
        assert ours.apply_chat_template(CHAT, tools=TOOLS) == "weather"

    def test_what_is_not_supported_is_named(self, tmp_path: Path) -> None:
        file = save_gguf(byte_level(), tmp_path / "m.gguf", **{"ggml.pre": "martian"})
        with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.pre: 'martian' is not known"):
            load_tokenizer(file)
        file.write_bytes(file.read_bytes().replace(b"gpt2", b"bert"))
        with pytest.raises(ModelLoadError, match=r"tokenizer\.ggml\.model: 'bert'"):
            load_tokenizer(file)
        for content in (b"", b"no gguf at all, not a bit of it", file.read_bytes()[:400]):
            file.write_bytes(content)
            with pytest.raises(ModelLoadError, match=r"m\.gguf: (not a GGUF|the GGUF header)"):
                load_tokenizer(file)
        with pytest.raises(ModelLoadError, match="absent"):
            load_tokenizer(tmp_path / "absent.gguf")


class TestChatTemplate:
    @pytest.mark.parametrize("tools", [None, TOOLS])
    @pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
    def test_tools_and_turns_as_transformers(
        self,
        ours: Tokenizer,
        reference: PreTrainedTokenizerFast,
        tools: list[dict[str, Any]] | None,
        options: dict[str, Any],
    ) -> None:
        expected = reference.apply_chat_template(
            CONVERSATION, tools=tools, tokenize=False, add_generation_prompt=True, **options
        )
        assert ours.apply_chat_template(CONVERSATION, tools=tools, **options) == expected
        ids = ours.encode_chat(CONVERSATION, tools=tools, **options)
        assert ids == reference.encode(expected, add_special_tokens=False)

    def test_openai_spelling_renders_the_same(self, ours: Tokenizer) -> None:
        sent = json.loads(json.dumps(CONVERSATION))
        sent[2]["tool_calls"][0]["function"]["arguments"] = '{"city": "São Paulo"}'
        sent[1]["content"] = [{"type": "text", "text": "Weather in São Paulo?"}]
        sent[1]["name"] = sent[4]["tool_calls"] = sent[4]["reasoning_content"] = None
        assert ours.apply_chat_template(sent) == ours.apply_chat_template(CONVERSATION)

    @pytest.mark.parametrize("text", ["It is", "It is  ", ""])
    def test_continued_message_as_transformers(
        self, ours: Tokenizer, reference: PreTrainedTokenizerFast, text: str
    ) -> None:
        messages = [*CHAT, {"role": "assistant", "content": text}]
        expected = reference.apply_chat_template(
            messages, tokenize=False, continue_final_message=True
        )
        assert ours.apply_chat_template(messages, continue_final_message=True) == expected

    def test_continuing_through_a_template_that_trims(self, chat_folder: Path) -> None:
        trims = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
        ours = load_tokenizer(chat_folder, trims)
        reference = AutoTokenizer.from_pretrained(chat_folder)
        messages = [{"role": "assistant", "content": " So  "}]
        assert ours.apply_chat_template(
            messages, continue_final_message=True
        ) == reference.apply_chat_template(
            messages, chat_template=trims, tokenize=False, continue_final_message=True
        )

    @pytest.mark.parametrize(
        "template",
        [
            "{% for m in messages %}\n  {% generation %}{{ m.content }}{% endgeneration %}\n"
            "{% endfor %}",
            "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m }}"
            "{% endfor %}",
            "{{ messages | tojson }}|{{ messages | tojson(indent=2) }}|{{ '<é>' | tojson }}",
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
            "{% endfor %}{{ ns.n }}{{ bos_token }}{{ eos_token }}{{ pad_token }}",
            "{{ strftime_now('%Y') | length }}{{ dict(a=1) | tojson }}{{ tools is none }}",
            "{{ messages[0]['content'].split('i')[0] }}{{ messages[-1].content.strip() }}",
        ],
    )
    def test_jinja_as_transformers(
        self, chat_folder: Path, reference: PreTrainedTokenizerFast, template: str
    ) -> None:
        expected = reference.apply_chat_template(CHAT, chat_template=template, tokenize=False)
        ours = load_tokenizer(chat_folder, template)
        assert ours.apply_chat_template(CHAT, add_generation_prompt=False) == expected

    def test_parts_reach_a_template_that_wants_them(self, chat_folder: Path) -> None:
        template = (
            "{% for m in messages %}{% for p in m['content'] %}({{ p.text }}){% endfor %}"
            "{% endfor %}"
        )
        parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
        messages = [{"role": "user", "content": parts}, {"role": "user", "content": "c"}]
        ours = load_tokenizer(chat_folder, template)
        assert ours.apply_chat_template(messages) == "(a)(b)(c)"
        assert ours.apply_chat_template(messages, continue_final_message=True) == "(a)(b)(c"
        plain = load_tokenizer(chat_folder, "{% for m in messages %}({{ m.content }}){% endfor %}")
        assert plain.apply_chat_template(messages) == "(a\nb)(c)"

    def test_null_content_and_roles(self, chat_folder: Path) -> None:
        messages = [{"role": "developer", "content": "d"}, {"role": "assistant", "content": None}]
        plain = load_tokenizer(
            chat_folder, "{% for m in messages %}{{ m.role + m.content }},{% endfor %}"
        )
        assert plain.apply_chat_template(messages) == "systemd,assistant,"
        nulls = (
            "{% for m in messages %}{{ m.role }}{{ m['content'] is none }},{% endfor %}developer"
        )
        tests = load_tokenizer(chat_folder, nulls)
        assert tests.apply_chat_template(messages) == "developerFalse,assistantTrue,developer"

    def test_reasoning_under_any_name_as_transformers(
        self, chat_folder: Path, reference: PreTrainedTokenizerFast
    ) -> None:
        template = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}"
        ours = load_tokenizer(chat_folder, template)
        for name in ("reasoning_content", "thinking", "reasoning"):
            messages = [{"role": "assistant", "content": "a", name: "why"}]
            assert ours.apply_chat_template(messages) == reference.apply_chat_template(
                messages, chat_template=template, tokenize=False
            )

    @pytest.mark.parametrize("save_jinja_files", [True, False])
    def test_named_templates(self, tmp_path: Path, save_jinja_files: bool) -> None:
        templates = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ tools | length }}"}
        saved = PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=templates)
        saved.save_pretrained(tmp_path, save_jinja_files=save_jinja_files)
        ours = load_tokenizer(tmp_path)
        reference = AutoTokenizer.from_pretrained(tmp_path)
        for tools in (None, TOOLS):
            expected = reference.apply_chat_template(CHAT, tools=tools, tokenize=False)
            assert ours.apply_chat_template(CHAT, tools=tools) == expected

    def test_override_from_a_file(self, chat_folder: Path, tmp_path: Path) -> None:
        file = tmp_path / "mine.jinja"
        file.write_text("mine: {{ messages[0].content }}", encoding="utf-8")
        ours = load_tokenizer(chat_folder, str(file))
        assert ours.apply_chat_template(CHAT) == "mine: Hi"
        assert ours.chat_template == "mine: {{ messages[0].content }}"
        with pytest.raises(ModelLoadError, match=r"absent\.jinja"):
            load_tokenizer(chat_folder, "absent.jinja")
        with pytest.raises(ModelLoadError, match="chat template"):
            load_tokenizer(chat_folder, "{% for %}")

    @pytest.mark.parametrize(
        ("template", "messages", "words"),
        [
            ("{{ raise_exception('roles must alternate') }}", CHAT, "roles must alternate"),
            ("{{ messages[9].content }}", CHAT, "refuses"),
            ("{{ 1 + messages[0].content }}", CHAT, "refuses"),
            ("{{ messages.append(1) }}", CHAT, "refuses"),
            ("{{ ''.__class__.__mro__ }}", CHAT, "refuses"),
            ("x", [{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'"),
            ("x", [{"role": "user", "content": [{"type": "text"}]}], "must have text"),
            ("x", [], "must not be empty"),
        ],
    )
    def test_refusals(
        self, chat_folder: Path, template: str, messages: list[dict[str, Any]], words: str
    ) -> None:
        ours = load_tokenizer(chat_folder, template if "{" in template else "{#-#}" + template)
        with pytest.raises(InvalidRequestError, match=words) as caught:
            ours.apply_chat_template(messages)
        assert caught.value.param == "messages"

    def test_no_template_and_contradictions(
        self, sentencepiece_folder: Path, ours: Tokenizer
    ) -> None:
        bare = load_tokenizer(sentencepiece_folder)
        assert bare.chat_template is None
        with pytest.raises(InvalidRequestError, match="no chat template") as caught:
            bare.apply_chat_template(CHAT)
        assert caught.value.param == "messages"
        with pytest.raises(InvalidRequestError, match="exclude each other"):
            ours.apply_chat_template(CHAT, add_generation_prompt=True, continue_final_message=True)
        with pytest.raises(InvalidRequestError, match="needs text"):
            nulls = "{{ messages[0].content is none }}"
            empty = load_tokenizer(sentencepiece_folder, nulls)
            empty.apply_chat_template([{"role": "assistant"}], continue_final_message=True)


class TestGrammarVocab:
    @pytest.mark.parametrize("kind", ["chat_folder", "sentencepiece_folder"])
    def test_as_xgrammar_reads_the_tokenizer(
        self, request: pytest.FixtureRequest, kind: str
    ) -> None:
        folder = request.getfixturevalue(kind)
        ours = load_tokenizer(folder)
        vocab = ours.grammar_vocab(vocab_size=ours.vocab_size + 3)
        info = xgrammar.TokenizerInfo(
            vocab.encoded_vocab,
            xgrammar.VocabType[vocab.vocab_type],
            vocab_size=vocab.vocab_size,
            stop_token_ids=vocab.stop_token_ids,
            add_prefix_space=vocab.add_prefix_space,
        )
        reference = xgrammar.TokenizerInfo.from_huggingface(
            AutoTokenizer.from_pretrained(folder),
            vocab_size=vocab.vocab_size,
            stop_token_ids=vocab.stop_token_ids,
        )
        assert info.vocab_type == reference.vocab_type
        assert info.vocab_size == reference.vocab_size
        assert info.add_prefix_space == reference.add_prefix_space
        for index, expected in enumerate(reference.decoded_vocab):
            found = info.decoded_vocab[index]
            assert found == (b"" if index in ours.special_token_ids else expected)

    def test_no_grammar_emits_a_special_token(self, smollm2: Tokenizer) -> None:
        vocab = smollm2.grammar_vocab()
        assert [vocab.encoded_vocab[i] for i in range(17)] == [""] * 17
        assert vocab.encoded_vocab[17] == "!"
        assert vocab.stop_token_ids == [2, 0]


def test_loading_needs_no_torch(chat_folder: Path) -> None:
    code = f"""
import sys
from tokenmill.text.detokenize import Detokenizer
from tokenmill.text.parsers import HermesParser
from tokenmill.text.tokenizer import load_tokenizer
load_tokenizer({str(chat_folder)!r}).encode("hi")
print(sorted({{"torch", "transformers", "gguf", "xgrammar", "numpy"}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"
