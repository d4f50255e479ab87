"""Every request gets what transformers and PEFT would give it alone, whoever else is in the batch."""

import pytest
import torch
from engine import random_adapter, resident
from peft import PeftModel
from transformers import AutoModelForCausalLM

from marlaas.errors import RequestError
from marlaas.lora import export_peft
from marlaas.sampling.native import NativeSampler
from marlaas.sampling.protocol import Decoding, FinishReason, SamplingRequest
from marlaas_kernels.reference import cold_scores

pytestmark = pytest.mark.usefixtures("every_path")


@pytest.fixture(scope="module")
def adapters(tiny):
    return {
        "a/x/v1": random_adapter(tiny, 4, 1),
        "b/x/v1": random_adapter(tiny, 8, 2, ("q_proj", "v_proj", "down_proj")),
        "c/x/v3": random_adapter(tiny, 2, 3),
    }


@pytest.fixture(scope="module")
def peft(tiny, adapters, tmp_path_factory):
    """adapter name (or None) -> a transformers or PEFT model of it."""
    models = {None: AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32)}
    for name, (layout, vector) in adapters.items():
        folder = tmp_path_factory.mktemp("peft")
        for file, data in export_peft(layout, vector, tiny.transformer, "tiny-random").items():
            (folder / file).write_bytes(data)
        fresh = AutoModelForCausalLM.from_pretrained(tiny.folder, dtype=torch.float32)
        models[name] = PeftModel.from_pretrained(fresh, folder)
    return models


def request(tiny, prompt, adapter=None, decoding=Decoding.GREEDY, max_tokens=12, **fields):
    fields = {"owner": "t", "stop_ids": tiny.stop_ids} | fields
    ids = tuple(tiny.tokenizer(prompt)["input_ids"])
    return SamplingRequest(prompt=ids, adapter=adapter, decoding=decoding, max_tokens=max_tokens, **fields)


def serve(sampler, requests):
    samples = [None] * len(requests)
    for index, wanted in enumerate(requests):
        sampler.submit(wanted, lambda sample, index=index: samples.__setitem__(index, sample))
    while sampler.busy:
        sampler.step()
    return samples


def sampler_of(tiny, adapters, rows=8):
    return NativeSampler(tiny, resident(tiny, adapters), rows, 64)


def test_greedy_tokens_and_logprobs_of_a_mixed_batch_are_those_of_peft_alone(tiny, adapters, peft):
    prompts = ["hello", "a longer prompt, of more words", "x", "12 + 7 =", "the end"]
    wanted = [request(tiny, p, a) for p in prompts for a in (None, *adapters)]
    samples = serve(sampler_of(tiny, adapters), wanted)  # eight rows for twenty requests: they join and leave
    for ask, got in zip(wanted, samples, strict=True):
        ids = torch.tensor([ask.prompt])
        output = peft[ask.adapter].generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        assert got.tokens == output.sequences[0, ids.shape[1] :].tolist()
        expected = [float(logits[0].log_softmax(-1)[t]) for logits, t in zip(output.logits, got.tokens, strict=True)]
        assert got.logprobs == pytest.approx(expected, abs=1e-4)
    assert len({tuple(s.tokens) for s in samples[:4]}) == 4, "the adapters must change what is said"


def test_many_adapters_of_one_shape_say_in_a_batch_what_each_says_alone(tiny):
    """Short segments of equal shape are one batch of products; alone, an adapter is a segment by itself."""
    many = {f"t{i}/x/v1": random_adapter(tiny, 4, i) for i in range(9)}
    many |= {f"q{i}/x/v1": random_adapter(tiny, 2, 20 + i, ("q_proj", "down_proj")) for i in range(4)}
    wanted = [
        request(tiny, f"hello {i % 3}", name, Decoding.COLD if i % 5 == 0 else Decoding.GREEDY)
        for i, name in enumerate([*many, None, *many])
    ]
    together = serve(NativeSampler(tiny, resident(tiny, many, slots=20), 32, 64), wanted)
    for ask, got in zip(wanted, together, strict=True):
        alone = serve(NativeSampler(tiny, resident(tiny, many, slots=2), 2, 64), [ask])[0]
        assert got.tokens == alone.tokens
        assert got.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert len({tuple(s.tokens) for s in together}) > 10, "the adapters must differ"


