"""Every option lands where it belongs; what its value may be is tested with `SamplingParams` and `CacheConfig`."""

import pytest
from typer import Typer
from typer.testing import CliRunner

from kvine import hub
from kvine.cli import options
from kvine.cli.options import CacheOptions, ModelOptions, SamplingOptions, spread_options
from kvine.config import CacheConfig, EngineConfig
from kvine.errors import RequestError
from kvine.sampling.params import SamplingParams


def parsed(*arguments: str) -> tuple[SamplingOptions, CacheOptions, ModelOptions]:
    found = []
    app = Typer()

    @app.command()
    @spread_options
    def command(sampling: SamplingOptions, cache: CacheOptions, model: ModelOptions) -> None:
        found.append((sampling, cache, model))

    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return found[0]


def test_defaults_are_those_of_the_library():
    sampling, cache, model = parsed()
    assert sampling.params() == SamplingParams()
    assert cache.configs() == (CacheConfig(), EngineConfig())
    assert model == ModelOptions(hub.DEFAULT_MODEL, "auto", "auto", "auto", None)
    assert options.DEFAULT_MODEL == hub.DEFAULT_MODEL


def test_each_sampling_option():
    sampling, _, _ = parsed(
        *("--max-tokens", "11", "--min-tokens", "3", "--temperature", "0.5", "--top-k", "-1", "--top-p", "0.9"),
        *("--min-p", "0.1", "--repetition-penalty", "1.2", "--presence-penalty", "-0.3", "--frequency-penalty", "0.4"),
        *(
            "--penalty-window",
            "64",
            "--logit-bias",
            "7=-inf",
            "--logit-bias",
            "8=2.5",
            "--seed",
            "9",
            "--logprobs",
            "2",
        ),
        *("--stop", "a b", "--stop", "\n", "--stop-token-id", "5", "--stop-token-id", "6", "--ignore-eos"),
    )
    assert sampling.params() == SamplingParams(
        max_tokens=11,
        min_tokens=3,
        temperature=0.5,
        top_k=-1,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=-0.3,
        frequency_penalty=0.4,
        penalty_window=64,
        logit_bias={7: float("-inf"), 8: 2.5},
        seed=9,
        logprobs=2,
        stop=("a b", "\n"),
        stop_token_ids=(5, 6),
        ignore_eos=True,
    )


def test_each_cache_and_model_option():
    _, cache, model = parsed(
        *("--kv-memory", "2GiB", "--kv-dtype", "fp16", "--block-size", "8", "--window", "64", "--sinks", "4"),
        *(
            "--sink-rule",
            "in_cache",
            "--global-tokens",
            "4:6,0:2",
            "--no-prefix-caching",
            "--max-step-tokens",
            "99",
            "--backend",
            "reference",
        ),
        *("-m", "some/model", "--device", "cpu", "--dtype", "fp32", "--weights", "packed", "--threads", "3"),
    )
    assert cache.configs() == (
        CacheConfig(
            8, "2GiB", "fp16", 64, 4, sink_rule="in_cache", global_tokens=((4, 6), (0, 2)), prefix_caching=False
        ),
        EngineConfig(max_step_tokens=99, backend="reference"),
    )
    assert model == ModelOptions("some/model", "cpu", "fp32", "packed", 3)


def test_a_group_keeps_nothing_from_one_call_to_the_next():
    first, _, _ = parsed("--stop", "a")
    second, _, _ = parsed("--stop", "b")
    assert (first.stop, second.stop) == (["a"], ["b"])


@pytest.mark.parametrize("pair", ["", "=", "7", "7=", "=1", "a=1", "7=b", "1.5=1", "7==1"])
def test_what_is_no_logit_bias(pair):
    with pytest.raises(RequestError, match="ID=BIAS"):
        options.parse_logit_bias([pair])
