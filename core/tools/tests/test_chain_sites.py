"""`sites.toml`: which keys a site has, which go together, and sites of several ops or releases."""

import json

import pytest

from kda_judge.contract.errors import UsageError
from kda_judge.contract.tasks import Task
from kda_tools.models.chain_sites import FILE, sites_of
from kda_tools.models.deferred_ways import WAYS

KEYS = {"release": "0.5.23", "module": "m", "sha256": "0" * 64, "class": "Block"}


def read(folder, **keys):
    """The sites of a task whose file has one site with these keys."""
    entries = "\n".join(f"{key} = {json.dumps(value)}" for key, value in (KEYS | keys).items())
    (folder / FILE).write_text(f"[[site]]\n{entries}\n")
    return sites_of(Task(folder))


@pytest.mark.parametrize(
    ("keys", "place"),
    [
        ({"activation": "act"}, ("activation", "act")),
        ({"ported": "return op(x)"}, ("ported", "return op(x)")),
        ({"activation": "act", "ported": "return op(x)"}, ("activation", "act")),
        ({"layout": "decoder", "ported": "return op(x)"}, ("layout", "decoder")),
    ],
)
def test_lines_for_a_port_are_a_kind_only_where_there_is_no_other(keys, place, tmp_path):
    (site,) = read(tmp_path, op="op", **keys)
    assert (site.kind, site.place, site.ported) == (*place, keys.get("ported", ""))


def test_each_op_of_a_list_has_a_site(tmp_path):
    sites = read(tmp_path, ops=["one", "other"], activation="act")
    assert [site.op for site in sites] == ["one", "other"]
    assert len({site.model_copy(update={"op": ""}) for site in sites}) == 1, "they differ only by their op"


def test_each_release_of_a_table_of_hashes_has_a_site(tmp_path):
    hashes = {release: str(number) * 64 for number, release in enumerate(("0.5.12.post1", "0.5.23"))}
    text = "".join(f'sha256."{release}" = "{digest}"\n' for release, digest in hashes.items())
    (tmp_path / FILE).write_text(f'[[site]]\nops = ["a", "b"]\nmodule = "m"\nclass = "C"\nactivation = "act"\n{text}')
    found = [(site.release, site.sha256, site.op) for site in sites_of(Task(tmp_path))]
    assert found == [(*pair, op) for pair in hashes.items() for op in "ab"]
    (tmp_path / FILE).write_text(
        f'[[site]]\nop = "a"\nrelease = "1"\nmodule = "m"\nclass = "C"\nactivation = "act"\n{text}'
    )
    with pytest.raises(UsageError, match=r"key 'site\.0\.sha256'"):
        sites_of(Task(tmp_path))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        # One kind,
        *(
            ({"op": "op"} | keys, rf"expected one of {', '.join(WAYS)}, got {got}$")
            for keys, got in (
                ({}, "none"),
                ({"activation": ""}, "none"),
                ({"activation": "act", "layout": "decoder"}, "activation and layout"),
                ({"activation": "act", "layout": "decoder", "ported": "return op(x)"}, "activation and layout"),
            )
        ),
        ({"op": "op", "layout": "other"}, r"key 'layout': expected one of .*decoder.*, got 'other'"),
        # a class or a function,
        ({"op": "op", "function": "f", "ported": "return op(x)"}, "expected either class or function, got both"),
        ({"op": "op", "class": "", "ported": "return op(x)"}, "expected either class or function, got neither"),
        (
            {"op": "op", "class": "", "function": "f", "layout": "decoder"},
            "key 'function': expected it with 'ported' alone, got 'layout'",
        ),
        # and an op or a list of them.
        ({"activation": "act", "op": "one", "ops": ["other"]}, "unknown key 'site.0.ops'"),
        ({"activation": "act", "ops": []}, "missing key 'site.0.op'"),
        ({"activation": "act", "ops": "one"}, "missing key 'site.0.op'"),
        ({"activation": "act", "ops": [1]}, "key 'site.0.op': Input should be a valid string, got 1"),
        ({"activation": "act"}, "missing key 'site.0.op'"),
    ],
)
def test_keys_that_make_no_site(keys, message, tmp_path):
    with pytest.raises(UsageError, match=rf"(?m)sites\.toml: .*{message}"):
        read(tmp_path, **keys)