def test_cold_is_the_plain_two_model_definition(tiny, adapters, peft):
    wanted = [
        request(tiny, p, a, Decoding.COLD, alpha=alpha, beta=beta)
        for p in ("hello", "12 + 7 =")
        for a in adapters
        for alpha, beta in ((0.1, 0.5), (0.02, 2.0), (1.0, 3.0), (0.1, 0.0))
    ]
    samples = serve(sampler_of(tiny, adapters, rows=7), wanted)
    greedy = serve(sampler_of(tiny, adapters), [request(tiny, "hello", a) for a in adapters])
    for ask, got in zip(wanted, samples, strict=True):
        tokens = list(ask.prompt)
        with torch.no_grad():
            for token, logprob in zip(got.tokens, got.logprobs, strict=True):
                expert, amateur = (peft[m](torch.tensor([tokens])).logits[0, -1] for m in (ask.adapter, None))
                scores = cold_scores(expert, amateur, ask.alpha, ask.beta)
                assert token == int(scores.argmax())
                assert logprob == pytest.approx(float(scores.log_softmax(-1)[token]), abs=1e-4)
                tokens.append(token)
    for ask, got in zip(wanted[2:12:4], greedy, strict=True):
        assert samples[wanted.index(ask)].tokens == got.tokens, "alpha = 1 is greedy"
    contrasted = [s.tokens for s, ask in zip(samples, wanted, strict=True) if ask.beta == 2.0]
    plain = [s.tokens for s, ask in zip(samples, wanted, strict=True) if ask.beta == 0.0]
    assert contrasted != plain


def test_a_sampled_request_does_not_depend_on_its_company(tiny, adapters):
    asks = [
        request(tiny, "hello", "a/x/v1", Decoding.SAMPLE, seed=seed, temperature=0.7, top_k=20, top_p=0.9)
        for seed in range(4)
    ]
    crowd = [request(tiny, f"noise {i}", a, Decoding.SAMPLE, seed=i) for i in range(9) for a in (None, *adapters)]
    together = serve(sampler_of(tiny, adapters, rows=16), [*crowd, *asks])[len(crowd) :]
    alone = [serve(sampler_of(tiny, adapters), [ask])[0] for ask in asks]
    assert [s.tokens for s in together] == [s.tokens for s in alone]
    assert len({tuple(s.tokens) for s in alone}) > 1, "seeds must matter"


def test_recorded_logprobs_are_those_of_the_distribution_sampled_from(tiny, adapters, peft):
    ask = request(tiny, "hello", "a/x/v1", Decoding.SAMPLE, temperature=0.6, top_k=7, top_p=0.8, max_tokens=20)
    got = serve(sampler_of(tiny, adapters), [ask])[0]
    tokens = list(ask.prompt)
    for token, logprob in zip(got.tokens, got.logprobs, strict=True):
        with torch.no_grad():
            logits = peft["a/x/v1"](torch.tensor([tokens])).logits[0, -1] / 0.6
        kept = logits.topk(7).indices
        probs = logits[kept].softmax(-1)
        nucleus = kept[: int((probs.cumsum(-1) < 0.8).sum()) + 1]
        assert token in nucleus
        assert logprob == pytest.approx(float(logits[nucleus].log_softmax(-1)[nucleus == token]), abs=1e-4)
        tokens.append(token)


def test_stop_ids_and_stop_strings_end_a_completion(tiny, adapters):
    sampler = sampler_of(tiny, adapters)
    whole = serve(sampler, [request(tiny, "hello", max_tokens=20)])[0]
    assert whole.finish_reason == FinishReason.LENGTH
    by_id = serve(sampler, [request(tiny, "hello", max_tokens=20, stop_ids=frozenset({whole.tokens[6]}))])[0]
    end = whole.tokens.index(whole.tokens[6]) + 1
    assert by_id.tokens == whole.tokens[:end], "the stop token is sampled, so it is kept"
    assert by_id.finish_reason == FinishReason.STOP
    cut = whole.text[3:5]
    by_text = serve(sampler, [request(tiny, "hello", max_tokens=20, stop=(cut, "never seen"))])[0]
    assert by_text.finish_reason == FinishReason.STOP
    assert by_text.text == whole.text[: whole.text.index(cut)]
    assert len(by_text.tokens) < len(whole.tokens)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"adapter": "a/x/v9"}, "a/x/v9 is not resident"),
        ({"max_tokens": 100}, "do not fit in pool.max_sequence_tokens 64"),
        ({"prompt": ""}, "prompt is empty"),
        ({"decoding": Decoding.COLD}, "needs an adapter"),
        ({"temperature": 0.0}, "temperature > 0"),
        ({"decoding": Decoding.COLD, "adapter": "a/x/v1", "alpha": 0.0}, "0 < alpha <= 1"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_at_once(tiny, adapters, change, says):
    sampler = sampler_of(tiny, adapters)
    with pytest.raises(RequestError, match="t: .*" + says.replace("(", r"\(")):
        sampler.submit(request(tiny, **({"prompt": "hello"} | change)), print)
    assert not sampler.busy


def test_a_capped_owner_never_runs_more_than_its_cap(tiny, adapters):
    sampler = sampler_of(tiny, adapters)
    sampler.queue.set_share("t", weight=1.0, cap=2)
    for i in range(6):
        sampler.submit(request(tiny, f"p{i}"), lambda sample: None)
    seen = set()
    while sampler.busy:
        sampler.step()
        seen.add(sampler.running)
    assert max(seen) == 2
