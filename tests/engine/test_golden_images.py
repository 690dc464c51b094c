"""The same greedy answer to prompts with images in every mode, and that of transformers."""

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from driver import Answer, assert_same, build, complete
from engine import disaggregated
from scheduler_integrity import check_scheduler
from tiny_images import Prompt, image, prompt, reference_logits
from tiny_models import IMAGE_TOKENS, make_model, save, tame
from tokenmill.core.images import ImageInput
from tokenmill.core.requests import Engine, Generate, Request
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.engine.executors import DecodeExecutor
from tokenmill.sched.sequence import Batch, Sequence

LENGTH = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, logprobs=2)
LONG = replace(GREEDY, max_tokens=40)
SMALL, WIDE, TALL = image(1, (1, 4, 4)), image(2, (1, 4, 14)), image(3, (1, 12, 10))
OTHER = image(9, (1, 12, 10))  # as large as TALL
PROMPTS = [
    prompt(1, 20),
    prompt(2, 9, TALL, 14),
    prompt(2, 9, OTHER, 14),
    prompt(2, 9, TALL, 14, WIDE, 30),
    prompt(3, 5, TALL, SMALL, 2, WIDE, 11, SMALL),
    prompt(4, TALL, 7),
    prompt(5, 70),
    prompt(6, SMALL, WIDE, 1),
]
BLOCKS = {400: 0, 16: 1}  # enough, and so few that sequences are preempted


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for variant in ("qwen3-vl", "qwen3-vl-moe"):
        model = tame(make_model(variant), 0.3)
        folders[variant] = save(model, tmp_path_factory.mktemp(variant))
    return folders


def ask(engine: Engine, asked: list[Prompt]) -> list[Answer]:
    images = [each.images for each in asked]
    return complete(engine, [each.token_ids for each in asked], GREEDY, images=images)


@pytest.fixture(scope="module")
def golden(folders: dict[str, Path]) -> dict[str, list[Answer]]:
    """Each prompt alone, whole, with no cache and plenty of room."""
    answers: dict[str, list[Answer]] = {}
    for variant, folder in folders.items():
        built = build(folder, "fp32", chunked=False, prefix_cache=False, num_blocks=64)
        answers[variant] = [answer for each in PROMPTS for answer in ask(built.engine, [each])]
    return answers


def _is_text(token: int) -> bool:
    return token != IMAGE_TOKENS["image_token_id"]


@pytest.mark.parametrize("variant", ["qwen3-vl", "qwen3-vl-moe"])
def test_answers_are_those_of_transformers(
    variant: str, folders: dict[str, Path], golden: dict[str, list[Answer]]
) -> None:
    reference = tame(make_model(variant), 0.3)
    for asked, answer in zip(PROMPTS, golden[variant], strict=True):
        # transformers takes a placeholder that is said for one more image
        said = list(itertools.takewhile(_is_text, answer.token_ids))
        assert len(said) > 3
        logits = reference_logits(reference, asked._replace(token_ids=asked.token_ids + said[:-1]))
        assert logits[-len(said) :].argmax(-1).tolist() == said


@pytest.mark.parametrize(
    ("chunked", "prefix_cache", "num_blocks", "overlap"),
    list(itertools.product([False, True], [False, True], BLOCKS, [False, True])),
)
def test_every_mode_gives_the_golden_answer(
    folders: dict[str, Path],
    golden: dict[str, list[Answer]],
    chunked: bool,
    prefix_cache: bool,
    num_blocks: int,
    overlap: bool,
) -> None:
    variant = "qwen3-vl-moe" if overlap and chunked else "qwen3-vl"
    built = build(
        folders[variant], "fp32", chunked=chunked, prefix_cache=prefix_cache,
        num_blocks=num_blocks, overlap=overlap, encoder_patches=130,
    )  # fmt: skip
    engine = built.engine
    assert_same(ask(engine, PROMPTS), golden[variant])
    again = ask(engine, PROMPTS)
    assert_same(again, golden[variant])
    assert (engine.stats().num_preemptions > 0) == BLOCKS[num_blocks]
    if prefix_cache and num_blocks == 400:
        for asked, answer in zip(PROMPTS, again, strict=True):
            assert answer.num_cached_tokens == (len(asked.token_ids) - 1) // 16 * 16
    check_scheduler(engine._scheduler)
    assert engine.stats().num_kv_blocks_used == 0


