"""Policies as they are typed: the names of the command line's options, and every mistake in a sentence."""

import subprocess
import sys

import pytest

from kvine.cli.options import CacheOptions
from kvine.config import CacheConfig
from kvine.errors import RequestError
from kvine.evidence.quality.policies import option_names, parse_policies, sweep_policies


def test_the_syntax() -> None:
    policies, refused = parse_policies(
        "exact; window=256,sinks=4 ;kv-dtype=fp16; "
        "kv_dtype=bf16, window=512,sinks=2,sink-rule=in-cache,--block-size=16; window=64,global-tokens=0:4+9:12"
    )
    assert refused == []
    assert [(policy.name, policy.cache) for policy in policies] == [
        ("exact", CacheConfig()),
        ("window=256,sinks=4", CacheConfig(window=256, sink_tokens=4)),
        ("kv-dtype=fp16", CacheConfig(kv_dtype="fp16")),
        (
            "kv-dtype=bf16,window=512,sinks=2,sink-rule=in_cache,block-size=16",
            CacheConfig(kv_dtype="bf16", window=512, sink_tokens=2, sink_rule="in_cache", block_size=16),
        ),
        ("window=64,global-tokens=0:4+9:12", CacheConfig(window=64, global_tokens=((0, 4), (9, 12)))),
    ]


def test_a_name_can_be_typed_again() -> None:
    policies, _ = parse_policies("exact; window=256,sinks=4,sink-rule=in-cache; kv-dtype=fp16")
    assert parse_policies("; ".join(policy.name for policy in policies))[0] == policies


def test_every_option_of_a_policy_is_one_of_the_command_line() -> None:
    assert {name.replace("-", "_") for name in option_names()} <= set(CacheOptions.__dataclass_fields__)
    assert {"window", "sinks", "sink-rule", "kv-dtype", "block-size"} <= set(option_names())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "names none"),
        (" ; ", "names none"),
        ("window", "is not NAME=VALUE"),
        ("window=", "is not NAME=VALUE"),
        ("window=8,,sinks=4", "is not NAME=VALUE"),
        ("exact,window=8", "is not NAME=VALUE"),
        ("width=8", "sets 'width': choose among block-size, kv-dtype, window, sinks"),
        ("kv-memory=1GiB", "sets 'kv-memory'"),
        ("window=8,window=9", "sets window twice"),
        ("window=8,global-tokens=4", "global-tokens=4 names no positions"),
    ],
)
def test_what_is_no_list_of_policies_is_a_sentence(text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        parse_policies(text)


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ("sinks=4", "Sinks need a window"),
        ("window=0", "window is 0"),
        ("window=many", "window is 'many'"),
        ("window=-5", "window is '-5'"),
        ("window=8.5", "window is '8.5'"),
        ("window=8,sinks=4,sink-rule=none", "sink_rule 'none' is unknown"),
        ("kv-dtype=int3", "kv_dtype 'int3' is unknown"),
        ("kv-dtype=8", "kv_dtype '8' is unknown"),
        ("block-size=0", "block_size is 0"),
    ],
)
def test_what_cannot_be_is_refused_with_its_reason_and_the_rest_stays(policy: str, reason: str) -> None:
    policies, refused = parse_policies(f"exact; {policy}; window=8")
    assert [one.name for one in policies] == ["exact", "window=8"]
    assert [one.name for one in refused] == [policy] and reason in refused[0].reason


def test_a_sweep_has_windows_sinks_and_codecs_alone_and_together() -> None:
    policies, refused = sweep_policies(4096, "fp32")
    names = [policy.name for policy in policies]
    assert names[0] == "exact" and len(names) == len(set(names)) >= 9
    assert {policy.cache.window for policy in policies} == {None, 2048, 1024, 512}
    assert {policy.cache.sink_tokens for policy in policies} == {0, 4}
    assert any(policy.cache.window and policy.cache.kv_dtype == "bf16" for policy in policies)
    assert all("unknown" in one.reason for one in refused), "nothing but a codec that this version lacks"


def test_storing_in_the_compute_dtype_is_no_policy_of_its_own() -> None:
    assert not [policy for policy in sweep_policies(512, "bf16")[0] if policy.cache.kv_dtype == "bf16"]


def test_policies_are_read_without_torch() -> None:
    code = (
        "import sys; from kvine.evidence.quality import parse_policies; parse_policies('window=8');"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
