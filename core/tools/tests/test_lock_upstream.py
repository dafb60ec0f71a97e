"""`kda lock`: it finds what an arm needs of a wheel, and says what it cannot find."""

import hashlib
import zipfile

import pytest

from kda_judge.contract.errors import UpstreamError, UsageError
from kda_judge.contract.tasks import Task
from kda_tools.project.lock_upstream import lock

FILES = {
    "sglang/__init__.py": "import sglang.everything\n",
    "sglang/everything.py": "",
    "sglang/ops/__init__.py": "HELD = 1\n",
    "sglang/ops/gelu.py": (
        "from sglang import __version__\n"
        "from sglang.srt.utils.common import is_cuda\n"
        "from sglang.ops import HELD\n"
        "from . import siblings\n"
        "from .deep.inner import name\n"
        "def call(kind):\n"
        "    import sglang.ops.lazily\n"
        "    build('gelu.cu')\n"
    ),
    "sglang/ops/siblings.py": "find_spec('sglang.ops.named')\n",
    "sglang/ops/deep/inner.py": "from ..back import here\n",
    "sglang/ops/back.py": "here = 1\n",
    "sglang/ops/lazily.py": "import torch, sglang.nowhere\n",
    "sglang/ops/named.py": "",
    "sglang/ops/csrc/gelu.cu": '#include <cuda.h>\n  #  include "deep/first.cuh"\n',
    "sglang/ops/include/deep/first.cuh": "#include <second.h>\n",
    "sglang/ops/include/second.h": "",
    "sglang/other/include/second.h": "",
    "sglang/ops/fallback_torch.py": "import sglang.ops.behind\n",
    "sglang/ops/behind.py": "",
    "sglang/srt/utils/common.py": "raise RuntimeError('a stand-in is there instead')\n",
}
NEEDED = {
    *("__init__", "gelu", "siblings", "named", "deep/inner", "back", "lazily"),
    *("csrc/gelu.cu", "include/deep/first.cuh", "include/second.h"),
}


@pytest.fixture
def task(tmp_path):
    folder = tmp_path / "k01_gelu"
    (folder / "baseline").mkdir(parents=True)
    (folder / "baseline" / "primary.py").write_text("from .common import gelu\n")
    (folder / "baseline" / "common.py").write_text("from sglang.ops.gelu import call as gelu\n")
    wheel = tmp_path / "sglang-1.0-cp312-cp312-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(name, content)
    (folder / "config.toml").write_text(
        "\n".join(
            [
                '[task]\nop = "gelu"\ntitle = "GELU"',
                '[ops.gelu]\ninputs = ["x"]\noutputs = ["y"]\nlike = { y = "x" }',
                '[upstream."sglang-1.0"]\npackage = "sglang"\nversion = "1.0"\npython = "312"\nplatform = "any"',
                f'wheel_sha256 = "{"0" * 64}"\nlicence = "MIT"\nfiles = "baseline/files.sha256"',
                '[arms.baseline]\nmodule = "baseline.primary"\nupstream = "sglang-1.0"\ndevices = ["cuda"]',
                '[arms.solution]\nmodule = "solution"\ndevices = ["cuda"]',
                '[tolerance.float32]\natol = 1e-5\nrtol = 1e-5\nreason = "roundings"',
                '[targets.h200]\ncapability = "sm_90a"',
                "[bench]",
            ]
        )
    )
    return Task(folder), wheel


def listed(task):
    lines = (task.path / "baseline" / "files.sha256").read_text().splitlines()
    return {line.split("  ")[1]: line.split("  ")[0] for line in lines if not line.startswith("#")}


def run(task, wheel, *also, without=()):
    (pin,) = task.config.upstream.values()
    return lock(task, pin, wheel, also, without)


def test_finds_what_the_arm_needs(task):
    found = run(*task)
    got = listed(task[0])
    names = {name.removeprefix("sglang/ops/").removesuffix(".py") for name in got}
    assert names == NEEDED
    for name, digest in got.items():
        assert digest == hashlib.sha256(FILES[name].encode()).hexdigest()
    assert found.missing == ["sglang/ops/lazily.py:1: sglang.nowhere: neither in the wheel nor a stand-in"]


def test_what_nothing_names_is_asked_for_and_kept(task):
    run(*task, "*/fallback_torch.py")
    run(*task)
    assert {"sglang/ops/fallback_torch.py", "sglang/ops/behind.py"} <= set(listed(task[0]))


def test_what_is_left_out_is_not_followed(task):
    run(*task, without=["*/lazily.py", "*/first.cuh"])
    assert run(*task).missing == []
    assert not {"sglang/ops/lazily.py", "sglang/ops/include/deep/first.cuh", "sglang/ops/include/second.h"} & set(
        listed(task[0])
    )


def test_says_what_is_wrong(task):
    with pytest.raises(UsageError, match=r"\*/nothing.py: the wheel holds no such file"):
        run(*task, "*/nothing.py")
    (task[0].path / "baseline" / "primary.py").write_text("import (\n")
    with pytest.raises(UpstreamError, match=r"primary.py: expected an arm's Python source"):
        run(*task)
    (task[0].path / "baseline" / "primary.py").unlink()
    with pytest.raises(UpstreamError, match=r"primary.py: expected an arm's Python source"):
        run(*task)