def test_images_that_are_encoded_over_several_steps(
    folders: dict[str, Path], golden: dict[str, list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight requests decode meanwhile; the bits are those of an image encoded at once."""
    built = build(
        folders["qwen3-vl"], "fp32", chunked=True, prefix_cache=False, num_blocks=400,
        encoder_share=30,
    )  # fmt: skip
    engine, parts = built.engine, []
    assert built.runner.images is not None
    go_on = built.runner.images.go_on
    monkeypatch.setattr(built.runner.images, "go_on", lambda b: (parts.extend(b), go_on(b)))
    beside = replace(GREEDY, max_tokens=1000)
    for index in range(8):
        engine.submit(Request(f"text {index}", Generate([index, 3, 5], beside)))
    for _ in range(3):
        engine.step()
    for asked, expected in zip(PROMPTS, golden["qwen3-vl"], strict=True):
        answer = Answer()
        engine.submit(Request("0", Generate(asked.token_ids, GREEDY, images=asked.images)))
        for _ in range(60):
            for output in (each for each in engine.step() if each.request_id == "0"):
                answer.add(output)
        assert_same([answer], [expected])
    assert {round(each.share, 2) for each in parts} >= {0.25, 0.5, 0.75, 1.0}
    assert not built.runner.images._begun


def test_a_request_goes_on_where_another_engine_left_it(
    folders: dict[str, Path], golden: dict[str, list[Answer]]
) -> None:
    asked, expected = PROMPTS[3], golden["qwen3-vl"][3]
    built = build(folders["qwen3-vl"], "fp32", chunked=True, prefix_cache=True, num_blocks=64)
    known, rest = expected.token_ids[:3], Answer()
    request = Request(
        "0", Generate(asked.token_ids, GREEDY, output_token_ids=known, images=asked.images)
    )
    built.engine.submit(request)
    while built.engine.has_work():
        for output in built.engine.step():
            rest.add(output)
    assert known + rest.token_ids == expected.token_ids


def test_prompts_that_another_engine_computes(
    folders: dict[str, Path], golden: dict[str, list[Answer]]
) -> None:
    engines = [disaggregated.build(folders["qwen3-vl"], budget=48) for _ in range(2)]
    pool = disaggregated.WorkerPool(*engines)
    images = [each.images for each in PROMPTS]
    found = pool.complete([each.token_ids for each in PROMPTS], GREEDY, images)
    pool.close()
    assert [a.token_ids for a in found] == [a.token_ids for a in golden["qwen3-vl"]]
    assert engines[1]._scheduler.images.num_encoded == 0


def test_int8_sees_images(folders: dict[str, Path]) -> None:
    """In int8 all layers of steps without images run in one call, of those with images not."""
    answers = []
    for chunked in (False, True):
        built = build(
            folders["qwen3-vl"], "int8", chunked=chunked, prefix_cache=chunked, num_blocks=400
        )
        answers.append(ask(built.engine, PROMPTS))
    assert_same(*answers)
    assert answers[0][1].token_ids != answers[0][2].token_ids


def test_text_goes_on_while_images_are_encoded(folders: dict[str, Path]) -> None:
    """Each step encodes one image of the budget's size, and whoever decodes gets a token."""
    built = build(
        folders["qwen3-vl"], "fp32", chunked=True, prefix_cache=True, num_blocks=400,
        encoder_patches=120,
    )  # fmt: skip
    engine, images = built.engine, [image(20 + i, (1, 12, 10)) for i in range(4)]
    engine.submit(Request("text", Generate(PROMPTS[0].token_ids, LONG)))
    engine.step()
    for i, each in enumerate(images):
        asked = prompt(i, 3, each, 2)
        engine.submit(Request(str(i), Generate(asked.token_ids, GREEDY, images=asked.images)))
    encoded = [0]
    for _ in range(8):
        outputs = engine.step()
        encoded.append(engine._scheduler.images.num_encoded)
        assert "text" in [output.request_id for output in outputs]
    assert encoded[-1] == 4
    assert max(b - a for a, b in itertools.pairwise(encoded)) == 1
    assert built.runner.images is not None and len(built.runner.images) <= 2


def test_encoded_images_are_kept_and_bounded(folders: dict[str, Path]) -> None:
    built = build(
        folders["qwen3-vl"], "fp32", chunked=True, prefix_cache=False, num_blocks=400,
        encoder_patches=120,
    )  # fmt: skip
    engine, images = built.engine, built.runner.images
    assert images is not None
    for i in range(12):
        ask(engine, [prompt(i, 3, image(20 + i % 6, (1, 12, 10)), 2)])
        assert len(images) <= 2
    ask(engine, [prompt(99, 5, image(25, (1, 12, 10)), 4)])
    assert engine._scheduler.images.num_encoded == 12  # the last one was still there


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"offset": 100}, "images[0].offset must be behind the image before it and inside"),
        ({"num_tokens": 29}, "images[0].num_tokens must be 30 as its grid says, got 29"),
        ({"image": image(1, (1, 3, 4))}, "images[0].grid must be multiples of 2, got (1, 3, 4)"),
        ({"image": ImageInput.of(b"1234", TALL.grid)}, "120 patches of 96 float32 numbers"),
        ({"image": replace(TALL, levels=b"12")}, "images[0].levels must be 3072 bytes, got 2"),
    ],
)
def test_images_that_do_not_fit_are_rejected(
    folders: dict[str, Path], change: dict[str, object], says: str
) -> None:
    built = build(folders["qwen3-vl"], "fp32", chunked=True, prefix_cache=True, num_blocks=64)
    asked = PROMPTS[1]
    wrong = (replace(asked.images[0], **change),)  # type: ignore[arg-type]
    built.engine.submit(Request("0", Generate(asked.token_ids, GREEDY, images=wrong)))
    (output,) = built.engine.step()
    assert output.finish_reason is FinishReason.REJECT and says in str(output.error)


def test_a_model_without_vision_refuses_images(tmp_path: Path) -> None:
    save(tame(make_model("llama")), tmp_path)
    built = build(tmp_path, "fp32", chunked=True, prefix_cache=True, num_blocks=64)
    built.engine.submit(Request("0", Generate([1] * 60, GREEDY, images=PROMPTS[1].images)))
    (output,) = built.engine.step()
    assert output.finish_reason is FinishReason.REJECT
    assert output.error == "images: this model takes text alone"


def test_prompts_in_captured_shapes_are_rotated_alike(
    folders: dict[str, Path], golden: dict[str, list[Answer]]
) -> None:
    """The end of a prompt behind its images, and tokens after it, as graphs compute them."""
    built = build(folders["qwen3-vl"], "fp32", chunked=True, prefix_cache=True, num_blocks=400)
    ask(built.engine, PROMPTS)
    built.runner.add_prompt_graphs(0)
    graphs, shapes = built.runner.prompts.graphs, []
    assert graphs is not None
    run = graphs.run
    graphs.run = lambda item: (shapes.append(item[1]), run(item))[1]  # type: ignore[method-assign, func-returns-value]
    for asked, expected in zip(PROMPTS, golden["qwen3-vl"], strict=True):
        (answer,) = ask(built.engine, [asked])
        assert answer.token_ids == expected.token_ids
    assert len(shapes) >= 4


def test_decoding_in_captured_shapes_is_rotated_alike(folders: dict[str, Path]) -> None:
    """What a decode graph rotates by, from the device's table, is what the host says."""
    built = build(folders["qwen3-vl"], "fp32", chunked=True, prefix_cache=True, num_blocks=400)
    engine, builder = built.engine, built.runner.builder
    for i, asked in enumerate(PROMPTS[:4]):
        engine.submit(Request(str(i), Generate(asked.token_ids, LONG, images=asked.images)))
    for _ in range(16):
        engine.step()
    seqs = [seq for seq in engine._scheduler._queues.running if seq.num_output_tokens]
    assert len(seqs) == 4
    known = builder.build(Batch([(seq, 1) for seq in seqs], len(seqs))).attention.positions
    contexts, slots = (
        torch.tensor(each, dtype=torch.int32)
        for each in ([s.num_computed_tokens for s in seqs], [s.slot for s in seqs])
    )
    assert builder.turned(contexts, slots).tolist() == known.tolist()
    assert known.tolist() != contexts.tolist()


def test_drafts_from_the_prompt_change_nothing(
    folders: dict[str, Path], golden: dict[str, list[Answer]]
) -> None:
    built = build(
        folders["qwen3-vl"], "fp32", chunked=True, prefix_cache=True, num_blocks=400, mtp=3,
        draft=Path("ngram"),
    )  # fmt: skip
    assert_same(ask(built.engine, PROMPTS), golden["qwen3-vl"])
    assert sum(built.engine.stats().num_drafted) > 0


def test_no_decode_graph_takes_the_last_token_of_an_image() -> None:
    """It looks like a step of single tokens, but its embedding is a feature."""
    asked = prompt(4, 7, SMALL)
    ids = asked.token_ids[:-1]  # without the end of the image
    seq = Sequence(Request("a", Generate(ids, images=asked.images)), (0, 0, 0), 64, frozenset())
    seq.num_computed_tokens = len(ids) - 1
    executor = DecodeExecutor(None, None, None)  # type: ignore[arg-type]
    executor.graphs = object()  # type: ignore[assignment]
    assert executor.launch(Batch([(seq, 1)], 1, [])) is None
